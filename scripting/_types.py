"""Whether TorchScript takes a function's signature: errors that name the argument and the rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import _jit_internal as _untyped_internal
from torch.jit import annotations as _untyped_annotations

try_ann_to_type: Any = _untyped_annotations.try_ann_to_type
internal: Any = _untyped_internal

_RULE = (
    "TorchScript knows Tensor, int, float, complex, bool, str, torch.device, None, and List, Dict, "
    "Tuple, Optional, Union, NamedTuple, RRef, Future and script classes of these"
)
#: The names that the generated methods (_source.py) add to the function's own begin with this.
_PREFIX = "rpc_"


class NotScriptableError(TypeError):
    """TorchScript does not take a function::

        @scripting.script
        def find(x: Tensor, keys: set[str]) -> Tensor: ...  # raises NotScriptableError

    The text names the argument and the rule.
    """


@dataclass(frozen=True)
class Signature:
    """The signature of a function that TorchScript takes.

    Attributes:
        parameters: name -> type, the evaluated annotation.
        defaults: name -> default value.
        returns: type of the result.
    """

    parameters: dict[str, Any]
    defaults: dict[str, Any]
    returns: Any


def check(function: Callable[..., Any]) -> Signature:
    """Return a function's signature.

    Raises:
        NotScriptableError: TorchScript would not take an argument or the result.
    """
    signature = inspect.signature(function)
    parameters, defaults = {}, {}
    for parameter in signature.parameters.values():
        name = parameter.name
        what = f"{function.__qualname__}: argument {name!r}"
        _check_kind(parameter, what)
        parameters[name] = _checked_type(function, parameter.annotation, what)
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    what = f"{function.__qualname__}: the result"
    returns = _checked_type(function, signature.return_annotation, what)
    return Signature(parameters, defaults, returns)


def _check_kind(parameter: inspect.Parameter, what: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise NotScriptableError(
            f"{what}: TorchScript has no variable number of arguments; take a List or a Dict"
        )
    if parameter.kind is parameter.KEYWORD_ONLY:
        raise NotScriptableError(
            f"{what} is keyword-only, which TorchScript cannot pass on; leave out the '*'"
        )
    if parameter.name.startswith(_PREFIX):
        raise NotScriptableError(
            f"{what}: names that begin with {_PREFIX} are taken by the remote function's methods"
        )


def _checked_type(function: Callable[..., Any], annotation: Any, what: str) -> Any:
    if annotation is inspect.Parameter.empty:
        raise NotScriptableError(
            f"{what} has no type; annotate it (TorchScript would take it for a Tensor). {_RULE}"
        )
    if isinstance(annotation, str):
        annotation = _evaluated(function, annotation, what)
    # As torch.jit.script() does it: finds the types that the fields of a NamedTuple name.
    resolve = internal.createResolutionCallbackFromClosure(function)
    try:
        known = try_ann_to_type(annotation, internal.fake_range(), resolve)
    except Exception as problem:
        raise NotScriptableError(
            f"{what} has type {inspect.formatannotation(annotation)}, which TorchScript does not "
            f"take ({_first_line(problem)}). {_RULE}"
        ) from problem
    if known is None:
        raise NotScriptableError(
            f"{what} has type {inspect.formatannotation(annotation)}, which TorchScript does not "
            f"take. {_RULE}"
        )
    return annotation


def _evaluated(function: Callable[..., Any], text: str, what: str) -> Any:
    local = inspect.getclosurevars(function).nonlocals
    try:
        return eval(text, getattr(function, "__globals__", {}), dict(local))
    except Exception as problem:
        raise NotScriptableError(
            f"{what} has type {text!r}, which is not defined where the function is: {problem}"
        ) from problem


def _first_line(problem: Exception) -> str:
    return str(problem).strip().split("\n")[0]
