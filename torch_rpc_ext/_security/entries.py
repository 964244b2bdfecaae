"""What a name in a peer's pickle stands for, and what its reader asks of an allow-list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch_rpc_ext import errors


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """What a name in a pickle stands for.

    Attributes:
        name: for texts.
        value: what the pickle gets. None: the entry itself, which nobody can call or look into.
        build: what runs where an opcode of the pickle calls it, None for nothing.
        new: what runs where an opcode makes an instance without __init__, None for nothing.
        serve: what runs where it is the function of a request, None for nothing.
    """

    name: str
    value: Any = None
    build: Callable[..., Any] | None = None
    new: Callable[..., Any] | None = None
    serve: Callable[..., Any] | None = None

    @property
    def given(self) -> Any:
        """What lies on the reader's stack."""
        return self if self.value is None else self.value


class Request(NamedTuple):
    """A call that may be made; no pickle can name this class."""

    func: Callable[..., Any]
    args: tuple[Any, ...] | list[Any]
    kwargs: dict[str, Any]


class Allowed(Protocol):
    """What unpickling.py and protocol.py ask of an allow_list.AllowList, which has the details."""

    #: What pickle names methods by.
    getattr: Entry

    def find(self, module: str, name: str) -> Entry:
        """Return what a name in a pickle stands for."""

    def attribute(self, owner: Any, name: Any) -> Entry:
        """Return a method that pickle names by getattr."""

    def allows_class(self, cls: Any) -> bool:
        """Whether the class is listed, itself or by its module."""

    def may_have_state(self, cls: type) -> bool:
        """Whether a pickle may set the attributes of an instance."""

    def listed(self, function: Any) -> Any:
        """Return a function that an entry names."""

    def traced(self, function: Any, named: Mapping[int, Entry]) -> Any:
        """Return what the profiler has put around a function, None where it is something else."""

    def refusal(self, what: str) -> errors.RefusedError:
        """Make the error, and tell the operator of this worker once."""
