"""Taking an exception apart, and putting it together again without calling its constructor.

pickle makes an exception by class(*args), which fails where the constructor takes other arguments.
Here the parts travel one by one: the class and its bases by name, `args`, the attributes, and the
fields that builtin classes keep in C (`OSError.errno`, `ImportError.name`). A part is left out when
it cannot be pickled, and when the receiver cannot or may not read it (option allow_list). When the
class itself is such a part, the receiver takes the first base that it can read.

An exception whose class has a `__reduce__` of its own travels as that method says.

No method or property of the exception's class runs: a frozen dataclass refuses each assignment, and
what a method raises would take the place of the exception.
"""

from __future__ import annotations

import copyreg
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.distributed.rpc import internal as _untyped_internal

from torch_rpc_ext._base.attributes import FIELDS, is_plain_value

internal: Any = _untyped_internal  # upstream's functions have no types

_OWN_REDUCTION = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__")
# Fields in C that are not sent, and the class that has each. AttributeError.obj is an object of the
# callee and may be anything. With ImportError.name_from (Python 3.12) traceback.py imports the
# module `name`, to find similar names in it.
_LEFT_THERE: dict[str, type] = {"obj": AttributeError, "name_from": ImportError}
# Python makes the text of these exceptions of object[start], where `object` has the type beside
# them. Python 3.11 does not ask whether `start` is negative: such a text ends the process, or shows
# other memory of the process.
_RANGED: tuple[tuple[Any, type], ...] = (
    (UnicodeDecodeError, bytes),
    (UnicodeEncodeError, str),
    (UnicodeTranslateError, str),
)
_RANGE = ("object", "start", "end")
# Attributes that are neither sent nor taken: the notes are in the traceback's text, and
# also_runtime_error() of exceptions.py sets the other attribute.
_OURS = ("__notes__", "_remote_original")


_ARGS: Any = vars(BaseException)["args"]


class Parts(NamedTuple):
    """An exception on its way; plain data.

    Attributes:
        classes: pickles of the class and of its bases that are Exceptions; the receiver takes the
            first that it can read.
        whole: pickle of the exception, where its class has a __reduce__ of its own; else b''.
        args: a pickle for each.
        attributes: name -> pickle, of the exception's __dict__.
        fields: name -> pickle, of what a class defines in C or by __slots__.
        inner: of an exception group: the Parts of each exception in it, as tuples.
    """

    classes: tuple[bytes, ...]
    whole: bytes
    args: tuple[bytes, ...]
    attributes: dict[str, bytes]
    fields: dict[str, bytes]
    inner: tuple[tuple[Any, ...], ...] = ()


def take_apart(error: BaseException) -> Parts:
    """Return the parts of an exception."""
    cls = type(error)
    classes = (_dumps(base) for base in cls.__mro__ if issubclass(base, Exception))
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ()) if _is_group(cls) else ()
    args = _ARGS.__get__(error)
    values = _field_values(error)
    return Parts(
        classes=tuple(filter(None, classes)),
        whole=_dumps(error) if _reduces_itself(cls) else b"",
        args=tuple(map(_dumps, args[:1] if inner else args)),
        attributes=_pickled({k: v for k, v in vars(error).items() if k not in _OURS}),
        fields={} if inner else _pickled(values),
        inner=tuple(tuple(take_apart(one)) for one in inner),
    )


def put_together(parts: Parts) -> Exception | None:
    """Make the exception again, from parts that a peer may have forged: it gets no attribute that
    stands in for a method of its class.

    Returns:
        The exception, without notes and traceback. Where this process has no such class, an
        exception of the first base that it has; where it has none of them, None.
    """
    cls = first_class(parts)
    if cls is None:
        return None
    whole: Any = _load(parts.whole)
    if isinstance(whole, cls):
        vars(whole).pop("__notes__", None)
        return whole
    inner = [made for one in parts.inner if (made := put_together(Parts(*one))) is not None]
    args = [_load(pickled) for pickled in parts.args]
    try:
        error: Exception = _new(cls, (*args, inner) if parts.inner else ())
    except Exception:  # noqa: BLE001  a peer may have sent a group of anything
        return None
    if not parts.inner:
        set_args(error, tuple(args))
    for name, pickled in parts.attributes.items():
        if name not in _OURS and is_plain_value(cls, name):
            vars(error)[name] = _load(pickled)
    _set_fields(error, {name: _load(pickled) for name, pickled in parts.fields.items()})
    return error


def first_class(parts: Parts) -> type[Exception] | None:
    """Return the first of the classes that this process can read."""
    for pickled in parts.classes:
        cls = _load(pickled)
        if isinstance(cls, type) and issubclass(cls, Exception):
            return cls
    return None


def copy_state(source: BaseException, target: BaseException, without: tuple[str, ...] = ()) -> None:
    """Copy attributes and fields, but not `args`, from one exception to another.

    Args:
        source: has them.
        target: of the same class, or of a derived class.
        without: names of fields that are not copied.
    """
    vars(target).update(vars(source))
    values = _field_values(source)
    _set_fields(target, {name: v for name, v in values.items() if name not in without})


def blank(cls: type[BaseException], like: BaseException) -> BaseException:
    """Make an exception with the args, attributes and fields of another.

    Args:
        cls: a class derived from the class of `like`.
        like: the other exception.

    Raises:
        TypeError: Python cannot make an object of this class.
    """
    args = _ARGS.__get__(like)
    made: BaseException = _new(cls, args if _is_group(cls) else ())
    set_args(made, args)
    copy_state(like, made)
    if notes := vars(made).get("__notes__"):
        vars(made)["__notes__"] = list(notes)  # a note on one is none on the other
    return made


def set_args(error: BaseException, args: tuple[Any, ...]) -> None:
    """Set an exception's `args`."""
    _ARGS.__set__(error, args)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, as its add_note() does."""
    vars(error).setdefault("__notes__", []).append(note)


def values_in_c(error: BaseException) -> list[Any]:
    """Return what an exception holds in the fields that its classes define in C."""
    values = (_field(descriptor, error) for _, descriptor in _in_c(type(error)))
    return [value for value in values if value is not None]


def _field(descriptor: Any, error: BaseException) -> Any:
    try:
        return descriptor.__get__(error)
    except AttributeError:
        return None  # not set


def clear_left_there(error: BaseException) -> None:
    """Take away what does not travel, from an exception that a peer's pickle has made."""
    for name, cls in _LEFT_THERE.items():
        if issubclass(type(error), cls):
            vars(error).pop(name, None)
            if name in vars(cls):
                vars(cls)[name].__set__(error, None)


def check_range(error: BaseException) -> None:
    """Look at the range of a UnicodeError that a peer has sent, before anybody asks for its text.

    Raises:
        ValueError: the range begins before the object, or the object has another type.
    """
    for cls, _ in _RANGED:
        if issubclass(type(error), cls):
            values = {name: vars(cls)[name].__get__(error) for name in _RANGE}
            if not _is_range(cls, values):
                raise ValueError(f"a {cls.__name__} whose range is not one of its object")


def _is_range(cls: type, values: dict[str, Any]) -> bool:
    """Whether an exception of the class may have these values of its fields."""
    for ranged, kind in _RANGED:
        if issubclass(cls, ranged):
            whole, start, end = map(values.get, _RANGE)
            if whole is None:  # nothing is set
                return not start and not end
            return issubclass(type(whole), kind) and type(start) is type(end) is int and start >= 0
    return True


def _is_group(cls: type) -> bool:
    return issubclass(cls, BaseExceptionGroup)


def _new(cls: Any, args: tuple[Any, ...]) -> Any:
    """Make an exception by the __new__ of the builtin class that its class derives from."""
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    return builtin.__new__(cls, *args)


def _in_c(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield name and descriptor of what the class and its bases define in C or by __slots__."""
    for base in cls.__mro__:
        if issubclass(base, Exception):  # not BaseException's: its args, traceback and cause
            for name, found in vars(base).items():
                if isinstance(found, FIELDS) and not name.startswith("__"):
                    yield name, found


def _fields(cls: type) -> dict[str, Any]:
    """Return name -> descriptor of the fields that travel."""
    fields: dict[str, Any] = {}
    for name, descriptor in _in_c(cls):
        if not issubclass(cls, _LEFT_THERE.get(name, ())):
            fields.setdefault(name, descriptor)
    return fields


def _field_values(error: BaseException) -> dict[str, Any]:
    """Return the values of the fields that travel and are set."""
    values = {name: _field(found, error) for name, found in _fields(type(error)).items()}
    return {name: value for name, value in values.items() if value is not None}


def _set_fields(error: BaseException, values: dict[str, Any]) -> None:
    left_out = () if _is_range(type(error), values) else _RANGE
    for name, descriptor in _fields(type(error)).items():
        if name in values and name not in left_out:
            try:
                descriptor.__set__(error, values[name])
            except (AttributeError, TypeError):
                pass  # the field is read-only, or a peer has sent a value of a wrong type


def _reduces_itself(cls: type) -> bool:
    if cls in copyreg.dispatch_table:
        return True
    return any(
        name in vars(base)
        for base in cls.__mro__
        if base.__module__ != "builtins"
        for name in _OWN_REDUCTION
    )


def _pickled(values: dict[str, Any]) -> dict[str, bytes]:
    return {name: pickled for name, value in values.items() if (pickled := _dumps(value))}


def _dumps(value: Any) -> bytes:
    """Return the pickle of a value; b'' where the value cannot be pickled."""
    file = io.BytesIO()
    try:
        # By upstream's variable, because a program may have put another pickler there.
        internal._pickler(file).dump(value)
    except Exception:  # noqa: BLE001  a user's __reduce__ may raise anything
        return b""
    return file.getvalue()


def _load(pickled: bytes) -> Any:
    """Return the value of a pickle; None where this process cannot or may not read it."""
    if not pickled:
        return None
    try:
        # By upstream's variable, because with an allow-list hooks.py puts a checking unpickler
        # there.
        return internal._unpickler(io.BytesIO(pickled)).load()
    except Exception:  # noqa: BLE001  a user's constructor may raise anything
        return None
