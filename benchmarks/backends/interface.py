"""The interface of a back end of the benchmarks. To add one: a subclass, a line in __init__.py.

The objects live in the worker processes: ``start`` and ``stop`` run in all workers, ``call`` and
``call_async`` in the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

#: Abilities of a back end, besides functions, that a case may need.
RREFS, AUTOGRAD, HOSTS, GROUPS = "RRefs", "autograd", "two hosts", "start as a group"
CALLERS, REMOTE_FUNCTIONS = "callers but worker 0", "remote functions of torch_rpc_ext"
CUDA, MODELS = "tensors on a GPU", "modules at other workers, and autograd through them"


@dataclass(frozen=True)
class Place:
    """One worker's place in its group.

    Attributes:
        rank: 0 is the caller.
        size: number of workers.
        rendezvous: a file that does not exist yet, the same for all workers of the group.
        address: of this worker's host in its network; empty if all workers are on one host.
        interface: of that address.
    """

    rank: int
    size: int
    rendezvous: str
    address: str = ""
    interface: str = ""


class Pending(Protocol):
    """The future answer of an asynchronous call."""

    def wait(self) -> Any:
        """Wait for the answer and return it; raise what the callee raised."""


class Backend(ABC):
    """One way of calling functions in other processes.

    Thread: calls may come from several threads at once.
    """

    name: ClassVar[str]
    #: The names in functions.py that this back end can call, and the abilities above that it has; a
    #: case that needs more is left out.
    functions: ClassVar[frozenset[str]]
    offers: ClassVar[frozenset[str]] = frozenset()
    #: Takes part on request only, because it needs packages that this project does not need.
    peer: ClassVar[bool] = False
    #: Takes part in the cases on a GPU only.
    gpu: ClassVar[bool] = False

    @classmethod
    def why_not(cls) -> str:
        """Return why this back end cannot be used on this machine; '' if it can."""
        return ""

    @abstractmethod
    def start(self, place: Place) -> None:
        """Join the group; return when calls can be made."""

    @abstractmethod
    def stop(self) -> None:
        """Leave the group, when all others do."""

    def helpers(self) -> list[int]:
        """Return the ids of further processes that work for this back end, once it is started."""
        return []

    @abstractmethod
    def call(self, to: int, function: str, *arguments: Any) -> Any:
        """Call a function by its name in functions.py on a worker, and return its result.

        Back ends that are not torch's take flat float32 tensors, or one list of them.
        """

    @abstractmethod
    def call_async(self, to: int, function: str, *arguments: Any) -> Pending:
        """Start such a call."""

    def call_many(self, to: Sequence[int], function: str, *arguments: Any) -> list[Pending]:
        """Start one call of each of these workers, all with the same arguments."""
        return [self.call_async(rank, function, *arguments) for rank in to]

    def when_done(self, pending: Any, then: Callable[[], None]) -> None:
        """Call `then`, on any thread, once the answer of a call of call_async() is there."""
        raise NotImplementedError(f"{self.name} has no callbacks")
