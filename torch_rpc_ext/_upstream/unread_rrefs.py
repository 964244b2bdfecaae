"""RRefs in messages that nobody reads.

When torch pickles an RRef it counts one more holder (a fork) and waits until the reader of the
message confirms that. If nobody reads the message, the owner keeps the value for ever, and shutdown
waits for it. So whoever drops a message says so here:

- a sender, whose message will not be read: undelivered();
- a receiver that cannot read a message, or does not want to: unread().

A pickle is searched for RRefs without calling or making anything that the pickle names.

Source: torch/csrc/distributed/rpc/py_rref.cpp, PyRRef::pickle; torch/csrc/jit/serialization/
pickler.cpp, Pickler::pushRRef.
"""

from __future__ import annotations

import io
import logging
import pickle
import pickletools
from collections.abc import Iterator
from typing import Any

from torch_rpc_ext._native import loader

logger = logging.getLogger(__name__)

# An RRef as torch pickles it: the ids of its owner, of the RRef (two numbers) and of the fork (two
# numbers), the id of the worker that passes it on, and the name of its type.
Fork = tuple[int, int, int, int, int, int, str]


def undelivered(payload: bytes) -> None:
    """Release the RRefs in a message of this worker that no worker will read.

    Also for a message whose reader has died: the RRefs that it has read go, too.

    Args:
        payload: a pickle of Python's or of torch's.
    """
    give_up(forks_in(payload))


def give_up(forks: list[Fork]) -> None:
    """Release RRefs that this worker has pickled and that no worker will read. Never raises."""
    _each("give_up_fork", forks)


def unread(payload: bytes) -> None:
    """Confirm the RRefs in a message to this worker, and release those that it has not read.

    Args:
        payload: a pickle of Python's or of torch's.
    """
    _each("confirm_fork", forks_in(payload))


def _each(act: str, forks: list[Fork]) -> None:
    for fork in forks:
        try:
            getattr(loader.load(), act)(*fork)
        except Exception as error:  # RPC has ended, or the pickle is not what it seems
            logger.debug("could not release the RRef %s: %s", fork, error)


def forks_in(payload: bytes) -> list[Fork]:
    """Return the RRefs in a pickle, as far as the pickle can be read."""
    if b"rref" not in payload:  # a part of the name of each function that makes an RRef
        return []
    machine = _Machine()
    try:
        for opcode, argument in _opcodes(io.BytesIO(payload)):
            machine.step(opcode, argument)
    except Exception as error:
        logger.debug("a pickle with RRefs cannot be read to its end: %s", error)
    return machine.forks


def _opcodes(file: io.BytesIO) -> Iterator[tuple[Any, Any]]:
    """Yield what pickletools.genops() yields, up to an opcode that no worker writes.

    Such an opcode has a line of text as its argument, and to read the line may import modules.
    """
    while (code := file.read(1)) not in (b"", pickle.STOP):
        opcode = _OPCODES[code]
        if opcode.arg is None:
            yield opcode, None
        elif opcode.proto > 0 or code == pickle.GLOBAL:
            yield opcode, opcode.arg.reader(file)
        else:
            raise ValueError(f"the opcode {opcode.name}")


_OPCODES: dict[bytes, Any] = {each.code.encode("latin-1"): each for each in pickletools.opcodes}


class _Mark: ...


class _Machine:
    """Follows a pickle on a stack of numbers, texts and tuples, and makes no other object.

    So a hostile pickle can do nothing, and RRefs that the machine misses only stay.
    """

    def __init__(self) -> None:
        self.forks: list[Fork] = []
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, opcode: Any, argument: Any) -> None:
        name, stack = opcode.name, self._stack
        if name == "MARK":
            stack.append(_Mark)
        elif name in _SCALARS:
            stack.append(argument)
        elif name in _PUTS:
            self._memo[len(self._memo) if argument is None else argument] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo.get(argument))
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif name in _TUPLES:
            size = _TUPLES[name]
            stack[-size:] = [tuple(stack[-size:])]
        elif name == "GLOBAL":
            stack.append((_Mark, *argument.split(" ")))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [(_Mark, *stack[-2:])]
        elif name == "REDUCE":
            stack[-2:] = [self._call(*stack[-2:])]
        else:
            self._other(opcode)

    def _other(self, opcode: Any) -> None:
        taken = opcode.stack_before
        if pickletools.markobject in taken:
            self._pop_to_mark()
            taken = taken[: taken.index(pickletools.markobject)]
        if taken:
            del self._stack[-len(taken) :]
        self._stack.extend([None] * len(opcode.stack_after))

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self._stack.pop()) is not _Mark:
            items.append(item)
        return items[::-1]

    def _call(self, function: Any, args: Any) -> Any:
        """Return what stands for the result."""
        if function == _GETATTR and args[1:] == ("_py_rref_receiver",):
            return _RECEIVER
        if function is _RECEIVER:
            self._found(*args)
        elif function == _RREF:
            self._found(args)
        return None

    def _found(self, fork: Any) -> None:
        if len(fork) == 7 and all(type(part) is int for part in fork[:6]):
            self.forks.append(fork)


_SCALARS = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
)
_PUTS = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"BINGET", "LONG_BINGET"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# How the machine writes a name: _Mark is on no pickle's stack as a value.
_GETATTR = (_Mark, "builtins", "getattr")
_RREF = (_Mark, "torch.distributed.rpc", "rref")  # torch's pickles call this
_RECEIVER = object()  # Python's pickles call this classmethod, which they get by getattr()
