"""Errors appear on the side that can act, and say which worker, which function, and what to do."""

from __future__ import annotations

import contextlib
import errno
import gc
import pickle
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import wait_for_file, wait_until_stopped
from tests.process.group import Group, workers
from tests.support.backend import needs_ucx, on_ucx


def caught(fn: Any, *args: Any, to: str = "worker1", timeout: float = -1.0) -> Exception:
    """Return the exception that a call raises at its caller."""
    try:
        rpc.rpc_sync(to, fn, args=args, timeout=timeout)
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError(f"{fn} raised nothing")


def timeout_text(end: Path, timeout: float = -1.0) -> str:
    """Return the error of a call that its time-out ends: the function returns only after that."""
    text = str(caught(wait_for_file, end, timeout=timeout))
    end.touch()
    return text


def check_timeout_text(folder: Path) -> None:
    start = time.monotonic()
    text = timeout_text(folder / "first", 0.2)
    assert time.monotonic() - start > 0.15
    assert "RPC ran for more than" in text, text
    end = folder / "second"
    for way in (
        lambda: rpc.rpc_async("worker1", wait_for_file, args=(end,), timeout=0.2).wait(),
        lambda: rpc.remote("worker1", wait_for_file, args=(end,)).to_here(timeout=0.2),
    ):
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            way()
    end.touch()
    assert rpc.rpc_sync("worker1", f.sleep, args=(0.3,), timeout=0) == 0.3, "0 means no time-out"


def test_timeout(pair: Group, tmp_path: Path) -> None:
    pair.run(check_timeout_text, tmp_path)


@needs_ucx("does not name the worker or the function")
def test_timeout_names_worker_and_function(pair: Group, tmp_path: Path) -> None:
    text = pair.run(timeout_text, tmp_path / "end", 0.2)
    assert "worker1" in text and "wait_for_file" in text, text


def open_gate() -> None:
    """Open the gate of slow_batch(), or the end of the group would wait for it."""
    from tests.process import remote_functions as r

    rpc.rpc_sync("worker1", r.open_gate)


def timeout_names() -> list[str]:
    """The names in the errors of calls of all kinds of functions that time out."""
    from tests.process import remote_functions as r

    calls: list[Any] = [
        lambda: rpc.rpc_sync("worker1", f.sleep, args=(0.0,), timeout=0.1),
        lambda: r.spin.sync("worker1", torch.ones(1), 1, rpc_timeout=0.1),
        lambda: r.nap.sync("worker1", 0.0, rpc_timeout=0.1),
        lambda: r.slow_batch.sync("worker1", 1, rpc_timeout=0.1),
        lambda: r.fail_on.sync("worker1", [], rpc_timeout=0.1),
    ]
    names = []
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call()
        found = re.search(r"with an error: (\S+) on worker", str(raised.value))
        names.append(found[1] if found else str(raised.value))
    return names


TIMEOUT_NAMES = [
    "tests.process.functions.sleep",
    *(
        f"tests.process.remote_functions.{name}"
        for name in ("spin", "nap", "slow_batch", "fail_on")
    ),
]


@needs_ucx("does not name the worker or the function")
def test_timeout_names_functions_of_all_kinds(pair: Group) -> None:
    pair.run(open_gate)
    pair[1].signal(signal.SIGSTOP)  # no kind of function may answer before the time-out
    try:
        wait_until_stopped(pair[1].child.pid)
        assert pair.run(timeout_names) == TIMEOUT_NAMES
    finally:
        pair[1].signal(signal.SIGCONT)


# Without init_timeout, init_rpc would wait for the other worker for 3 s only.
@workers(2, options={"rpc_timeout": 0.3, **({"init_timeout": 60.0} if on_ucx() else {})})
def test_the_default_timeout_is_the_options(tmp_path: Path) -> None:
    assert rpc.get_rpc_timeout() == pytest.approx(0.3)
    assert "RPC ran for more than" in timeout_text(tmp_path / "end")
    assert rpc.rpc_sync("worker1", f.sleep, args=(0.6,), timeout=50) == 0.6


def check_exception_types() -> None:
    value = caught(f.raise_value_error)
    assert type(value) is ValueError and "the value was wrong" in str(value)
    assert "raise_value_error" in str(value), "the remote traceback is missing"
    assert "worker1" in str(value), "the remote worker's name is missing"
    with pytest.raises(ValueError, match="the value was wrong"):
        rpc.remote("worker1", f.raise_value_error).to_here()
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), torch.ones(3)))


def test_remote_exception_keeps_type_and_traceback(pair: Group) -> None:
    pair.run(check_exception_types)


def check_own_exception() -> None:
    for error in (
        caught(f.raise_plain, "percent % brace {} quote ' end"),
        caught(f.raise_plain, ""),
    ):
        assert isinstance(error, f.PlainError), repr(error)
        assert "raise_plain" in str(error) + "".join(getattr(error, "__notes__", [])), (
            "no remote traceback"
        )


@needs_ucx("turns exception classes that are not Python's own into RuntimeError")
def test_remote_exception_of_a_users_class(pair: Group) -> None:
    pair.run(check_own_exception)


def check_exception_with_arguments() -> None:
    for fn, kind in (
        (f.raise_needs_arguments, f.NeedsArguments),
        (f.raise_reduces_itself, f.ReducesItself),
    ):
        error: Any = caught(fn)
        assert isinstance(error, kind), repr(error)
        assert (error.code, error.where) == (7, "here")
        text = str(error) + "".join(getattr(error, "__notes__", []))
        assert fn.__name__ in text, "no remote traceback"


def raise_here(error: Any) -> None:
    raise error


def raise_missing_file() -> None:
    open("/no such/file")  # noqa: SIM115


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def raise_keyword_only() -> None:
    raise KeywordOnly(code=7)


def check_what_exceptions_hold() -> None:
    missing: Any = caught(raise_missing_file)
    assert isinstance(missing, FileNotFoundError), repr(missing)
    assert (missing.errno, missing.filename) == (errno.ENOENT, "/no such/file")
    assert "worker1" in "".join(missing.__notes__), "no remote traceback"
    wanted: Any = caught(raise_here, ImportError("no such", name="n", path="p"))
    assert (wanted.name, wanted.path) == ("n", "p") and "worker1" in str(wanted)
    stopped: Any = caught(raise_here, StopIteration(5))
    assert isinstance(stopped, StopIteration) and stopped.value == 5
    group: Any = caught(raise_here, ExceptionGroup("both", [KeyError("a"), ValueError("b")]))
    assert [type(error) for error in group.exceptions] == [KeyError, ValueError]
    only: Any = caught(raise_keyword_only)
    assert isinstance(only, KeywordOnly) and only.code == 7 and "worker1" in str(only)
    # An RRef raises the same.
    with pytest.raises(FileNotFoundError) as raised:
        rpc.remote("worker1", raise_missing_file).to_here()
    assert raised.value.filename == "/no such/file"
    for error in (missing, wanted, stopped, group, caught(raise_here, KeyError("key"))):
        assert isinstance(error, RuntimeError), "as upstream"
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(error, type(again)) and str(again) == str(error)


@needs_ucx("keeps the class of ValueError and TypeError only")
def test_remote_exceptions_keep_what_they_hold(pair: Group) -> None:
    pair.run(check_what_exceptions_hold)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def relay(to: str, fn: Callable[[], object]) -> Any:
    return rpc.rpc_async(to, fn)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def relay_from_another_thread(to: str, fn: Callable[[], object]) -> Any:
    future = rpc.rpc_async(to, wait_for_the_relay)
    return torch.futures.collect_all([future, rpc.rpc_async(to, fn)])


def wait_for_the_relay() -> None:
    time.sleep(0.05)  # most likely, the function has returned its future by then


CONTEXTS: list[Callable[[], Any]] = [
    contextlib.nullcontext,
    dist_autograd.context,
    torch.autograd.profiler.profile,
    profiler_legacy.profile,
]


def check_ways_of_an_exception() -> None:
    for context in CONTEXTS:
        for fn, args in [
            (raise_missing_file, ()),
            (relay, ("worker0", raise_missing_file)),
            (relay_from_another_thread, ("worker0", raise_missing_file)),
        ]:
            with context():
                missing: Any = caught(fn, *args)
            assert isinstance(missing, FileNotFoundError), (context, fn, repr(missing))
            assert isinstance(missing, RuntimeError), (context, fn)
            assert (missing.errno, missing.filename) == (errno.ENOENT, "/no such/file")
            text = "".join(missing.__notes__)
            assert "raise_missing_file" in text, "no remote traceback"
            assert ("worker0" if args else "worker1") in text
    with pytest.raises(FileNotFoundError) as raised:
        rpc.remote("worker1", relay, args=("worker0", raise_missing_file)).to_here()
    assert raised.value.filename == "/no such/file"
    only: Any = caught(relay, "worker0", raise_keyword_only)
    assert isinstance(only, KeywordOnly) and only.code == 7 and "worker0" in str(only)


@needs_ucx("keeps the class of ValueError and TypeError only")
def test_a_remote_exception_is_the_same_by_every_way(pair: Group) -> None:
    pair.run(check_ways_of_an_exception)


def test_a_remote_exception_is_raised_under_every_profiler(pair: Group) -> None:
    pair.run(check_profilers)


def check_profilers() -> None:
    for context in CONTEXTS:
        with context():
            for error in (caught(raise_missing_file), caught(raise_here, ValueError("v"))):
                assert isinstance(error, (RuntimeError, ValueError)), (context, repr(error))


class Kept:
    """Something that a function keeps in a local variable."""


def failing_waits() -> Iterator[Callable[[], Any]]:
    """Yield waits for the exception of a remote function."""
    for error in (KeyError("gone"), ValueError("bad"), OSError(2, "no", "file")):
        yield lambda error=error: rpc.rpc_sync("worker1", raise_here, args=(error,))
        yield rpc.rpc_async("worker1", raise_here, args=(error,)).wait
        yield rpc.remote("worker1", raise_here, args=(error,)).to_here


def check_frames_are_freed() -> None:
    def fail(wait: Callable[[], Any]) -> tuple[weakref.ref[Kept], type[Exception], str]:
        kept = Kept()
        with pytest.raises(Exception) as raised:  # noqa: PT011  of many classes
            wait()
        return weakref.ref(kept), raised.type, str(raised.value)

    for wait in failing_waits():
        first, cls, text = fail(wait)
        second, *again = fail(wait)
        assert again[0].__name__ == cls.__name__, again
        assert again[1].splitlines()[:1] == text.splitlines()[:1], again
        gc.collect()
        assert first() is None and second() is None, f"{cls.__name__} keeps its frames"


class Unreadable:
    """Reading its pickle raises an error of a class that is no RuntimeError."""

    def __reduce__(self) -> tuple[Any, ...]:
        return {}.__getitem__, ("missing",)


def return_unreadable() -> Any:
    return Unreadable()


class Local:
    """What a caller has in its frame."""


def call_unreadable(way: Callable[[], Any]) -> weakref.ref[Local]:
    local = Local()
    with pytest.raises(KeyError, match="missing"):
        way()
    return weakref.ref(local)


def check_unreadable_answers() -> None:
    ways: list[Callable[[], Any]] = [
        lambda: rpc.rpc_sync("worker1", return_unreadable),
        lambda: rpc.rpc_async("worker1", return_unreadable).wait(),
        lambda: rpc.remote("worker1", return_unreadable).to_here(),
    ]
    kept = [call_unreadable(way) for way in ways]
    gc.collect()
    assert [one() for one in kept] == [None] * len(ways)


@needs_ucx("raises no KeyError")
def test_an_answer_that_cannot_be_read_keeps_no_frames_of_its_caller(pair: Group) -> None:
    pair.run(check_unreadable_answers)


class Holder:
    """Its method is called remotely, and returns something for which the callee keeps a name."""

    alive: weakref.WeakSet[Holder] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)

    def __reduce__(self) -> Any:
        return Holder, ()

    def get(self) -> dict[str, int]:
        return {"a": 1}


def holders() -> int:
    return len(Holder.alive)


def check_called_objects_are_freed() -> None:
    assert rpc.rpc_sync("worker1", Holder().get) == {"a": 1}
    end = time.monotonic() + 20
    while rpc.rpc_sync("worker1", holders):
        assert time.monotonic() < end, "the callee keeps the object whose method was called"
        time.sleep(0.01)


def test_the_object_of_a_called_method_is_freed(pair: Group) -> None:
    pair.run(check_called_objects_are_freed)


def test_a_remote_exception_keeps_no_frames_of_its_caller(pair: Group) -> None:
    pair.run(check_frames_are_freed)


def check_exception_that_cannot_be_built() -> None:
    error = caught(f.raise_cannot_be_built)
    assert isinstance(error, RuntimeError), repr(error)
    for word in ("Original exception on remote side was", "CannotBeBuilt", "code 7 at here"):
        assert word in str(error), error
    assert "raise_cannot_be_built" in str(error), "no remote traceback"


def test_remote_exception_that_cannot_be_built(pair: Group) -> None:
    """The error has upstream's text, which upstream's own suite checks."""
    pair.run(check_exception_that_cannot_be_built)


@needs_ucx("cannot rebuild an exception whose constructor needs arguments (pytorch issue 45044)")
def test_remote_exception_with_constructor_arguments(pair: Group) -> None:
    pair.run(check_exception_with_arguments)


def check_what_is_a_timeout(end: Path) -> None:
    from torch_rpc_ext._calls import failures

    assert failures.is_timeout(caught(wait_for_file, end, timeout=0.1))
    end.touch()
    for text in ("Timeout", "a timeout of the database", "RPCErr:1:RPC ran for more than"):
        assert not failures.is_timeout(caught(raise_here, RuntimeError(text))), text
    assert not failures.is_timeout(caught(raise_here, TimeoutError("the timeout of another")))


def test_a_timeout_is_told_by_its_code(pair: Group, tmp_path: Path) -> None:
    pair.run(check_what_is_a_timeout, tmp_path / "end")


#: Words that only this package's errors contain.
OUR_WORDS = (
    'worker "worker1" refused x: it is not in its allow_list',
    "the payload of the message changed on its way: its 3 bytes have another checksum",
    'RPCErr:0:f on worker "worker1" failed (peer lost): process 1 died',
    "RPCErr:1:RPC ran for more than set timeout (1 ms)",
    "RemoteException failed (overloaded)",
)


def check_texts_that_look_like_ours() -> None:
    from torch_rpc_ext import RetryPolicy, errors
    from torch_rpc_ext._calls import failures

    for text in OUR_WORDS:
        for error in (
            caught(f.script_raise, text),
            caught(raise_here, RuntimeError(text)),
            caught(raise_here, KeywordOnly(code=1)),
            creation_error(f.script_raise, text),
            creation_error(raise_here, RuntimeError(text)),
        ):
            assert not isinstance(error, errors.RpcError), repr(error)
            assert not failures.is_timeout(error), repr(error)
        assert text in str(caught(f.script_raise, text))
        assert text in str(caught(raise_here, RuntimeError(text)))
        assert rpc.rpc_sync("worker1", f.identity, args=(text,)) == text
    COUNTED.clear()
    with pytest.raises(RuntimeError, match="peer lost"):
        RetryPolicy(attempts=3, wait=0).rpc_sync("worker0", count_and_raise, (OUR_WORDS[2],))
    assert len(COUNTED) == 1


COUNTED: list[str] = []


def count_and_raise(text: str) -> None:
    COUNTED.append(text)
    raise RuntimeError(text)


def creation_error(fn: Any, *args: Any) -> Exception:
    """Return the exception that the RRef of a remote() call raises."""
    rref = rpc.remote("worker1", fn, args=args)
    try:
        rref.to_here()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError(f"{fn} raised nothing")


def count(text: str) -> None:
    COUNTED.append(text)


class ReadOnce:
    """Reports each time that it is unpickled."""

    def __reduce__(self) -> Any:
        return (count, ("RemoteException",))


def read_once() -> ReadOnce:
    return ReadOnce()


def check_what_looks_like_an_exception_is_read_once() -> None:
    COUNTED.clear()
    assert rpc.rpc_sync("worker1", read_once) is None
    assert COUNTED == ["RemoteException"]


@needs_ucx("has no errors by kind")
def test_a_functions_text_makes_no_error_of_ours(pair: Group) -> None:
    pair.run(check_texts_that_look_like_ours)


def test_a_result_is_unpickled_once(pair: Group) -> None:
    pair.run(check_what_looks_like_an_exception_is_read_once)


def check_text_survives() -> None:
    for text in (
        *("back\\slash \\n \\x41", "\u00e9 \u4e16\u754c \U0001f600", "tab\there"),
        "a name that is not UTF-8: \udc80",
    ):
        assert text in str(caught(f.raise_plain, text)), text


@needs_ucx("decodes escapes and mangles non-ASCII text in remote exceptions")
def test_remote_exception_text_survives(pair: Group) -> None:
    pair.run(check_text_survives)


def check_unpicklable() -> None:
    assert "pickle" in str(caught(lambda: None)).lower() or "lambda" in str(caught(lambda: None))
    error = caught(f.unpicklable_result)
    assert "pickle" in str(error).lower() or "local object" in str(error), repr(error)
    assert rpc.rpc_sync("worker1", f.identity, args=(1,)) == 1, "later calls are undisturbed"


def test_unpicklable_function_and_result(pair: Group) -> None:
    pair.run(check_unpicklable)


def only_here() -> None:
    """A function that is removed from the callee's module."""


def forget() -> None:
    del globals()["only_here"]


def check_missing_function() -> None:
    error = caught(only_here)
    assert isinstance(error, AttributeError) or not on_ucx(), repr(error)
    assert "only_here" in str(error) and "caller and" in str(error)
    assert rpc.rpc_sync("worker1", f.identity, args=(1,)) == 1


def test_function_missing_on_the_callee() -> None:
    with Group(2) as group:
        group[1].run(forget)
        group.run(check_missing_function)


def check_unknown_worker() -> None:
    for name in ("nobody", "", "worker11"):
        assert isinstance(caught(f.nothing, to=name), (RuntimeError, ValueError))
    assert "nobody" in str(caught(f.nothing, to="nobody"))
    with pytest.raises(RuntimeError):
        rpc.get_worker_info("nobody")


def test_unknown_worker_name(pair: Group) -> None:
    pair.run(check_unknown_worker)


def check_not_initialized() -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.rpc_sync("worker1", f.nothing)


def check_after_shutdown(was_there: Any) -> None:
    check_not_initialized()
    with pytest.raises(RuntimeError):
        rpc.rpc_async(was_there, f.nothing).wait()


def own_info() -> Any:
    return rpc.get_worker_info()


def shut_down() -> None:
    rpc.shutdown(graceful=False)


def test_call_before_init_and_after_shutdown() -> None:
    with Group(1, init=False) as group:
        group.run(check_not_initialized)
        group.init_all()
        group.run(shut_down)
        group.run(check_after_shutdown, "worker0")


def test_duplicate_names_are_refused() -> None:
    with Group(2, init=False) as group:
        group[1].name = "worker0"
        calls = [worker.init(2, rpc_timeout=30) for worker in group]
        errors = []
        for call in calls:
            with pytest.raises(RuntimeError) as raised:
                call.result()
            errors.append(str(raised.value))
        assert any("is not unique" in error and "worker0" in error for error in errors), errors


@pytest.mark.parametrize("rank", [2, -2, 100])
def test_rank_out_of_range(rank: int) -> None:
    with Group(1, init=False) as group:
        group[0].rank = rank
        with pytest.raises((RuntimeError, ValueError)) as raised:
            group[0].init(2, rpc_timeout=2).result()
        if on_ucx():
            assert str(rank) in str(raised.value) and "rank" in str(raised.value)


def test_init_twice_without_shutdown(pair: Group) -> None:
    with pytest.raises(RuntimeError, match="already initialized"):
        pair[0].init(2).result()
    assert pair.run(f.name_here) == "worker0"


@pytest.mark.parametrize(
    "options",
    [{"num_worker_threads": 0}, {"num_worker_threads": -1}, {"rpc_timeout": -1.0}],
    ids=str,
)
@needs_ucx("does not validate its options")
def test_bad_option_values_name_the_option(options: dict[str, Any]) -> None:
    from torch_rpc_ext import UcxRpcBackendOptions

    with pytest.raises(ValueError, match=next(iter(options))) as raised:
        UcxRpcBackendOptions(**options)
    assert str(next(iter(options.values()))) in str(raised.value)


@needs_ucx("has no options of ours")
def test_an_unknown_option_is_refused() -> None:
    import torch_rpc_ext

    options_class: Any = torch_rpc_ext.UcxRpcBackendOptions
    with pytest.raises(TypeError, match="num_worker_treads"):
        options_class(num_worker_treads=4)
    with pytest.raises(TypeError):
        options_class(4)
