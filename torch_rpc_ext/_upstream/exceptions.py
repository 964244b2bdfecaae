"""Remote exceptions that keep their type.

Upstream sends (text, class) and builds class(text). Where the constructor takes other arguments,
the caller gets a RuntimeError (pytorch issue 45044), and upstream's escape decoder mangles text
that is not ASCII. Here the parts of the exception travel too (exception_parts.py), and the text
stays as it is.
Source: torch/distributed/rpc/internal.py, _run_function, _handle_exception.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import traceback
from abc import ABCMeta
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_rpc as _untyped_native_rpc
from torch.distributed.rpc import internal as _untyped_internal

from torch_rpc_ext import errors
from torch_rpc_ext._base.failed_result import FailedResult
from torch_rpc_ext._upstream import exception_parts
from torch_rpc_ext._upstream.thread_state import default_device

# Upstream's functions have no types.
internal: Any = _untyped_internal
native_rpc: Any = _untyped_native_rpc
# For each thread: the name of the function that ran last, and the id of what it returned, for error
# texts. Not for results of these types, which can always be sent.
_last = threading.local()
_SENT: frozenset[type] = frozenset({type(None), torch.Tensor, bool, int, float, str, bytes})


@dataclass(frozen=True)
class Refused:
    """Stands for the value of a pickle that the allow-list has refused.

    Attributes:
        error: raised when the value is used.
    """

    error: errors.RefusedError


class RemoteType(NamedTuple):
    """Sent in place of the exception's class; called with the text, it builds the exception.

    Attributes:
        parts: exception_parts.Parts of the exception, as a plain tuple.
    """

    parts: tuple[Any, ...]

    def __call__(self, message: str) -> BaseException:
        """Build the exception.

        Args:
            message: remote worker and traceback.

        Returns:
            class(message), as upstream, with the attributes of the original, and with the message
            as a note if the class makes its text of something else. Where the constructor takes
            other arguments, or the class makes its text of its fields (OSError with an errno): the
            original with the message as a note. Where this process does not have the
            class: an exception of a base. Where the class lets nobody make one, or its instance has
            no text (``__str__`` raises): RuntimeError.
        """
        try:
            error = self._build(message)
            str(error)  # an error whose text cannot be shown would hide the message
            return error
        except Exception:  # noqa: BLE001  a user's class may do anything
            return RuntimeError(message)

    def _build(self, message: str) -> BaseException:
        parts = exception_parts.Parts(*self.parts)
        original = exception_parts.put_together(parts)
        if original is None or type(original) is Exception:
            plain = RuntimeError(message)
            if original is not None:
                exception_parts.copy_state(original, plain)
            return plain
        if _has_text_of_fields(original):
            exception_parts.add_note(original, message)
            return original
        try:
            error = type(original)(message)
        except Exception:  # noqa: BLE001  a user's constructor may raise anything
            if len(original.args) == 1 and isinstance(original.args[0], str):
                # The exception's argument is its text. Upstream's suite looks for these words.
                text = f"Original exception on remote side was {message}"
                exception_parts.set_args(original, (text,))
            else:
                exception_parts.add_note(original, message)
            return original
        exception_parts.copy_state(original, error, without=("msg",))
        shown, text = str(error), message.strip()
        if text not in shown and repr(message) not in shown:  # the latter in a KeyError's text
            exception_parts.add_note(error, message)
        return error


def _has_text_of_fields(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno is not None
    if isinstance(error, SyntaxError):
        return error.lineno is not None
    return isinstance(error, (StopIteration, StopAsyncIteration))


def describe(error: BaseException) -> Any:
    """Return what the callee sends for an exception: upstream's RemoteException."""
    info = native_rpc._get_current_rpc_agent().get_worker_info()
    # Upstream puts the repr() of the traceback here and decodes the escapes at the caller.
    text = f"On {info}:\n{''.join(traceback.format_exception(error))}"
    # also_runtime_error() has given an exception that came from another worker a class of ours.
    plain = getattr(error, "_remote_original", error)
    return internal.RemoteException(text, RemoteType(tuple(exception_parts.take_apart(plain))))


def passed_on(error: Exception) -> Any:
    """Return what a worker sends for an error that a call of its own has raised.

    As describe(), but with the text that the error has already: it names the worker that raised it.
    """
    plain = getattr(error, "_remote_original", error)
    text: Any = plain
    if notes := getattr(plain, "__notes__", ()):
        text = notes[-1]  # where RemoteType puts the text that does not fit into the error
    elif len(plain.args) == 1:
        text = plain.args[0]  # str() of a KeyError would be the repr() of the text
    return internal.RemoteException(str(text), RemoteType(tuple(exception_parts.take_apart(plain))))


def relayed(error: BaseException) -> Any:
    """Return what passed_on() does; called from C++ for the error of a future that an
    rpc.functions.async_execution function has returned. None for what must not end the caller's
    process, such as SystemExit: the caller gets its text."""
    return passed_on(error) if isinstance(error, Exception) else None


def built(described: Any) -> BaseException:
    """Return the error that describe() or passed_on() of a worker has described.

    Raises:
        TypeError: the worker has sent something else.
    """
    # With an allow-list only a RemoteType can be in it; another class could call anything.
    if type(described) is not internal.RemoteException:
        raise TypeError(f"a worker described an error by a {type(described).__qualname__}")
    return also_runtime_error(described.exception_type(described.msg))


def unsent(value: Any, error: Exception) -> Any:
    """Return what the callee sends for a result that cannot be pickled.

    A RuntimeError, as in upstream: programs catch that.
    """
    name = native_rpc._get_current_rpc_agent().get_worker_info().name
    function, returned = getattr(_last, "returned", ("", 0))
    what = f"worker {name!r} has to send"
    if returned == id(value):
        what = f"{function} on worker {name!r} returned"
    problem = RuntimeError(
        f"{what} a value of type {type(value).__qualname__} that cannot be pickled "
        f"({type(error).__name__}: {error}): return tensors and plain data, or make the value with "
        "rpc.remote(), which leaves it there."
    )
    result = describe(problem)
    print(result.msg, file=sys.stderr)
    return result


def _name_of(function: Any) -> str:
    label = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{label}"


def run_function(python_udf: Any) -> Any:
    """Run a request's function; stands in for upstream's internal._run_function."""
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        if isinstance(python_udf, Refused):
            raise python_udf.error
        # In a new context, so that context variables which the function sets (decimal's precision,
        # NumPy's error state) end with the call. csrc/agent/thread_state.cpp does the same for
        # torch's state of the thread.
        result = contextvars.Context().run(python_udf.func, *python_udf.args, **python_udf.kwargs)
        if type(result) not in _SENT:
            # The name and not the function: a method would keep its object alive.
            _last.returned = (_name_of(python_udf.func), id(result))
        return result
    except Exception as error:  # noqa: BLE001  a user's function may raise anything
        result = describe(error)
        # Upstream prints the error at the callee too. The allow-list has logged refusals already.
        if not isinstance(python_udf, Refused):
            print(result.msg, file=sys.stderr)
        return result
    finally:
        # Not getattr() with a default, which would format the text of an AttributeError for
        # nothing, at each call.
        if default_device.__dict__.get("device_context") is not None:
            torch.set_default_device(None)  # of this thread


def handle_exception(result: Any) -> None:
    """Raise what the callee raised; stands in for upstream's internal._handle_exception."""
    if isinstance(result, internal.RemoteException):
        raise result.exception_type(result.msg)
    if isinstance(result, FailedResult):
        raise another(result.error)
    if isinstance(result, Refused):
        raise result.error


def from_response(payload: bytes, tensors: list[Any]) -> BaseException | None:
    """Return what the remote function raised, or None if it returned a result; called from C++.

    Args:
        payload: from payloads.serialize() at the callee.
        tensors: the tensors that the payload refers to.
    """
    result: Any = internal.deserialize(payload, tensors)
    if isinstance(result, Refused):
        error: BaseException = result.error
        return error
    if not isinstance(result, internal.RemoteException):
        return None
    return built(result)


def another(error: BaseException) -> BaseException:
    """Return a copy of an exception, without its traceback; called from C++.

    What is no Exception, such as KeyboardInterrupt, is returned itself.
    """
    if not isinstance(error, Exception):
        return error
    try:
        return exception_parts.blank(type(error), error)
    except Exception:  # noqa: BLE001  a user's class may do anything
        return error


def also_runtime_error(error: BaseException) -> BaseException:
    """Return an error that `except RuntimeError` catches too, of a class derived from the error's.

    In upstream all remote errors but ValueError and TypeError are RuntimeErrors, and programs
    catch these.
    """
    if isinstance(error, (RuntimeError, ValueError, TypeError)):
        return error
    cls = type(error)
    hears = any("__init_subclass__" in vars(base) for base in cls.__mro__ if base is not object)
    if hears or type(cls) not in (type, ABCMeta):
        # The class hears of each class that is derived from it, and may put a class of ours into a
        # registry in place of the user's.
        return error

    def reduce(self: Any, protocol: Any) -> Any:
        # pickle looks a class up by its name and would find the original class.
        original = vars(self).get("_remote_original") or exception_parts.blank(cls, self)
        return original.__reduce_ex__(protocol)

    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce_ex__": reduce,
    }
    try:
        also = exception_parts.blank(type(cls.__name__, (cls, RuntimeError), members), error)
        # Not `error` itself, whose traceback would stay with each copy of the new exception.
        vars(also)["_remote_original"] = exception_parts.blank(cls, error)
    except Exception:  # noqa: BLE001  Python cannot derive a class from this one and RuntimeError
        return error
    return also
