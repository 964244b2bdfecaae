"""The reader of a peer's pickle where the option allow_list says what the pickle may name.

pickle's own reader calls whatever is on its stack. Here an opcode calls only objects that this same
pickle has named (Entry), recognised by identity and not by name or ==. What such a call returns is
data, which no later opcode may call. Opcodes that no worker writes are refused.

Source: pickle.py, class _Unpickler; pickletools.py for what each opcode means.
"""

from __future__ import annotations

import datetime
import functools
import pickle
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch_rpc_ext._base.attributes import FIELDS, attribute_of, is_plain_value
from torch_rpc_ext._security.entries import Allowed, Entry, Request
from torch_rpc_ext._upstream import exception_parts

# Limit for levels of tuples and slices inside of each other: hash() of them (of slices from Python
# 3.12 on) recurses in C and overflows the stack at about 100,000. No honest pickle has so many,
# because pickle's writers recurse too. hash() of a frozenset does not recurse: the set keeps the
# hashes.
_MOST_NESTED = 1000
# For how many levels an object with a __hash__ in Python counts, such as a frozen dataclass. Python
# lets 1000 of these be inside of each other, and with more than 150 levels around each the stack
# overflows. So at most 20 tuples and slices may be around such an object.
_CODE_LEVELS = _MOST_NESTED - 20
# Python 3.11 frees these, and exceptions with fields in C, by recursion, which overflows the stack
# at about 100,000 inside of each other. Their depth is not known while they are filled, so links
# between them are counted.
_RECURSIVE = (slice, deque, defaultdict, BaseException)
_MOST_LINKS = 10_000

_DATED = (datetime.date, datetime.time)
_DATE = dict.fromkeys(("year", "month", "day"), datetime.date)
# Class -> what its constructor takes, and of which class that is an attribute.
_DATES: dict[Any, dict[str, Any]] = {
    datetime.datetime: {
        **_DATE,
        **dict.fromkeys(("hour", "minute", "second", "microsecond"), datetime.datetime),
    },
    datetime.date: _DATE,
    datetime.time: dict.fromkeys(("hour", "minute", "second", "microsecond"), datetime.time),
}

# Classes that a call may not return while a pickle is read.
_CODE = (
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    CodeType,
    FrameType,
    classmethod,
    staticmethod,
)


class Reader:
    """Replaces pickle.Unpickler.

    Args:
        file: holds the pickle.
        allowed: says what the pickle may name.
    """

    def __init__(self, file: Any, allowed: Allowed) -> None:
        self._data: bytes = file.read()
        self._at = 0
        self._allowed = allowed
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        # id() of an object that this pickle got for a name -> its entry, which keeps it alive.
        self._named: dict[int, Entry] = {}
        # id() of an object whose state this pickle has still to set -> (the object,
        # Entry.set_state). The object is held so that no other object can get its id().
        self._unset: dict[int, tuple[Any, Any]] = {}
        # id() of a tuple or slice that holds some -> how many levels of them are inside of it.
        self._nested: dict[int, int] = {}
        # How often an object of _RECURSIVE was put directly into another such object.
        self._links = 0

    def load(self) -> Any:
        """Return what the pickle holds.

        Raises:
            RefusedError: the pickle does something that the allow-list does not permit.
            Exception: the bytes are no pickle, or building a value raises.
        """
        data, size, opcodes = self._data, len(self._data), _OPCODES
        while self._at < size:
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                return self._stack.pop()
            run = opcodes.get(code)
            if run is None:
                raise self._allowed.refusal(f"opcode 0x{code:02x} of a pickle")
            run(self)
        raise EOFError("a pickle ends in the middle")

    def request(self, call: Any) -> Request:
        """Return the call that this pickle asks for.

        Args:
            call: the internal.PythonUDF that load() has returned.

        Raises:
            RefusedError: the pickle has not named the function, or requests may not call it.
            TypeError: the arguments are no tuple and dict.
        """
        function, args, kwargs = call
        entry = self._named.get(id(function))
        serve = self._allowed.traced(function, self._named) if entry is None else entry.serve
        if serve is None:
            raise self._allowed.refusal(_described(function) if entry is None else entry.name)
        check_arguments(args, kwargs)
        return Request(serve, args, kwargs)

    # ---- bytes -------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        begin, end = self._at, self._at + size
        if end > len(self._data):
            raise pickle.UnpicklingError("a pickle ends in the middle")
        self._at = end
        return self._data[begin:end]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode()

    def _text(self, size: int) -> None:
        self._stack.append(str(self._take(size), "utf-8", "surrogatepass"))

    def _signed(self) -> None:
        self._stack.append(struct.unpack("<i", self._take(4))[0])

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _long(self, size: int) -> None:
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _protocol(self) -> None:
        version = self._number(1)
        if version > pickle.HIGHEST_PROTOCOL:
            raise ValueError(f"unsupported pickle protocol: {version}")

    # ---- containers --------------------------------------------------------

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _pop(self) -> None:
        if self._stack:
            del self._stack[-1]
        else:
            self._since_mark()

    def _tuple(self, size: int) -> None:
        stack = self._stack
        if len(stack) < size:
            raise IndexError("pop from an empty stack")
        made = tuple(stack[-size:])
        del stack[-size:]
        self._push(made)

    def _push(self, made: Any) -> None:
        """Put a new value on the stack; count levels if the value is a tuple or slice. What is in
        these never changes, so that the levels inside are known when the value is made."""
        if issubclass(type(made), (tuple, slice)):
            depth = 0
            for item in _items(made):
                cls = type(item)
                if levels := _levels(cls):  # type: ignore[arg-type]  # a type has a hash
                    # Another object may have the id() of a tuple that is gone.
                    holds = issubclass(cls, (tuple, slice))
                    inside = self._nested.get(id(item), 0) if holds else 0
                    depth = max(depth, inside + levels)
            if depth > _MOST_NESTED:
                raise pickle.UnpicklingError(
                    f"more than {_MOST_NESTED} tuples and slices in each other, or more than "
                    f"{_MOST_NESTED - _CODE_LEVELS} around an object with a __hash__ in Python"
                )
            if depth:
                self._nested[id(made)] = depth
            else:
                self._nested.pop(id(made), None)
        self._stack.append(made)

    def _link(self, target: Any, items: Iterable[Any]) -> None:
        """Count the links that putting items into an object makes."""
        if issubclass(type(target), _RECURSIVE):
            self._links += sum(issubclass(type(item), _RECURSIVE) for item in items)
            if self._links > _MOST_LINKS:
                raise pickle.UnpicklingError(
                    f"more than {_MOST_LINKS} slices, deques, defaultdicts and exceptions in each "
                    "other"
                )

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
            return
        self._link(target, items)
        base = self._base(target, (list, deque))
        base.extend(target, items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise pickle.UnpicklingError("a key without a value")
        pairs = zip(items[::2], items[1::2], strict=True)
        if type(target) is dict:
            target.update(pairs)
            return
        self._link(target, items)
        base = self._base(target, (OrderedDict, defaultdict, dict))
        for key, value in pairs:
            base.__setitem__(target, key, value)

    def _add_items(self) -> None:
        items = self._since_mark()
        target = self._stack[-1]
        self._base(target, (set,)).update(target, items)

    def _base(self, target: Any, kinds: tuple[type[Any], ...]) -> Any:
        """Return the class of `kinds` that a container derives from. Callers call the methods of
        that class, so that no method of a derived, listed class runs."""
        cls = type(target)
        for kind in kinds:
            if cls is kind or (issubclass(cls, kind) and self._allowed.allows_class(cls)):
                return kind
        raise self._allowed.refusal(f"a change of a {full_name(cls)}")

    # ---- names and calls ---------------------------------------------------

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self._allowed.refusal("a name that is no str")
        self._give(self._allowed.find(module, name))

    def _give(self, entry: Entry) -> None:
        given = entry.given
        self._named[id(given)] = entry
        self._stack.append(given)

    def _global(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def _stack_global(self) -> None:
        name = self._stack.pop()
        self._name(self._stack.pop(), name)

    def _reduce(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        entry = self._named.get(id(function))
        if type(args) is not tuple:
            raise self._allowed.refusal("a call without a tuple of arguments")
        if entry is not None and entry is self._allowed.getattr:
            # pickle names a method by a call of getattr, so this counts as a name.
            self._give(self._allowed.attribute(*args))
            return
        if entry is None or entry.build is None:
            raise self._allowed.refusal(self._uncalled(entry, function))
        made = self._checked(entry, entry.build(*args), args)
        self._settle(args)
        if entry.set_state is not None:
            self._unset[id(made)] = made, entry.set_state
        self._push(made)

    def _new(self, kwargs: Any) -> None:
        args, cls = self._stack.pop(), self._stack.pop()
        entry = self._named.get(id(cls))
        if entry is None or entry.new is None:
            raise self._allowed.refusal(self._uncalled(entry, cls))
        if type(args) is not tuple:
            raise self._allowed.refusal("a call without a tuple of arguments")
        check_arguments(args, kwargs)
        self._push(self._checked(entry, entry.new(*args, **kwargs), (*args, *kwargs.values())))

    def _uncalled(self, entry: Entry | None, function: Any) -> str:
        name = _described(function) if entry is None else entry.name
        return f"{name} while a pickle is read"

    def _checked(self, entry: Entry, made: Any, args: tuple[Any, ...]) -> Any:
        cls = type(made)
        if issubclass(cls, _CODE):
            raise self._allowed.refusal(f"a {cls.__name__} that {entry.name} returned")
        if issubclass(cls, deque):
            self._link(made, deque.__iter__(made))
        elif issubclass(cls, defaultdict):
            self._link(made, dict.values(made))
        elif issubclass(cls, BaseException):
            self._check_exception(made)
        elif issubclass(cls, _DATED):
            _check_date(made)
        else:
            self._link(made, args)
        return made

    def _check_exception(self, made: Any) -> None:
        self._link(made, exception_parts.values_in_c(made))
        exception_parts.check_range(made)
        exception_parts.clear_left_there(made)

    def _memo_get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def _memo_put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    # ---- state -------------------------------------------------------------

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        _, set_state = self._unset.pop(id(target), (None, None))
        if set_state is not None:
            set_state(target, state)
            if type(state) is tuple:
                self._settle(state)
            return
        cls = type(target)
        if not self._allowed.may_have_state(cls):
            raise self._allowed.refusal(f"a change of a {full_name(cls)}")
        attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        for each in (attributes, slots):
            if type(each) is dict:
                self._check_attributes(cls, each)
        setstate = attribute_of(cls, "__setstate__")
        if setstate is BaseException.__setstate__:
            setstate = None  # the code below sets attributes one by one too
        if setstate is None:
            self._set_state(target, attributes)
            self._set_state(target, slots)
        elif type(setstate) is not FunctionType:
            raise self._allowed.refusal(f"a change of a {full_name(cls)}")
        elif all(each is None or type(each) is dict for each in (attributes, slots)):
            setstate(target, state)
        elif "__setstate__" in vars(cls):
            setstate(target, state)
            # Only now, because the class alone knows what the names in such a state are.
            self._check_attributes(cls, getattr(target, "__dict__", ()))
        else:
            # An inherited __setstate__ may take other states than dicts: nn.Module's passes its
            # state to dict.update(), which takes pairs too, and nobody has checked their names.
            raise self._allowed.refusal(f"a change of a {full_name(cls)} by no dict")
        if issubclass(cls, BaseException):
            self._check_exception(target)

    def _settle(self, given: tuple[Any, ...]) -> None:
        """Refuse a later state for objects of which another object was made: an array was checked
        with its dtype as the dtype was then, so the dtype must not change."""
        for each in given:
            self._unset.pop(id(each), None)

    def _set_state(self, target: Any, state: Any) -> None:
        if state is None:
            return
        if type(state) is not dict:
            raise self._allowed.refusal(f"a change of a {full_name(type(target))} by no dict")
        for name, value in state.items():
            _set_attribute(target, name, value)

    def _check_attributes(self, cls: type, names: Iterable[Any]) -> None:
        for name in names:
            self._check_attribute(cls, name)

    def _check_attribute(self, cls: type, name: Any) -> None:
        """Permit plain attributes and fields, but neither __special__ names nor methods."""
        is_notes = name == "__notes__" and issubclass(cls, BaseException)
        if not is_notes and not is_plain_value(cls, name):
            raise self._allowed.refusal(f"a change of {full_name(cls)}.{name}")


def _check_date(made: Any) -> None:
    """Raise ValueError for a date that does not exist. Pickles make dates of bytes, of which Python
    looks only at the month; date.ctime() then reads memory beside its tables."""
    for cls, names in _DATES.items():
        if issubclass(type(made), cls):
            cls(*(vars(owner)[name].__get__(made) for name, owner in names.items()))
            return


@functools.lru_cache(maxsize=256)
def _levels(cls: type) -> int:
    """Return how many levels an object of a class adds to the tuple or slice that holds it."""
    of_code = _CODE_LEVELS if isinstance(attribute_of(cls, "__hash__"), FunctionType) else 0
    return of_code + issubclass(cls, (tuple, slice))


def _items(made: Any) -> Iterable[Any]:
    """Return what a tuple or slice holds, without a call of a method of a derived class."""
    if type(made) is slice:
        return made.start, made.stop, made.step
    return tuple.__iter__(made)


def check_arguments(args: Any, kwargs: Any) -> None:
    """Raise TypeError unless `*args` and `**kwargs` can be unpacked without running any code."""
    if type(args) not in (tuple, list):
        raise TypeError(f"arguments must be a tuple, got a {full_name(type(args))}")
    if type(kwargs) is not dict or not all(type(name) is str for name in kwargs):
        raise TypeError("keyword arguments must be a dict with names")


def _set_attribute(target: Any, name: str, value: Any) -> None:
    if isinstance(attribute_of(type(target), name), FIELDS):
        object.__setattr__(target, name, value)
    else:
        target.__dict__[name] = value


def full_name(target: Any) -> str:
    """Return "module.qualname" of an object; '' where it has no such attributes."""
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", None)
    return f"{module}.{name}" if type(module) is str and type(name) is str else ""


def _described(target: Any) -> str:
    return (full_name(target) if isinstance(target, _CODE) else "") or (
        f"a call of a {full_name(type(target))}"
    )


_STOP = pickle.STOP[0]
_OPCODES: dict[int, Callable[[Reader], None]] = {
    code[0]: run
    for code, run in (
        (pickle.PROTO, Reader._protocol),
        (pickle.FRAME, lambda reader: reader._take(8) and None),
        (pickle.NONE, lambda reader: reader._stack.append(None)),
        (pickle.NEWTRUE, lambda reader: reader._stack.append(True)),
        (pickle.NEWFALSE, lambda reader: reader._stack.append(False)),
        (pickle.BININT, Reader._signed),
        (pickle.BININT1, lambda reader: reader._stack.append(reader._number(1))),
        (pickle.BININT2, lambda reader: reader._stack.append(reader._number(2))),
        (pickle.LONG1, lambda reader: reader._long(reader._number(1))),
        (pickle.LONG4, lambda reader: reader._long(reader._number(4))),
        (pickle.BINFLOAT, Reader._float),
        (pickle.SHORT_BINUNICODE, lambda reader: reader._text(reader._number(1))),
        (pickle.BINUNICODE, lambda reader: reader._text(reader._number(4))),
        (pickle.BINUNICODE8, lambda reader: reader._text(reader._number(8))),
        (pickle.SHORT_BINBYTES, lambda r: r._stack.append(r._take(r._number(1)))),
        (pickle.BINBYTES, lambda r: r._stack.append(r._take(r._number(4)))),
        (pickle.BINBYTES8, lambda r: r._stack.append(r._take(r._number(8)))),
        (pickle.BYTEARRAY8, lambda r: r._stack.append(bytearray(r._take(r._number(8))))),
        (pickle.EMPTY_TUPLE, lambda reader: reader._stack.append(())),
        (pickle.TUPLE1, lambda reader: reader._tuple(1)),
        (pickle.TUPLE2, lambda reader: reader._tuple(2)),
        (pickle.TUPLE3, lambda reader: reader._tuple(3)),
        (pickle.TUPLE, lambda reader: reader._push(tuple(reader._since_mark()))),
        (pickle.EMPTY_LIST, lambda reader: reader._stack.append([])),
        (pickle.EMPTY_DICT, lambda reader: reader._stack.append({})),
        (pickle.EMPTY_SET, lambda reader: reader._stack.append(set())),
        (pickle.FROZENSET, lambda reader: reader._push(frozenset(reader._since_mark()))),
        (pickle.APPEND, lambda reader: reader._append([reader._stack.pop()])),
        (pickle.APPENDS, lambda reader: reader._append(reader._since_mark())),
        (pickle.SETITEM, lambda r: r._set_items([r._stack.pop(-2), r._stack.pop()])),
        (pickle.SETITEMS, lambda reader: reader._set_items(reader._since_mark())),
        (pickle.ADDITEMS, Reader._add_items),
        (pickle.MARK, Reader._mark),
        (pickle.POP, Reader._pop),
        (pickle.POP_MARK, lambda reader: reader._since_mark() and None),
        (pickle.MEMOIZE, lambda reader: reader._memo_put(len(reader._memo))),
        (pickle.BINPUT, lambda reader: reader._memo_put(reader._number(1))),
        (pickle.LONG_BINPUT, lambda reader: reader._memo_put(reader._number(4))),
        (pickle.BINGET, lambda reader: reader._memo_get(reader._number(1))),
        (pickle.LONG_BINGET, lambda reader: reader._memo_get(reader._number(4))),
        (pickle.GLOBAL, Reader._global),
        (pickle.STACK_GLOBAL, Reader._stack_global),
        (pickle.REDUCE, Reader._reduce),
        (pickle.NEWOBJ, lambda reader: reader._new({})),
        (pickle.NEWOBJ_EX, lambda reader: reader._new(reader._stack.pop())),
        (pickle.BUILD, Reader._build),
    )
}
