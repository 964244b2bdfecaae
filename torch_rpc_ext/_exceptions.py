"""Remote exceptions that keep their type.

Upstream sends (text, class) and builds class(text). Where the class wants other arguments, the
caller gets a RuntimeError (pytorch issue 45044); and the text is put through an escape decoder that
mangles what is not ASCII. Here the exception itself travels too, and the text stays as it is.
Source: torch/distributed/rpc/internal.py, _run_function, _handle_exception.
"""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from typing import Any, NamedTuple

from torch._C import _distributed_rpc as _untyped_native_rpc
from torch.distributed.rpc import internal as _untyped_internal

# Upstream's functions have no types.
internal: Any = _untyped_internal
native_rpc: Any = _untyped_native_rpc


class RemoteType(NamedTuple):
    """Stands where upstream sends the class: called with the text, it builds the exception.

    Attributes:
        cls: the exception's class.
        pickled: the exception itself, b'' where pickle does not take it.
    """

    cls: type[BaseException]
    pickled: bytes = b""

    def __call__(self, message: str) -> BaseException:
        """Build the exception.

        Args:
            message: remote worker and traceback.

        Returns:
            cls(message), as upstream; where cls wants other arguments, the exception as pickle
            rebuilds it, with the message as a note; where pickle cannot either, a RuntimeError
            with upstream's text.
        """
        original = self._original()
        try:
            error = self.cls(message)
        except Exception as problem:  # noqa: BLE001  whatever a user's constructor raises
            if original is None:
                return RuntimeError(
                    f"Failed to create original exception type. Error msg was {problem}"
                    f" Original exception on remote side was {message}"
                )
            original.add_note(message)
            return original
        if original is not None:
            error.__dict__.update(vars(original))
        return error

    def _original(self) -> BaseException | None:
        if not self.pickled:
            return None
        try:
            # Upstream's name for it: with an allow-list it is one that checks.
            error = internal._unpickler(io.BytesIO(self.pickled)).load()
        except Exception:  # noqa: BLE001  whatever a user's constructor raises
            return None
        if not isinstance(error, self.cls):
            return None
        # Notes are in the text already.
        error.__dict__.pop("__notes__", None)
        return error


def describe(error: BaseException) -> Any:
    """Return what the callee sends for an exception: upstream's RemoteException."""
    info = native_rpc._get_current_rpc_agent().get_worker_info()
    # Without repr(), which upstream puts in: its escapes are what would have to be decoded.
    text = f"On {info}:\n{''.join(traceback.format_exception(error))}"
    # One that came from another worker may be of a class made here.
    plain = getattr(error, "_remote_original", error)
    try:
        pickled = pickle.dumps(plain)
    except Exception:  # noqa: BLE001  whatever a user's __reduce__ raises
        pickled = b""
    return internal.RemoteException(text, RemoteType(type(plain), pickled))


def run_function(python_udf: Any) -> Any:
    """Run a request's function; stands in for upstream's internal._run_function."""
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        if _is_refused(python_udf):
            raise python_udf.error
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as error:  # noqa: BLE001  whatever a user's function raises
        result = describe(error)
        # As upstream: the callee's log shows what its callers saw. Refusals are logged already.
        if not _is_refused(python_udf):
            print(result.msg, file=sys.stderr)
        return result


def handle_exception(result: Any) -> None:
    """Raise what the callee raised; stands in for upstream's internal._handle_exception."""
    if isinstance(result, internal.RemoteException):
        raise result.exception_type(result.msg)
    if _is_refused(result):
        raise result.error


def _is_refused(value: Any) -> bool:
    """Whether it stands for a pickle that this worker has refused."""
    module = sys.modules.get("torch_rpc_ext._allow_list")  # None where no one asked for it
    return module is not None and isinstance(value, module.Refused)


def from_response(payload: bytes, tensors: list[Any]) -> BaseException | None:
    """Return what the remote function raised, or None if this is a result; called from C++.

    Args:
        payload: pickled result of a Python function.
        tensors: what its pickle refers to.
    """
    result: Any = internal.deserialize(payload, tensors)
    if _is_refused(result):
        error: BaseException = result.error
        return error
    if not isinstance(result, internal.RemoteException):
        return None
    return _also_runtime_error(result.exception_type(result.msg))


def _also_runtime_error(error: BaseException) -> BaseException:
    """Let `except RuntimeError` catch it too, as it does upstream for all but these three."""
    if isinstance(error, (RuntimeError, ValueError, TypeError)):
        return error
    cls = type(error)
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    try:
        made: Any = type(cls.__name__, (cls, RuntimeError), members)
        also: BaseException = made.__new__(made)
    except TypeError:
        return error  # not to be combined with RuntimeError, or not to be made without arguments
    also.args = error.args
    also.__dict__.update(vars(error), _remote_original=error)
    return also
