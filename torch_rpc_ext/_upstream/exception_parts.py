"""An exception as its parts, and made of them again without a call of its constructor.

pickle makes an exception by class(*args), and so loses those whose constructor wants anything else.
Here the parts travel one by one: the class and its bases by name, `args`, the attributes, and what
the builtin classes keep in C (`OSError.errno`, `ImportError.name`). A part that cannot be pickled
is left out, and so is one that the receiver cannot read, or may not (option allow_list). In place
of such a class comes the next of its bases.

Exceptions of classes with a `__reduce__` of their own travel as that says.
"""

from __future__ import annotations

import copyreg
import io
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

from torch.distributed.rpc import internal as _untyped_internal

internal: Any = _untyped_internal  # upstream's functions have no types

_OWN_REDUCTION = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__")
# Of the fields in C: the object of an AttributeError is the callee's, and may be anything.
_LEFT_THERE = ("obj",)
# What we have put there, and notes, which the text of the traceback has.
_OURS = ("__notes__", "_remote_original")


class Parts(NamedTuple):
    """An exception on its way; plain data.

    Attributes:
        classes: its class, then those of its bases that are Exceptions; each a pickle, in the order
            in which they are tried.
        whole: its pickle, of a class with a __reduce__ of its own; else b''.
        args: pickles.
        attributes: of its __dict__: name -> pickle.
        fields: that a class defines in C, or by __slots__: name -> pickle.
        inner: the exceptions of a group, as tuples of these.
    """

    classes: tuple[bytes, ...]
    whole: bytes
    args: tuple[bytes, ...]
    attributes: dict[str, bytes]
    fields: dict[str, bytes]
    inner: tuple[tuple[Any, ...], ...] = ()


def take_apart(error: BaseException) -> Parts:
    """Return what an exception consists of."""
    cls = type(error)
    classes = (_dumps(base) for base in cls.__mro__ if issubclass(base, Exception))
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ()) if _is_group(cls) else ()
    values = {name: getattr(error, name, None) for name in _fields(cls)}
    return Parts(
        classes=tuple(filter(None, classes)),
        whole=_dumps(error) if _reduces_itself(cls) else b"",
        args=tuple(map(_dumps, error.args[:1] if inner else error.args)),
        attributes=_pickled({k: v for k, v in vars(error).items() if k not in _OURS}),
        fields={} if inner else _pickled({k: v for k, v in values.items() if v is not None}),
        inner=tuple(tuple(take_apart(one)) for one in inner),
    )


def put_together(parts: Parts) -> Exception | None:
    """Make the exception again.

    Returns:
        The exception, without notes and without a traceback; one of a base where its class is not
        to be had here; None where no class of it is.
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
    except Exception:  # noqa: BLE001  whatever a peer has sent for a group
        return None
    if not parts.inner:
        error.args = tuple(args)
    vars(error).update({name: _load(pickled) for name, pickled in parts.attributes.items()})
    _set_fields(error, {name: _load(pickled) for name, pickled in parts.fields.items()})
    return error


def first_class(parts: Parts) -> type[Exception] | None:
    """Return the first class that is to be had here."""
    for pickled in parts.classes:
        cls = _load(pickled)
        if isinstance(cls, type) and issubclass(cls, Exception):
            return cls
    return None


def copy_state(source: BaseException, target: BaseException, without: tuple[str, ...] = ()) -> None:
    """Give one exception the attributes and fields of another; not its args.

    Args:
        source: which one has them.
        target: of the same class, or a derived one.
        without: names of fields.
    """
    vars(target).update(vars(source))
    values = {name: getattr(source, name, None) for name in _fields(type(source))}
    _set_fields(target, {n: v for n, v in values.items() if v is not None and n not in without})


def blank(cls: type[BaseException], like: BaseException) -> BaseException:
    """Make an exception with the args, attributes and fields of another.

    Args:
        cls: a class derived from the other's.
        like: the other one.

    Raises:
        TypeError: the class is not to be made so.
    """
    made: BaseException = _new(cls, like.args if _is_group(cls) else ())
    made.args = like.args
    copy_state(like, made)
    return made


def _is_group(cls: type) -> bool:
    return issubclass(cls, BaseExceptionGroup)


def _new(cls: Any, args: tuple[Any, ...]) -> Any:
    """Make one by the __new__ of the builtin class that it derives from."""
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    return builtin.__new__(cls, *args)


def _fields(cls: type) -> list[str]:
    kinds = (MemberDescriptorType, GetSetDescriptorType)
    return [
        name
        for base in cls.__mro__
        if issubclass(base, Exception)  # not BaseException's: its args, traceback and cause
        for name, found in vars(base).items()
        if isinstance(found, kinds) and not name.startswith("__") and name not in _LEFT_THERE
    ]


def _set_fields(error: BaseException, values: dict[str, Any]) -> None:
    for name in _fields(type(error)):
        if name in values:
            try:
                setattr(error, name, values[name])
            except (AttributeError, TypeError):
                pass  # read-only, or what a peer has sent for a number


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
    """Return its pickle; b'' where it has none."""
    file = io.BytesIO()
    try:
        # Upstream's name for it: a program may have put another one there.
        internal._pickler(file).dump(value)
    except Exception:  # noqa: BLE001  whatever a user's __reduce__ raises
        return b""
    return file.getvalue()


def _load(pickled: bytes) -> Any:
    """Return what it was; None where that is not to be had."""
    if not pickled:
        return None
    try:
        # Upstream's name for it: with an allow-list it is one that checks.
        return internal._unpickler(io.BytesIO(pickled)).load()
    except Exception:  # noqa: BLE001  whatever a user's constructor raises
        return None
