"""Remote exceptions that keep their type.

Upstream sends (text, class) and builds class(text). Where the class wants other arguments, the
caller gets a RuntimeError (pytorch issue 45044); and the text is put through an escape decoder that
mangles what is not ASCII. Here the exception's attributes travel too, and the text stays as it is.
Source: torch/distributed/rpc/internal.py, _run_function, _handle_exception.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_rpc as _untyped_native_rpc
from torch.distributed.rpc import internal as _untyped_internal

# Upstream's functions have no types.
internal: Any = _untyped_internal
native_rpc: Any = _untyped_native_rpc


@dataclass(frozen=True)
class RemoteType:
    """Stands where upstream sends the class: called with the text, it builds the exception.

    Attributes:
        cls: the exception's class.
        state: its attributes, pickled; b'' for none.
    """

    cls: type[BaseException]
    state: bytes = b""

    def __call__(self, message: str) -> BaseException:
        """Build the exception.

        Args:
            message: remote worker and traceback.
        """
        state = pickle.loads(self.state) if self.state else {}
        try:
            error = self.cls(message)
        except Exception:  # noqa: BLE001  whatever a user's constructor raises
            error = _without_constructor(self.cls, message)
        error.__dict__.update(state)
        return error


def describe(error: BaseException) -> Any:
    """Return what the callee sends for an exception: upstream's RemoteException."""
    info = native_rpc._get_current_rpc_agent().get_worker_info()
    # Without repr(), which upstream puts in: its escapes are what would have to be decoded.
    text = f"On {info}:\n{''.join(traceback.format_exception(error))}"
    # One that came from another worker: its class here is made up, see below.
    cls = getattr(type(error), "_remote_class", type(error))
    return internal.RemoteException(text, RemoteType(cls, _pickled_attributes(error)))


def _pickled_attributes(error: BaseException) -> bytes:
    """Pickle the attributes that can be; notes and what cannot are left out."""
    kept = {}
    for name, value in vars(error).items():
        if name == "__notes__":
            continue  # traceback.format_exception has them in the text
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001, S112  whatever a user's __reduce__ raises
            continue
        kept[name] = value
    return pickle.dumps(kept) if kept else b""


def _without_constructor(cls: type[BaseException], message: str) -> BaseException:
    """Build an exception whose constructor does not take a text.

    It is also a RuntimeError with upstream's text, because that is what such exceptions are
    upstream, and what programs catch.
    """
    text = f"Original exception on remote side was {message}"
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # The class's own may read what its constructor would have set.
        "__str__": lambda self: str(self.args[0]) if self.args else "",
        "__reduce__": lambda self: (RemoteType(cls, _pickled_attributes(self)), self.args),
        "_remote_class": cls,
    }
    try:
        made: Any = type(cls.__name__, (cls, RuntimeError), members)
        error = made.__new__(made)
        error.args = (text,)
    except TypeError:
        # Not to be combined with RuntimeError (another layout), or not to be made at all.
        error = RuntimeError(f"Failed to create original exception type. {text}")
    if not isinstance(error, BaseException):
        return RuntimeError(f"Failed to create original exception type. {text}")
    return error


def run_function(python_udf: Any) -> Any:
    """Run a request's function; stands in for upstream's internal._run_function."""
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as error:  # noqa: BLE001  whatever a user's function raises
        result = describe(error)
        # As upstream: the callee's log shows what its callers saw.
        print(result.msg, file=sys.stderr)
        return result


def handle_exception(result: Any) -> None:
    """Raise what the callee raised; stands in for upstream's internal._handle_exception."""
    if isinstance(result, internal.RemoteException):
        raise result.exception_type(result.msg)
