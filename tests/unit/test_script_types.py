"""What TorchScript does not take is refused with the argument's name and the rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_rpc_ext import aio, scripting


class Opaque:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback


def no_type(x, y: int) -> Tensor:  # type: ignore[no-untyped-def]
    return x


def no_result(x: Tensor):  # type: ignore[no-untyped-def]
    return x


def a_callable(x: Tensor, key: Callable[[Tensor], Tensor]) -> Tensor:
    return x


def any_in_dict(x: dict[str, object]) -> Tensor:
    return torch.ones(1)


def undefined(x: Undefined) -> Tensor:  # type: ignore[name-defined]  # noqa: F821
    return x


def an_object(thing: Opaque) -> int:
    return 1


def bad_result(x: Tensor) -> set[int]:
    return {1}


def variable(*xs: Tensor) -> Tensor:
    return xs[0]


def keyword_only(x: Tensor, *, y: int) -> Tensor:
    return x


def reserved(rpc_to: str, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (no_type, "no_type: argument 'x' has no type; annotate it"),
        (no_result, "no_result: the result has no type"),
        (a_callable, r"a_callable: argument 'key' has type .*Callable.*TorchScript knows Tensor"),
        (any_in_dict, r"any_in_dict: argument 'x' has type dict\[str, object\]"),
        (undefined, "undefined: argument 'x' has type 'Undefined', which is not defined"),
        (an_object, "an_object: argument 'thing' has type .*Opaque"),
        (bad_result, r"bad_result: the result has type set\[int\]"),
        (variable, "variable: argument 'xs': TorchScript has no variable number"),
        (keyword_only, "keyword_only: argument 'y' is keyword-only"),
        (reserved, "reserved: argument 'rpc_to': names that begin with rpc_ are taken"),
    ],
)
def test_what_torchscript_does_not_take(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(scripting.NotScriptableError, match=text):
        scripting.script(function)


def identity(x: Tensor) -> Tensor:
    return x


def total(a: Tensor, b: Tensor) -> Tensor:
    return a + b


scripted = scripting.script(identity)
scripted_total = scripting.script(total)


def uses_total(x: Tensor) -> Tensor:
    return scripted_total.script(x, x) + scripted.async_("worker1", x).wait()


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scripting.script(uses_total)
        # Only of our own calls: who calls torch's own is told as ever.
        with pytest.raises((DeprecationWarning, FutureWarning), match="torch.jit.script"):
            torch.jit.script(total)


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_no_torch_warns(monkeypatch: pytest.MonkeyPatch, category: type[Warning]) -> None:
    original: Any = torch.jit.script

    def script(*given: Any, **named: Any) -> Any:
        warnings.warn("`torch.jit.script` is deprecated.", category, stacklevel=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return original(*given, **named)

    monkeypatch.setattr(torch.jit, "script", script)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scripting.script(uses_total)


def test_what_is_not_for_torchscript_says_so() -> None:
    def user(x: Tensor) -> Tensor:
        return scripted.first_of(["worker1"], x)

    with pytest.raises(Exception, match=r"identity.first_of\(\) works in Python only"):
        torch.jit.script(user)

    def reduces(x: Tensor) -> Tensor:
        return scripted.map_reduce(["worker1"], [x])

    with pytest.raises(Exception, match=r"identity.map_reduce\(\).*reduce="):
        torch.jit.script(reduces)


async def a_coroutine(x: int) -> int:
    return x


def a_generator(x: int) -> Any:
    yield x


async def an_async_generator(x: int) -> Any:
    yield x


def takes_timeout(rpc_timeout: float) -> float:
    return rpc_timeout


def keyword(values: list[int], *, scale: int) -> list[int]:
    return values


def any_number(*values: list[int]) -> list[int]:
    return values[0]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: scripting.remote(a_coroutine), TypeError, "a_coroutine.*aio.remote"),
        (lambda: scripting.remote(a_generator), TypeError, "a_generator.*yields"),
        (lambda: scripting.remote(an_async_generator), TypeError, "an_async_generator.*yields"),
        (lambda: aio.remote(an_async_generator), TypeError, "an_async_generator.*yields"),
        (lambda: scripting.remote(lambda x: x), TypeError, "<lambda>.*top level"),
        (lambda: scripting.remote(torch.add), TypeError, "made of a function, got"),
        (lambda: scripting.remote(takes_timeout), TypeError, "takes_timeout.*'rpc_timeout'"),
        (lambda: aio.remote(identity), TypeError, "async def functions, got .*identity"),
        (lambda: aio.remote(limit=0)(a_coroutine), ValueError, "limit must be positive, got 0"),
        (lambda: aio.remote(limit=2.5)(a_coroutine), TypeError, "limit must be an int, got 2.5"),
        (lambda: aio.batched()(a_coroutine), TypeError, "a_coroutine is an async def"),
        (lambda: aio.batched()(keyword), TypeError, "'scale' is keyword-only"),
        (lambda: aio.batched()(any_number), TypeError, r"\*values takes any number of items"),
        (lambda: aio.batched(max_size=0)(identity), ValueError, "max_size must be positive"),
        (lambda: aio.batched(max_size=32.0)(identity), TypeError, "max_size must be an int"),
        (lambda: aio.batched(max_wait=-1)(identity), ValueError, "max_wait must be 0"),
        (lambda: aio.batched(max_wait="1")(identity), TypeError, "max_wait must be a number"),
        (lambda: aio.batched(max_queue=0)(identity), ValueError, "max_queue must be positive"),
        (lambda: aio.batched(max_queue=9.5)(identity), TypeError, "max_queue must be an int"),
    ],
)
def test_what_is_no_remote_function(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
