"""torch.distributed.rpc's back ends: UCX and TENSORPIPE, each with its default options."""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from benchmarks.backends.interface import (
    AUTOGRAD,
    CALLERS,
    GROUPS,
    HOSTS,
    REMOTE_FUNCTIONS,
    RREFS,
    Backend,
    Pending,
    Place,
)
from benchmarks.functions import FUNCTIONS


class TorchRpc(Backend):
    """The code that both back ends share: all but the options."""

    functions: ClassVar[frozenset[str]] = frozenset(FUNCTIONS)
    offers = frozenset({RREFS, AUTOGRAD, HOSTS, GROUPS, CALLERS, REMOTE_FUNCTIONS})
    agent: ClassVar[str]

    @abstractmethod
    def options(self, init_method: str) -> dict[str, Any]:
        """Return init_rpc's arguments that choose the back end."""

    def start(self, place: Place) -> None:
        import torch.distributed.rpc

        if place.interface:  # both back ends read these; TENSORPIPE would use the loopback
            os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = place.interface
        # Upstream's init of TENSORPIPE warns about itself (pytorch issue 149393).
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        self.rpc: Any = torch.distributed.rpc
        self.rpc.init_rpc(
            f"worker{place.rank}",
            rank=place.rank,
            world_size=place.size,
            **self.options(f"file://{place.rendezvous}"),
        )
        agent = type(self.rpc.api._get_current_rpc_agent()).__name__
        if agent != self.agent:
            # Under takeover, for example: comparing a back end with itself would be misleading.
            raise RuntimeError(f"{self.name} runs on {agent}, not on {self.agent}")
        self.names = [f"worker{rank}" for rank in range(place.size)]

    def stop(self) -> None:
        self.rpc.shutdown()

    def call(self, to: int, function: str, *arguments: Any) -> Any:
        return self.rpc.rpc_sync(self.names[to], FUNCTIONS[function], args=arguments)

    def call_async(self, to: int, function: str, *arguments: Any) -> Pending:
        future: Pending = self.rpc.rpc_async(self.names[to], FUNCTIONS[function], args=arguments)
        return future

    def when_done(self, pending: Any, then: Callable[[], None]) -> None:
        pending.add_done_callback(lambda _: then())


class Ucx(TorchRpc):
    """Ours."""

    name = "ucx"
    agent = "UcxAgent"

    @classmethod
    def why_not(cls) -> str:
        import torch_rpc_ext

        return str(torch_rpc_ext.info()["ucx"].get("error", ""))

    def options(self, init_method: str) -> dict[str, Any]:
        import torch_rpc_ext

        options = torch_rpc_ext.UcxRpcBackendOptions(init_method=init_method)
        return {"backend": self.rpc.BackendType.UCX, "rpc_backend_options": options}

    def call_many(self, to: Sequence[int], function: str, *arguments: Any) -> list[Pending]:
        import torch_rpc_ext

        names = [self.names[rank] for rank in to]
        return [*torch_rpc_ext.rpc_async_all(names, FUNCTIONS[function], args=arguments)]


class TensorPipe(TorchRpc):
    """Upstream's."""

    name = "tensorpipe"
    agent = "TensorPipeAgent"

    def options(self, init_method: str) -> dict[str, Any]:
        options = self.rpc.TensorPipeRpcBackendOptions(init_method=init_method)
        return {"backend": self.rpc.BackendType.TENSORPIPE, "rpc_backend_options": options}
