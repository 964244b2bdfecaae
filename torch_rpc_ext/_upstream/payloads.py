"""Turning what a call carries into a payload (bytes) and a table of tensors, and back.

Upstream pickles everything: the named tuple (function, arguments), even None, and for each tensor
the method that finds the tensor in the table. Here the most frequent payloads have a form of a few
bytes, which no pickle begins with. All others are pickled as upstream does, with reducers for the
values that upstream's lose (hooks.py says which). csrc/agent/call_label.cpp reads function names
out of both forms.

Source: torch/distributed/rpc/internal.py, _InternalRPCPickler.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.distributed import rpc as _untyped_rpc
from torch.distributed.rpc import internal as _untyped_internal

from torch_rpc_ext._base.attributes import is_plain_value
from torch_rpc_ext._base.failed_result import FailedResult, as_exception
from torch_rpc_ext._native import loader
from torch_rpc_ext._upstream import exceptions, unread_rrefs

# Upstream's functions have no types.
internal: Any = _untyped_internal
rpc: Any = _untyped_rpc

_pickler: Any = internal._internal_rpc_pickler
_tables: Any = internal._thread_local_tensor_tables

# Whole payloads: the value None; the only tensor of the table.
_NONE = b"\x01None"
_TENSOR = b"\x01Tensor"
# A call of a module's function with the table's tensors. Behind it come the names of module and
# function, each with a zero byte at its end.
_CALL = b"\x01Call\0"
# Stands before the pickle of a raised exception; csrc/bindings/remote_exception.cpp looks for it.
_RAISED = b"\x01Raised"

# No reducer is asked for values of these types.
_SCALARS: frozenset[type] = frozenset({bool, int, float, str, bytes})

# Names of functions are cached for payloads of up to this length, bytes.
_REMEMBERED = 256

# The agent of the running session.
_agent: Any = None


def install(agent: Any = None) -> None:
    """Make upstream's pickler write and read these payloads. Idempotent.

    Args:
        agent: the running agent; without one no RRef can be pickled.
    """
    global _agent
    _agent = agent
    for cls, reducer in _REDUCERS.items():
        _pickler._register_reducer(cls, reducer)
    for rref_class in _rref_classes():
        _pickler._register_reducer(rref_class, _reduce_rref)
    _pickler.serialize = serialize
    _pickler.deserialize = deserialize


def uninstall() -> None:
    """Leave upstream's pickler as it was. Idempotent."""
    global _agent
    _agent = None
    # Without these attributes of the object, the methods of its class are found again.
    vars(_pickler).pop("serialize", None)
    vars(_pickler).pop("deserialize", None)
    # Both tables, because serialize() copies _class_reducer_dict into _dispatch_table.
    for table in (_pickler._class_reducer_dict, _pickler._dispatch_table):
        for cls, reducer in _REDUCERS.items():
            if table.get(cls) is reducer:
                del table[cls]
    _pickler._dispatch_table[torch.Tensor] = _pickler._tensor_reducer
    for rref_class in _rref_classes():
        _pickler._class_reducer_dict.pop(rref_class, None)


def serialize(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Replace the method of upstream's pickler.

    Args:
        value: an internal.PythonUDF, or what it returned.

    Returns:
        The payload, and the tensors to which the payload refers by index.

    Raises:
        Exception: what pickle raises for a call that cannot be pickled. A result that cannot be
            pickled raises nothing here: its payload is a RuntimeError for the caller.
    """
    if value is None:
        return _NONE, []
    if type(value) is FailedResult:
        value = exceptions.describe(value.error)
    if type(value) is internal.RemoteException:
        return _raised(value)
    # Another pickler that a program has put there may send a function by value.
    if internal._pickler is pickle.Pickler:
        if type(value) in _SCALARS:
            return pickle.dumps(value), []
        if _is_plain(value):
            return _TENSOR, [value]
        if type(value) is internal.PythonUDF and not value.kwargs and type(value.args) is tuple:
            name, args = _name_of(value.func), value.args
            # Not for a tensor that is an argument twice: both must be one object at the callee,
            # and only pickle does that.
            if (
                name is not None
                and all(map(_is_plain, args))
                and len(set(map(id, args))) == len(args)
            ):
                return _CALL + name, list(args)
    try:
        return _pickled(value)
    except Exception as error:
        if type(value) is internal.PythonUDF:
            _explain(value.func, error)
            raise
        # An answer for the caller. In upstream it would be a RuntimeError with a C++ stack.
        return _raised(exceptions.unsent(value, error))


def _raised(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    pickled, tensors = _pickled(value)
    return _RAISED + pickled, tensors


def _explain(function: Any, error: Exception) -> None:
    """Raise a clearer error of the same class, if the called function is what cannot be pickled."""
    name = str(getattr(function, "__qualname__", ""))
    if "<" in name and isinstance(error, (pickle.PicklingError, AttributeError)):
        kind = "lambda" if name.endswith("<lambda>") else "function within a function"
        raise type(error)(
            f"{function.__module__}.{name} cannot be pickled, because it is a {kind}: define it at "
            "the top level of a module that all workers can import, and pass it by that name."
        ) from None


def deserialize(
    payload: bytes,
    tensors: list[torch.Tensor],
    read: Callable[[bytes, list[torch.Tensor]], Any] | None = None,
) -> Any:
    """Replace the method of upstream's pickler.

    Args:
        payload: from serialize(), on any worker.
        tensors: the tensors that came with the payload.
        read: reads pickles; by default upstream's pickler does.

    Returns:
        The value. Where the named function does not exist an AttributeError, returned and not
        raised, as in upstream.

    Raises:
        Exception: anything, because a pickle can name and call anything.
    """
    if payload == _TENSOR:
        return tensors[0]
    if payload == _NONE:
        return None
    named = short_call(payload)
    if named is not None:
        function = _find(*named)
        if isinstance(function, AttributeError):
            return function
        return internal.PythonUDF(function, tuple(tensors), {})
    pickled = payload.removeprefix(_RAISED)
    try:
        value = (read or _from_pickle)(pickled, tensors)
    except BaseException:
        unread_rrefs.unread(pickled)
        raise
    if isinstance(value, AttributeError):  # the function does not exist
        unread_rrefs.unread(pickled)
    return value


def short_call(payload: bytes) -> tuple[str, str] | None:
    """Return module and name of the function that the short form of a call names.

    Args:
        payload: from serialize(), on any worker.

    Returns:
        None where the payload has another form.

    Raises:
        ValueError: the payload begins like the short form but does not continue like it.
    """
    if not payload.startswith(_CALL):
        return None
    # The cache is bounded in number and length, so a peer cannot fill memory with names.
    return _remembered_names(payload) if len(payload) <= _REMEMBERED else _names(payload)


def _names(payload: bytes) -> tuple[str, str]:
    module, name, _ = payload[len(_CALL) :].split(b"\0")
    return module.decode(), name.decode()


_remembered_names = functools.lru_cache(maxsize=1024)(_names)


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        # False where a program has registered a reducer of its own for tensors.
        and _pickler._class_reducer_dict.get(torch.Tensor) is _reduce_tensor
    )


def _name_of(function: Any) -> bytes | None:
    """Return the names by which a function is found again; None where pickle has to try."""
    if type(function) is not FunctionType:
        return None
    module, name = function.__module__, function.__qualname__
    # A function of a class or of another function has dots in its name and is not found so.
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    return f"{module}\0{name}\0".encode()


def _find(module: str, name: str) -> Any:
    if internal._unpickler is pickle.Unpickler:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None:
            return found
    # A pickle that names the function, which imports the module: PROTO 4, the two strings,
    # STACK_GLOBAL, STOP.
    return _from_pickle(b"\x80\x04%b%b\x93." % (_pickled_text(module), _pickled_text(name)), [])


def _pickled_text(text: str) -> bytes:
    encoded = text.encode()
    return b"X%b%b" % (len(encoded).to_bytes(4, "little"), encoded)


def _pickled(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    if isinstance(value, torch.jit.ScriptModule):
        pickled: tuple[bytes, list[torch.Tensor]] = type(_pickler).serialize(_pickler, value)
        return pickled
    tensors: list[torch.Tensor] = []
    # Kept, because a reducer may make a call, which uses the same thread-local table. By __dict__,
    # because each look at an attribute of a threading.local() takes longer.
    tables = _tables.__dict__
    before, forks_before = tables.get("send_tables"), tables.get("forks")
    forks: list[unread_rrefs.Fork] = []
    tables["send_tables"], tables["forks"] = tensors, forks
    try:
        file = io.BytesIO()
        pickler = internal._pickler(file)
        reducers = {**_pickler._dispatch_table, **_pickler._class_reducer_dict}
        if reducers.get(torch.Tensor) is _reduce_tensor:
            # Spares the reducer a look at the thread's table for each of many tensors.
            reduce = _add_tensor if type(value) is internal.PythonUDF else _reduce_tensor_into
            reducers[torch.Tensor] = functools.partial(reduce, tensors)
        pickler.dispatch_table = reducers
        pickler.dump(value)
        return file.getvalue(), tensors
    except BaseException:
        unread_rrefs.give_up(forks)
        raise
    finally:
        if before is None:
            del tables["send_tables"], tables["forks"]
        else:
            tables["send_tables"], tables["forks"] = before, forks_before


def _from_pickle(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    return with_tensors(tensors, lambda: type(_pickler).deserialize(_pickler, payload, tensors))


def with_tensors(tensors: list[torch.Tensor], read: Callable[[], Any]) -> Any:
    """Return what read() returns; pickles that it reads find their tensors in `tensors`.

    Args:
        tensors: the tensors that came with the payload.
        read: reads the payload.
    """
    if torch.is_inference_mode_enabled():
        # Tensors that unpickling makes are ordinary ones, as the received tensors are.
        with torch.inference_mode(False):
            return with_tensors(tensors, read)
    tables = _tables.__dict__
    before = tables.get("recv_tables")
    tables["recv_tables"] = tensors
    try:
        return read()
    except Exception as error:
        # Upstream turns what an unpickler raises into a RuntimeError, and programs catch that. The
        # class must stay too: a program's signal handler may have raised the error.
        also = exceptions.also_runtime_error(error)
        try:
            if also is error:
                raise
            raise also.with_traceback(error.__traceback__) from error.__cause__
        finally:
            # The exception refers to this frame, which must not refer to the exception: RRefs that
            # have been read would stay until Python collects such circles.
            del also
    except BaseException as error:
        # Not current_thread(), which keeps an object for each thread that Python did not start.
        if threading.get_ident() == threading.main_thread().ident:
            raise  # a handler of the program's signals may have raised the error
        # The pickle of another worker has raised the error, which must not end this thread.
        raise as_exception(error) from None
    finally:
        # Upstream's deserialize() leaves its own table behind when it fails.
        if before is None:
            tables.pop("recv_tables", None)
        else:
            tables["recv_tables"] = before


def _rref_classes() -> tuple[type, ...]:
    return (rpc.PyRRef, rpc.RRef)


def _reduce_rref(rref: Any) -> tuple[Any, ...]:
    loader.load().before_passing(_agent, rref)
    reduced: tuple[Any, ...] = _pickler._py_rref_reducer(rref)
    _, (fork,) = reduced
    if (forks := _tables.__dict__.get("forks")) is not None:  # None under a pickler of the user's
        forks.append(fork)
    return reduced


def _reduce_worker_info(info: Any) -> tuple[Any, ...]:
    # Not as pybind11 does, which makes an object without its C++ part and fills that in later: the
    # reader with an allow-list refuses to make such an object.
    return (rpc.WorkerInfo, (info.name, info.id))


def _reduce_parameter(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    # The Parameter itself and not its .data, so that distributed autograd records it.
    _tables.send_tables.append(parameter)
    index = len(_tables.send_tables) - 1
    attributes = vars(parameter)
    return (_restore_parameter, (index, attributes) if attributes else (index,))


def _restore_parameter(index: int, attributes: dict[str, Any] | None = None) -> torch.Tensor:
    tensor = _restore_tensor(index)
    # The class of this tensor is changed, instead of a new Parameter made: within a distributed
    # autograd context the tensor gets its history after this, and a new one would not get it.
    tensor.__class__ = torch.nn.Parameter
    if type(attributes) is dict:
        # A peer has sent the names.
        for name, value in attributes.items():
            if is_plain_value(torch.nn.Parameter, name):
                vars(tensor)[name] = value
    return tensor


_STRIDED = torch.strided
_BY_ROW = frozenset({torch.sparse_csr, torch.sparse_bsr})
_BY_COLUMN = frozenset({torch.sparse_csc, torch.sparse_bsc})


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _reduce_tensor_into(_tables.send_tables, tensor)


def _reduce_tensor_into(tensors: list[torch.Tensor], tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = tensor.layout
    if layout is not _STRIDED:
        # torch's futures take no compressed tensor as a result, so its parts travel. Each part is a
        # strided tensor and comes back here.
        if layout in _BY_ROW:
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
            return (_restore_compressed, (*parts, tuple(tensor.shape), layout))
        if layout in _BY_COLUMN:
            parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
            return (_restore_compressed, (*parts, tuple(tensor.shape), layout))
    return _add_tensor(tensors, tensor)


def _add_tensor(tensors: list[torch.Tensor], tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reduce a tensor of any layout to its place in the table.

    In a request also a compressed tensor: distributed autograd gives tensors of the table their
    history after the request has been read, which the parts would not pass on.
    """
    tensors.append(tensor)
    # A function with a short name, because pickle writes the name for each tensor.
    return (_restore_tensor, (len(tensors) - 1,))


def _restore_tensor(index: int) -> torch.Tensor:
    tensors: list[torch.Tensor] = _tables.recv_tables
    # A peer has sent the index, so it is checked: it may be negative, too large or a slice.
    if type(index) is int and index >= 0:
        try:
            return tensors[index]
        except IndexError:
            pass
    raise ValueError(f"a message of {len(tensors)} tensors has none at {index!r}")


def _restore_compressed(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: torch.layout,
) -> torch.Tensor:
    # A peer has sent these: with the check bad indices raise, without it they crash later.
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=True
    )


_REDUCERS: dict[type, Any] = {
    torch.nn.Parameter: _reduce_parameter,
    torch.Tensor: _reduce_tensor,
    rpc.WorkerInfo: _reduce_worker_info,
}
