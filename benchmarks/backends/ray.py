"""Ray: an actor a worker, each in a process of Ray's own."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from typing import Any, ClassVar

import psutil

from benchmarks.backends.interface import Backend, Pending, Place
from benchmarks.functions import FUNCTIONS, PYTHON_FUNCTIONS

_PATIENCE = 100.0  # s for the cluster to start
_STORE = 3_000_000_000  # bytes of Ray's object store: several of the largest tensors


class Ray(Backend):
    """Worker 0 starts a cluster on this machine, the others join; each makes one actor."""

    name = "ray"
    functions: ClassVar[frozenset[str]] = PYTHON_FUNCTIONS
    peer = True

    @classmethod
    def why_not(cls) -> str:
        try:
            importlib.import_module("ray")
        except ImportError as error:
            return f"{error} (make bench-all installs it)"
        return ""

    def start(self, place: Place) -> None:
        # Its processes must find this package, and it must not report to anybody.
        os.environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
        ray: Any = importlib.import_module("ray")
        self.ray, address = ray, f"{place.rendezvous}.ray"
        common = {"namespace": "benchmarks", "log_to_driver": False, "logging_level": "ERROR"}
        if place.rank == 0:
            # A path of its own, short: Ray's sockets lie in it.
            self.folder = tempfile.TemporaryDirectory(prefix="ray_")
            started = ray.init(
                num_cpus=2 * place.size,
                include_dashboard=False,
                object_store_memory=_STORE,
                _temp_dir=self.folder.name,
                **common,
            )
            with open(f"{address}.new", "w") as file:
                file.write(started.address_info["address"])
            os.rename(f"{address}.new", address)
        else:
            _wait_for(lambda: os.path.exists(address), "the cluster")
            with open(address) as file:
                ray.init(address=file.read(), **common)
        mine = ray.remote(_Actor).options(name=f"worker{place.rank}", max_concurrency=8).remote()
        ray.get(mine.call.remote("nothing"))
        self.mine = mine
        self.actors = [self._find(rank) for rank in range(place.size)]

    def _find(self, rank: int) -> Any:
        found: list[Any] = []

        def look() -> bool:
            try:
                found.append(self.ray.get_actor(f"worker{rank}"))
            except ValueError:
                return False
            return True

        _wait_for(look, f"the actor of worker {rank}")
        return found[0]

    def stop(self) -> None:
        self.ray.shutdown()

    def helpers(self) -> list[int]:
        # Worker 0's: raylet, store, and the actors of all.
        return [child.pid for child in psutil.Process().children(recursive=True)]

    def call(self, to: int, function: str, *arguments: Any) -> Any:
        return self.ray.get(self.actors[to].call.remote(function, *arguments))

    def call_async(self, to: int, function: str, *arguments: Any) -> Pending:
        return _Pending(self.ray, self.actors[to].call.remote(function, *arguments))


class _Actor:
    def call(self, function: str, *arguments: Any) -> Any:
        return FUNCTIONS[function](*arguments)


class _Pending:
    def __init__(self, ray: Any, reference: Any) -> None:
        self.ray, self.reference = ray, reference

    def wait(self) -> Any:
        return self.ray.get(self.reference)


def _wait_for(there: Any, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} has not come in {_PATIENCE:.0f} s")
        time.sleep(0.05)
