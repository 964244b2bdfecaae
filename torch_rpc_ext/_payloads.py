"""How what a call carries becomes bytes and a table of tensors, and back.

Upstream pickles everything: the named tuple (function, arguments), each tensor as the method of a
class that finds it again, None. For the commonest payloads there is a form of a few bytes here,
which no pickle begins with; the others are pickled as upstream does, with reducers for what it
loses (torch_rpc_ext/_upstream_hooks.py says what). csrc/agent/call_label.cpp reads function names
out of both.

Source: torch/distributed/rpc/internal.py, _InternalRPCPickler.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any

import torch
from torch.distributed import rpc as _untyped_rpc
from torch.distributed.rpc import internal as _untyped_internal

from torch_rpc_ext import _state

# Upstream's functions have no types.
internal: Any = _untyped_internal
rpc: Any = _untyped_rpc

_pickler: Any = internal._internal_rpc_pickler
_tables: Any = internal._thread_local_tensor_tables

# Whole payloads: None, and the one tensor of the table.
_NONE = b"\x01None"
_TENSOR = b"\x01Tensor"
# A function of a module, called with the table's tensors; then follow the names, a zero after each.
_CALL = b"\x01Call\0"


def install() -> None:
    """Let upstream's pickler make and read these payloads. Idempotent."""
    for cls, reducer in _REDUCERS.items():
        _pickler._register_reducer(cls, reducer)
    for rref_class in _rref_classes():
        _pickler._register_reducer(rref_class, _reduce_rref)
    _pickler.serialize = serialize
    _pickler.deserialize = deserialize


def uninstall() -> None:
    """Leave upstream's pickler as it was. Idempotent."""
    # Those of the class come back.
    vars(_pickler).pop("serialize", None)
    vars(_pickler).pop("deserialize", None)
    # Its serialize() copies the one table into the other.
    for table in (_pickler._class_reducer_dict, _pickler._dispatch_table):
        for cls, reducer in _REDUCERS.items():
            if table.get(cls) is reducer:
                del table[cls]
    _pickler._dispatch_table[torch.Tensor] = _pickler._tensor_reducer
    for rref_class in _rref_classes():
        _pickler._class_reducer_dict.pop(rref_class, None)


def serialize(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Stand in for upstream's pickler.

    Args:
        value: an internal.PythonUDF, or what one returned.

    Returns:
        The payload and the tensors that it refers to, by their places.

    Raises:
        Exception: what pickle raises for a value that it does not take.
    """
    if value is None:
        return _NONE, []
    # Somebody else's pickler may send by value what is sent by name here.
    if internal._pickler is pickle.Pickler:
        if _is_plain(value):
            return _TENSOR, [value]
        if type(value) is internal.PythonUDF and not value.kwargs and type(value.args) is tuple:
            name, args = _name_of(value.func), value.args
            # One that stands there twice must arrive as one: pickle remembers it.
            if (
                name is not None
                and all(map(_is_plain, args))
                and len(set(map(id, args))) == len(args)
            ):
                return _CALL + name, list(args)
    return _pickled(value)


def deserialize(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    """Stand in for upstream's pickler.

    Args:
        payload: from serialize(), on any worker.
        tensors: those that came with it.

    Returns:
        The value. An AttributeError, not raised, where a function does not exist, as upstream.

    Raises:
        Exception: whatever a pickle that names anything may raise.
    """
    if payload == _TENSOR:
        return tensors[0]
    if payload == _NONE:
        return None
    if payload.startswith(_CALL):
        module, name, _ = payload[len(_CALL) :].split(b"\0")
        function = _find(module, name)
        if isinstance(function, AttributeError):
            return function
        return internal.PythonUDF(function, tuple(tensors), {})
    return _from_pickle(payload, tensors)


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        # Not where a program has registered its own way to send tensors.
        and _pickler._class_reducer_dict.get(torch.Tensor) is _reduce_tensor
    )


def _name_of(function: Any) -> bytes | None:
    """Return by what name a function is found again; None where pickle has to try."""
    if type(function) is not FunctionType:
        return None
    module, name = function.__module__, function.__qualname__
    # Not of a class or of another function: those names have dots.
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    return f"{module}\0{name}\0".encode()


def _find(module: bytes, name: bytes) -> Any:
    if internal._unpickler is pickle.Unpickler:
        found = getattr(sys.modules.get(module.decode()), name.decode(), None)
        if found is not None:
            return found
    # Imports the module, and asks the allow-list. PROTO 4, the two strings, STACK_GLOBAL, STOP.
    return _from_pickle(b"\x80\x04%b%b\x93." % (_pickled_text(module), _pickled_text(name)), [])


def _pickled_text(text: bytes) -> bytes:
    return b"X%b%b" % (len(text).to_bytes(4, "little"), text)


def _pickled(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    if isinstance(value, torch.jit.ScriptModule):
        pickled: tuple[bytes, list[torch.Tensor]] = type(_pickler).serialize(_pickler, value)
        return pickled
    # A reducer may make a call of its own.
    before = getattr(_tables, "send_tables", None)
    tensors: list[torch.Tensor] = []
    _tables.send_tables = tensors
    try:
        file = io.BytesIO()
        pickler = internal._pickler(file)
        table = _pickler._dispatch_table
        table.update(_pickler._class_reducer_dict)
        pickler.dispatch_table = table
        pickler.dump(value)
        return file.getvalue(), tensors
    finally:
        if before is None:
            del _tables.send_tables
        else:
            _tables.send_tables = before


def _from_pickle(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    before = getattr(_tables, "recv_tables", None)
    try:
        return type(_pickler).deserialize(_pickler, payload, tensors)
    finally:
        # Upstream leaves its own at an error.
        if before is None:
            vars(_tables).pop("recv_tables", None)
        else:
            _tables.recv_tables = before


def _rref_classes() -> tuple[type, ...]:
    return (rpc.PyRRef, rpc.RRef)


def _reduce_rref(rref: Any) -> tuple[Any, ...]:
    _state.require().agent.require_owner(rref)
    reduced: tuple[Any, ...] = _pickler._py_rref_reducer(rref)
    return reduced


def _reduce_parameter(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    # As the Parameter that it is, not as its .data: so distributed autograd records it.
    _tables.send_tables.append(parameter)
    return (_restore_parameter, (len(_tables.send_tables) - 1,))


def _restore_parameter(index: int) -> torch.Tensor:
    tensor: torch.Tensor = _tables.recv_tables[index]
    # The same tensor under another class, not a new Parameter: within a distributed autograd
    # context it gets its history after this, and a copy would stay outside of the graph.
    tensor.__class__ = torch.nn.Parameter
    return tensor


_BY_ROW = frozenset({torch.sparse_csr, torch.sparse_bsr})
_BY_COLUMN = frozenset({torch.sparse_csc, torch.sparse_bsc})


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = tensor.layout
    if layout in _BY_ROW:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif layout in _BY_COLUMN:
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        tensors = _tables.send_tables
        tensors.append(tensor)
        # Not upstream's class method: pickle would write all of its name for each tensor.
        return (_restore_tensor, (len(tensors) - 1,))
    # Each part is a strided tensor and comes back here.
    return (_restore_compressed, (*parts, tuple(tensor.shape), tensor.layout))


def _restore_tensor(index: int) -> torch.Tensor:
    tensor: torch.Tensor = _tables.recv_tables[index]
    return tensor


def _restore_compressed(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: torch.layout,
) -> torch.Tensor:
    # Checked, because a peer sent them: bad indices raise instead of crashing later.
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=True
    )


_REDUCERS: dict[type, Any] = {torch.nn.Parameter: _reduce_parameter, torch.Tensor: _reduce_tensor}
