"""Ray: an actor for each worker, in a process of Ray's."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from typing import Any, ClassVar

import psutil

from benchmarks.backends.interface import Backend, Pending, Place
from benchmarks.functions import FUNCTIONS, PYTHON_FUNCTIONS

_STORE = 3_000_000_000  # bytes of Ray's object store: several of the largest tensors


class Ray(Backend):
    """Ray. Worker 0 starts a cluster on this machine, with an actor in place of each other worker.
    All calls come from worker 0; the other worker processes do nothing."""

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
        self.ray: Any = None
        if place.rank != 0:
            return
        # Ray's processes must find this package, and Ray must not send usage statistics.
        os.environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self.ray = importlib.import_module("ray")
        # A short path, because the paths of Ray's sockets, which are in it, must be short.
        self.folder = tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True)
        self.ray.init(
            num_cpus=place.size,
            include_dashboard=False,
            object_store_memory=_STORE,
            _temp_dir=self.folder.name,
            log_to_driver=False,
            logging_level="ERROR",
        )
        actor = self.ray.remote(_Actor).options(max_concurrency=8)
        self.actors = {rank: actor.remote() for rank in range(1, place.size)}
        self.ray.get([one.call.remote("nothing") for one in self.actors.values()])

    def stop(self) -> None:
        if self.ray is not None:
            self.ray.shutdown()
            self.folder.cleanup()

    def helpers(self) -> list[int]:
        # Raylet, store, and the actors.
        if self.ray is None:
            return []
        return [child.pid for child in psutil.Process().children(recursive=True)]

    def call(self, to: int, function: str, *arguments: Any) -> Any:
        return self.ray.get(self.actors[to].call.remote(function, *arguments))

    def call_async(self, to: int, function: str, *arguments: Any) -> Pending:
        return _Pending(self.ray, self.actors[to].call.remote(function, *arguments))

    def when_done(self, pending: Any, then: Callable[[], None]) -> None:
        pending.reference.future().add_done_callback(lambda _: then())


class _Actor:
    def call(self, function: str, *arguments: Any) -> Any:
        return FUNCTIONS[function](*arguments)


class _Pending:
    def __init__(self, ray: Any, reference: Any) -> None:
        self.ray, self.reference = ray, reference

    def wait(self) -> Any:
        return self.ray.get(self.reference)
