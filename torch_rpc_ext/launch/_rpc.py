"""init_rpc and shutdown with any back end, as they run on the workers and here."""

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
        number: how often init_rpc has been called before, the same for all.
        options: keyword arguments of the back end's options.
    """

    backend: str
    world_size: int
    number: int
    options: dict[str, Any]

    def check(self) -> None:
        """Raise for what every worker would raise for.

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
            # Its entry in the registry drops what it does not know without a word.
            return _rpc().TensorPipeRpcBackendOptions(**self.options)
        constants = _rpc().constants
        given = {"rpc_timeout": constants.DEFAULT_RPC_TIMEOUT_SEC, **self.options}
        return _rpc().backend_registry.construct_rpc_backend_options(backend, **given)


def _align(number: int) -> None:
    """Make this process count as all of the session do.

    Upstream counts in each process, and processes with different pasts would not find each other:
    init_rpc puts the number of its calls before the store's keys, and shutdown() numbers the
    meetings of workers with the same names.
    """
    rpc = _rpc()
    with rpc._init_counter_lock:
        rpc._init_counter = number
    with rpc.api._all_gather_dict_lock:
        rpc.api._all_gather_sequence_id.clear()


def init_count() -> int:
    """How often this process has called rpc.init_rpc."""
    return int(_rpc()._init_counter)


def is_initialized() -> bool:
    """Whether this process has an RPC agent."""
    return bool(_rpc().api._is_current_rpc_agent_set())


def finish_work(timeout: float) -> None:
    """Wait for all workers to come here and let go of all RRefs: the first half of a graceful
    rpc.shutdown."""
    api = _rpc().api
    api._wait_all_workers(timeout)
    api._delete_all_user_and_unforked_owner_rrefs()


def needs_halves() -> bool:
    """Whether a graceful rpc.shutdown can hang in this process where its halves do not.

    TENSORPIPE's second half, TensorPipeAgent::join, numbers its barriers in each process, so
    processes that have shut down different numbers of times wait for each other without an end.
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
    """Without what TENSORPIPE's init_rpc warns of each time: it is about its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        yield


def _rpc() -> Any:
    # When it is needed: torch takes a second to import, and every worker its own.
    # UCX is registered by then: importing any module of this package has done it.
    import torch.distributed.rpc

    return torch.distributed.rpc
