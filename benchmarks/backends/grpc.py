"""gRPC as a careful user would use it: one generic method, no size limit, no pickle."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from benchmarks.backends.flat import as_arguments, as_result, pack, unpack
from benchmarks.backends.interface import CALLERS, GROUPS, HOSTS, Backend, Pending, Place
from benchmarks.functions import FUNCTIONS, PYTHON_FUNCTIONS

_METHOD = "/benchmarks/call"
_UNLIMITED = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # By default a server cancels random calls when more than 1000 wait, as in a flood.
    ("grpc.server.max_pending_requests", 1_000_000),
    ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
]
_PATIENCE = 60.0  # s for the other workers to appear


class Grpc(Backend):
    """grpcio, synchronous server with as many threads as torch's back ends have by default."""

    name = "grpc"
    functions: ClassVar[frozenset[str]] = PYTHON_FUNCTIONS
    offers = frozenset({HOSTS, GROUPS, CALLERS})
    peer = True

    @classmethod
    def why_not(cls) -> str:
        try:
            importlib.import_module("grpc")
        except ImportError as error:
            return f"{error} (make bench-all installs it)"
        return ""

    def start(self, place: Place) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it logs each closed connection
        grpc: Any = importlib.import_module("grpc")
        self.place, self.channels = place, {}
        self.server = grpc.server(ThreadPoolExecutor(max_workers=16), options=_UNLIMITED)
        method = grpc.unary_unary_rpc_method_handler(_serve)  # no serializer: bytes as they are
        _, service, call = _METHOD.split("/")
        handler = grpc.method_handlers_generic_handler(service, {call: method})
        self.server.add_generic_rpc_handlers((handler,))
        mine = self._file(place.rank)
        if place.address:
            port = self.server.add_insecure_port(f"{place.address}:0")
            target = f"{place.address}:{port}"
        else:  # between processes of a host, faster than loopback
            target = f"unix:{mine}.socket"
            self.server.add_insecure_port(target)
        self.server.start()
        with open(f"{mine}.new", "w") as file:
            file.write(target)
        os.rename(f"{mine}.new", mine)
        for rank in range(place.size):
            channel = grpc.insecure_channel(self._target(rank), options=_UNLIMITED)
            self.channels[rank] = (channel, channel.unary_unary(_METHOD))

    def stop(self) -> None:
        for channel, _ in self.channels.values():
            channel.close()
        self.server.stop(None).wait()

    def call(self, to: int, function: str, *arguments: Any) -> Any:
        answer = self.channels[to][1](b"".join(pack(function, arguments)), wait_for_ready=True)
        return as_result(unpack(answer)[1])

    def call_async(self, to: int, function: str, *arguments: Any) -> Pending:
        request = b"".join(pack(function, arguments))
        return _Pending(self.channels[to][1].future(request, wait_for_ready=True))

    def when_done(self, pending: Any, then: Callable[[], None]) -> None:
        pending.future.add_done_callback(lambda _: then())

    def _file(self, rank: int) -> str:
        return f"{self.place.rendezvous}.{rank}"

    def _target(self, rank: int) -> str:
        deadline = time.monotonic() + _PATIENCE
        while not os.path.exists(self._file(rank)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"worker {rank} has not started in {_PATIENCE:.0f} s")
            time.sleep(0.001)
        with open(self._file(rank)) as file:
            return file.read()


class _Pending:
    def __init__(self, future: Any) -> None:
        self.future = future

    def wait(self) -> Any:
        return as_result(unpack(self.future.result())[1])


def _serve(request: bytes, context: object) -> bytes:
    function, arguments = unpack(request)
    return b"".join(pack(function, as_arguments(FUNCTIONS[function](*arguments))))
