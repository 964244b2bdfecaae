"""Entry, the meaning of a name in a peer's pickle, and the interface of an allow-list."""

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
        value: what the pickle gets for the name. None: this entry, which no opcode can use.
        build: runs when an opcode of the pickle calls the named object; None: it may not be called.
        new: runs when an opcode makes an instance without __init__; None: it may not be made.
        serve: runs when the name is the function of a request; None: it may not be requested.
        set_state: takes what `build` has returned and the state that an opcode gives it, once;
            None: the rules for its class say what state it may get.
    """

    name: str
    value: Any = None
    build: Callable[..., Any] | None = None
    new: Callable[..., Any] | None = None
    serve: Callable[..., Any] | None = None
    set_state: Callable[[Any, Any], None] | None = None

    @property
    def given(self) -> Any:
        """The object that goes on the reader's stack for the name."""
        return self if self.value is None else self.value


class Request(NamedTuple):
    """A call that is allowed; no pickle can name this class, so only our code makes it."""

    func: Callable[..., Any]
    args: tuple[Any, ...] | list[Any]
    kwargs: dict[str, Any]


class Allowed(Protocol):
    """The methods of allow_list.AllowList that unpickling.py and protocol.py use."""

    #: Stands for builtins.getattr, by which pickle names methods.
    getattr: Entry

    def find(self, module: str, name: str) -> Entry:
        """Return what a name in a pickle stands for."""

    def attribute(self, owner: Any, name: Any) -> Entry:
        """Return a method that a pickle names by getattr."""

    def allows_class(self, cls: Any) -> bool:
        """Return whether the class, or its module, is listed."""

    def may_have_state(self, cls: type) -> bool:
        """Return whether a pickle may set attributes of instances of the class."""

    def listed(self, function: Any) -> Any:
        """Return the function, if an entry names it; else raise."""

    def traced(self, function: Any, named: Mapping[int, Entry]) -> Any:
        """Return the profiler's wrapper around a named function; None if it is something else."""

    def refusal(self, what: str) -> errors.RefusedError:
        """Return the error for a refusal, and log the refusal of this name once."""
