"""init_rpc and shutdown with any back end; runs on the workers and in the group's process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_rpc_ext._upstream import torch_names


@dataclass(frozen=True)
class Session:
    """One init_rpc of all workers.

    Args:
        backend: a name in rpc.BackendType.
        world_size: how many workers.
        number: number of this init_rpc, the same on all workers; see _align().
        options: keyword arguments of the back end's options.
    """

    backend: str
    world_size: int
    number: int
    options: dict[str, Any]

    def check(self) -> None:
        """Raise here what init() would raise on every worker.

        Raises:
            ValueError: no such back end, or a wrong value of an option.
            TypeError: no such option.
            ImportError: this torch lacks what is needed.
        """
        torch_names.require("torch_rpc_ext.launch")
        self._options(self._type())

    def init(self, name: str, rank: int) -> None:
        """Call rpc.init_rpc."""
        rpc, backend = _rpc(), self._type()
        _align(self.number)
        with _quiet():
            rpc.init_rpc(
                name,
                backend=backend,
                rank=rank,
                world_size=self.world_size,
                rpc_backend_options=self._options(backend),
            )

    def _type(self) -> Any:
        known = _rpc().backend_registry.BackendType
        if self.backend not in known.__members__:
            names = ", ".join(known.__members__)
            raise ValueError(f"backend must be one of {names}, got {self.backend!r}")
        return known[self.backend]

    def _options(self, backend: Any) -> Any:
        if self.backend == "TENSORPIPE":
            # Not by its entry in the registry, which drops unknown options without a word.
            return _rpc().TensorPipeRpcBackendOptions(**self.options)
        constants = _rpc().constants
        given = {"rpc_timeout": constants.DEFAULT_RPC_TIMEOUT_SEC, **self.options}
        return _rpc().backend_registry.construct_rpc_backend_options(backend, **given)


def _align(number: int) -> None:
    """Set upstream's counters of this process to the values that all workers of the session use.

    Upstream counts calls in each process: init_rpc puts its count into the store's keys, and
    shutdown() counts the meetings of workers with the same names. Processes that have called them
    different numbers of times would not find each other.
    """
    rpc = _rpc()
    with rpc._init_counter_lock:
        rpc._init_counter = number
    with rpc.api._all_gather_dict_lock:
        rpc.api._all_gather_sequence_id.clear()


def init_count() -> int:
    """Return how often this process has called rpc.init_rpc."""
    return int(_rpc()._init_counter)


def is_initialized() -> bool:
    """Return whether this process has an RPC agent."""
    return bool(_rpc().api._is_current_rpc_agent_set())


def finish_work(timeout: float) -> None:
    """Run the first half of a graceful rpc.shutdown: wait for all workers, then drop all RRefs."""
    api = _rpc().api
    api._wait_all_workers(timeout)
    api._delete_all_user_and_unforked_owner_rrefs()


def needs_halves() -> bool:
    """Return whether to run finish_work() and a shutdown that is not graceful, one after the other.

    TENSORPIPE's agent needs this: the second half of its graceful shutdown, TensorPipeAgent::join,
    counts its barriers in each process, so processes that have shut down different numbers of times
    would wait for each other without an end.
    """
    return is_initialized() and type(_rpc().api._get_current_rpc_agent()).__name__ == (
        "TensorPipeAgent"
    )


def shutdown(graceful: bool, timeout: float) -> None:
    """Call rpc.shutdown, if there is an agent."""
    if is_initialized():
        _rpc().shutdown(graceful=graceful, timeout=timeout if graceful else 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warning that TENSORPIPE's init_rpc gives each time: users cannot act on it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        yield


def _rpc() -> Any:
    # Imported late, because importing torch takes a second in each worker. BackendType.UCX is
    # registered: importing any module of this package does that.
    import torch.distributed.rpc

    return torch.distributed.rpc
