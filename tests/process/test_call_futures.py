"""What csrc/bindings/calls.cpp does in place of upstream: it chooses overloads and completes
futures."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C import _distributed_rpc as native_rpc
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rpc import api
from torch.jit import _builtins

from tests.process import functions as f
from tests.process.group import Group
from tests.support.backend import needs_ucx

ONE = torch.ones(2)
MATRIX = torch.arange(6.0).reshape(2, 3)


class Call:
    """An operator and its arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs

    def there(self) -> Any:
        return rpc.rpc_sync("worker1", self.function, args=self.args, kwargs=self.kwargs)

    def there_by_remote(self) -> Any:
        return rpc.remote("worker1", self.function, args=self.args, kwargs=self.kwargs).to_here()

    def there_by_upstream(self) -> Any:
        to = rpc.get_worker_info("worker1")
        name = _builtins._find_builtin(self.function)
        future = native_rpc._invoke_rpc_builtin(to, name, 10.0, *self.args, **self.kwargs)
        return future.wait()


OVERLOADS = [
    Call(torch.add, ONE, ONE),
    Call(torch.add, ONE, 1),
    Call(torch.add, ONE, 2.5),
    Call(torch.add, ONE, True),
    Call(torch.add, ONE, 1j),
    Call(torch.add, ONE, ONE, alpha=3),
    Call(torch.add, ONE, other=ONE, alpha=3),
    Call(torch.sum, MATRIX),
    Call(torch.sum, MATRIX, 0),
    Call(torch.sum, MATRIX, [0, 1], keepdim=True),
    Call(torch.sum, MATRIX, dtype=torch.int64),
    Call(torch.where, ONE > 0, ONE, 5.0),
    Call(torch.pow, 2, ONE),
    Call(torch.full, (2, 3), 7),
    Call(torch.clamp, MATRIX, 1, 3),
    Call(torch.clamp, MATRIX, min=ONE[:1]),
    Call(torch.cat, [ONE, ONE]),
    # The result is not a single tensor.
    Call(torch.numel, ONE),
    Call(torch.add, 1, 2),
    Call(torch.split, MATRIX, 1),
    Call(torch.is_nonzero, ONE[0]),
]


def shown(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def check_overloads() -> None:
    for number, call in enumerate(OVERLOADS):
        theirs = shown(call.there_by_upstream())
        # Twice, because the callee remembers the operators that it has read.
        for _ in range(2):
            assert shown(call.there()) == theirs, number
            assert shown(call.there_by_remote()) == theirs, number


@needs_ucx("is what it is compared with")
def test_the_overload_is_the_one_that_upstream_finds(pair: Group) -> None:
    pair.run(check_overloads)


WRONG = [
    Call(torch.add, ONE, "two"),
    Call(torch.add, ONE),
    Call(torch.add, ONE, ONE, ONE, ONE),
    Call(torch.add, ONE, ONE, beta=2),
    Call(torch.numel, 1),
]


@needs_ucx("is what it is compared with")
def test_arguments_that_no_overload_takes(pair: Group) -> None:
    """The error is the same as upstream's."""
    pair.run(check_wrong)


def check_wrong() -> None:
    for number, call in enumerate(WRONG):
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            call.there_by_upstream()
        with pytest.raises(type(theirs.value)) as ours:
            call.there()
        assert str(ours.value) == str(theirs.value), number


def fails_there() -> None:
    future = rpc.rpc_async("worker1", torch.mm, args=(MATRIX, MATRIX))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        future.wait()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        future.value()


def test_an_error_of_the_operator(pair: Group) -> None:
    pair.run(fails_there)


#: Worker, function, arguments.
SCRIPT_CALLS: list[tuple[Any, ...]] = [
    ("worker1", f.script_add, (ONE, ONE)),
    (1, f.script_add, (ONE, ONE)),
    (rpc.WorkerInfo("worker1", 1), f.script_add, (ONE, ONE)),
    ("worker1", f.script_add, (ONE,), {"b": ONE}),
    ("worker1", f.script_add, (), {"b": ONE, "a": MATRIX[0, :2]}),
    ("worker1", f.script_parts, ([ONE, ONE],)),
    ("worker1", f.script_parts, ([ONE, ONE],), {"times": 3}),
    ("worker1", f.script_nothing, (ONE,)),
    ("worker1", f.script_async_add, ("worker0", ONE, ONE)),
    # Errors.
    ("worker1", f.script_nothing, (-ONE,)),
    ("worker1", f.script_add, (ONE,)),
    ("worker1", f.script_add, (ONE, "two")),
    ("worker1", f.script_add, (ONE, ONE, ONE)),
    ("worker1", f.script_add, (ONE, ONE), {"c": ONE}),
    ("worker1", f.script_add),
    ("nobody", f.script_add, (ONE, ONE)),
    (7, f.script_add, (ONE, ONE)),
    (None, f.script_add, (ONE, ONE)),
    ("worker1", "a name", (ONE, ONE)),
]


def outcome(invoke: Callable[..., Any], *call: Any) -> Any:
    try:
        return shown(invoke(*call))
    except Exception as error:  # noqa: BLE001 - any error is compared
        return type(error), str(error).split("frame #")[0]


def by_upstream(*call: Any) -> Any:
    from torch_rpc_ext._upstream import hooks as hooks

    to, function, *rest = call
    invoke = hooks._original(api, "_invoke_rpc")
    return invoke(to, function, api.RPCExecMode.ASYNC, *rest).wait()


def check_script_calls() -> None:
    # No callee could find this function by its name.
    elsewhere = torch.jit.CompilationUnit("def g(x: Tensor) -> Tensor:\n  return x\n").g
    calls = [*SCRIPT_CALLS, ("worker1", elsewhere, (ONE,))]
    found = []
    for number, call in enumerate(calls):
        theirs = outcome(by_upstream, *call)
        assert outcome(rpc.rpc_sync, *call) == theirs, number
        assert outcome(lambda *call: rpc.rpc_async(*call).wait(), *call) == theirs, number
        found.append(theirs)
    errors = [one for one in found if isinstance(one, tuple) and isinstance(one[0], type)]
    assert len(errors) == 11, found


@needs_ucx("is what it is compared with")
def test_torchscript_functions_are_called_as_upstream_does(pair: Group) -> None:
    pair.run(check_script_calls)


def check_futures() -> None:
    future = rpc.rpc_async("worker1", torch.add, args=(ONE, 1))
    seen: list[Any] = []
    after = future.then(lambda done: done.value() * 2)
    future.add_done_callback(lambda done: seen.append(done.wait()))
    assert after.wait().equal(ONE * 4)
    value = future.wait()
    assert value.equal(ONE + 1) and future.value() is value and future.done()
    end = time.monotonic() + 10
    while not seen:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert seen == [value]

    mixed = torch.futures.wait_all(
        [
            rpc.rpc_async("worker1", torch.add, args=(ONE, 1)),
            rpc.rpc_async("worker1", f.identity, args=(ONE,)),
            rpc.rpc_async("worker1", f.script_add, args=(ONE, ONE)),
            rpc.rpc_async("worker1", torch.numel, args=(ONE,)),
        ]
    )
    assert shown(mixed) == shown([ONE + 1, ONE, ONE * 2, 2])


def test_futures_of_builtins_are_futures(pair: Group) -> None:
    pair.run(check_futures)


def late(result: Any) -> Any:
    time.sleep(0.1)
    return result


BIG = torch.ones(2000, 2000)
#: Calls whose answers come long after rpc_async() has returned.
LATE = [Call(torch.mm, BIG, BIG), Call(late, ONE), Call(late, None)]


def done_while_python_stands_still(call: Call, seconds: float) -> bool:
    """Return whether the answer completes the future while this thread never releases the GIL."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        future = rpc.rpc_async("worker1", call.function, args=call.args)
        end = time.monotonic() + seconds
        while not (done := bool(future.done())) and time.monotonic() < end:
            ctypes.PyDLL(None).usleep(10_000)
    finally:
        sys.setswitchinterval(interval)
    future.wait()
    return done


def check_gil() -> None:
    for number, call in enumerate(LATE):
        assert done_while_python_stands_still(call, 20), number
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_invoke_rpc_builtin", "_invoke_rpc_python_udf"):
            patch.setattr(api, name, getattr(native_rpc, name))
        for call in LATE:
            assert not done_while_python_stands_still(call, 1), "this shows nothing"


@needs_ucx("takes the GIL in the thread that the answer comes to")
def test_no_gil_is_needed_to_complete_one(pair: Group) -> None:
    pair.run(check_gil)


# ---- functions of Python -----------------------------------------------------


class Unwilling:
    """Can be pickled but not unpickled."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return fail_at_the_caller, (self.error,)


def fail_at_the_caller(error: type[Exception]) -> None:
    raise error("not here")


def unwilling(error: type[Exception]) -> Unwilling:
    return Unwilling(error)


def check_results() -> None:
    value = rpc.rpc_async("worker1", f.identity, args=(ONE,))
    assert value.wait().equal(ONE) and value.value() is value.wait()
    assert type(value.wait()) is torch.Tensor
    nothing = rpc.rpc_async("worker1", f.nothing)
    assert nothing.wait() is None and nothing.then(lambda done: done.value()).wait() is None
    for result in (5, "text", [ONE, 2], (ONE, "two"), torch.nn.Parameter(ONE)):
        back = rpc.rpc_async("worker1", f.identity, args=(result,)).wait()
        assert shown(back) == shown(result)
    with dist_autograd.context() as context:
        leaf = torch.ones(2, requires_grad=True)
        back = rpc.rpc_async("worker1", f.identity, args=(leaf,)).wait()
        dist_autograd.backward(context, [(back * 3).sum()])
        assert dist_autograd.get_gradients(context)[leaf].equal(ONE * 3)


def test_results_of_python_functions(pair: Group) -> None:
    pair.run(check_results)


def check_unwilling() -> None:
    for error, seen in (
        (ValueError, ValueError),
        (TypeError, TypeError),
        (KeyError, RuntimeError),
        (KeyError, KeyError),
    ):
        future = rpc.rpc_async("worker1", unwilling, args=(error,))
        for _ in range(2):
            with pytest.raises(seen, match="not here"):
                future.wait()
    assert rpc.rpc_sync("worker1", f.identity, args=(1,)) == 1


def test_a_result_that_cannot_be_unpickled(pair: Group) -> None:
    """As upstream, a ValueError or TypeError stays what it is; any other error becomes a
    RuntimeError, which also keeps its own class."""
    pair.run(check_unwilling)
