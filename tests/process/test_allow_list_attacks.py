"""Attacks on the option allow_list by a worker of the group, which knows the secret.

An attack has failed when the attacker is refused, the command or the method has not run, and the
attacked worker still serves. docs/security.md says what a worker of the group can do nevertheless.
"""

from __future__ import annotations

import collections
import datetime
import functools
import importlib
import itertools
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import autograd, rpc
from torch.distributed.nn.api import remote_module
from torch.distributed.optim import optimizer
from torch.distributed.rpc import api as _untyped_api
from torch.distributed.rpc import internal as _untyped_internal
from torch.distributed.rpc import rref_proxy as _untyped_rref_proxy

from tests.process import functions as f
from tests.process import remote_functions, service
from tests.process.group import Group
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("has no allow-list")

# Upstream's functions have no type annotations.
api: Any = _untyped_api
internal: Any = _untyped_internal
rref_proxy: Any = _untyped_rref_proxy

SERVICE = "tests.process.service"
HERE = SERVICE.encode()


class Reduced:
    """Is pickled as a call of any callable with any arguments."""

    def __init__(self, function: Any, *args: Any, state: Any = None, items: Any = None) -> None:
        self.reduced = (function, args, state, items)

    def __reduce__(self) -> Any:
        return self.reduced

    def __call__(self) -> None:
        """Makes the object callable, so that it is taken for a function."""


class Named:
    """Is pickled as the name of a global."""

    def __init__(self, name: str) -> None:
        self.name = name


def sync(fn: Any, *args: Any) -> Any:
    return rpc.rpc_sync("worker1", fn, args=args, timeout=20)


def send(payload: bytes) -> Any:
    """Send a pickle as a request for a Python function."""
    from torch._C import _distributed_rpc as native

    info = rpc.get_worker_info("worker1")
    future = native._invoke_rpc_python_udf(info, payload, [], 20.0, False)  # type: ignore[attr-defined]
    return future.wait()


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] | None = None) -> None:
    """Check that the attacker gets an error with these words, and that worker1 still serves."""
    from torch_rpc_ext.errors import RefusedError

    with pytest.raises(kind or RefusedError) as raised:
        call()
    for word in words if kind else ("worker1", "allow_list", *words):
        assert word in str(raised.value), str(raised.value)
    assert sync(service.add, 1, 2) == 3


def command(path: str) -> str:
    return f"__import__('os').system('touch {path}')"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def program(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


UDF = named("torch.distributed.rpc.internal", "PythonUDF")


def call_with(argument: bytes) -> bytes:
    """The pickle of a request for service.add(argument, 1)."""
    return program(UDF, named(SERVICE, "add"), argument, b"K\x01\x86}\x87\x81")


def attack(body: Callable[..., Any], tmp_path: Path, allow: list[str], size: int = 2) -> None:
    path = tmp_path / "evil"
    with Group(size, options=[{}, {"allow_list": allow}, {}][:size]) as group:
        group.run(body, str(path))
    assert not path.exists(), "the attack ran"


LISTED = [SERVICE, "torch.optim.SGD", "torch.nn.Linear"]


# ---- by what pickles call ----------------------------------------------------


def forge_classes(path: str) -> None:
    # The attacker holds an RRef to a class; the type of a class is `type`.
    held = rpc.remote("worker1", service.Counter)
    held.to_here()
    classes = api.remote("worker1", api._rref_typeof_on_owner, args=(held,))
    refused(lambda: sync(api._rref_typeof_on_owner, classes), "type")
    made = Reduced(api._rref_typeof_on_owner, classes)
    refused(lambda: sync(service.add, made, 1), "_rref_typeof_on_owner")
    empty = Reduced(made, "Empty", (str,), {"__len__": int})
    # A str whose startswith() always says no.
    name = Reduced(made, "Name", (str,), {"startswith": empty})
    members = {"__module__": SERVICE, "__qualname__": "Counter"}
    forged = Reduced(made, "Forged", (), members)
    look = Reduced(getattr, forged, Reduced(name, "__getattribute__"))
    restore = importlib.import_module("torch_rpc_ext._upstream.payloads")._restore_tensor
    there = Reduced(look, restore, "__globals__")
    builtins = Reduced(Reduced(look, there, "__getitem__"), "__builtins__")
    evaluate = Reduced(Reduced(look, builtins, "__getitem__"), "eval")
    refused(lambda: sync(service.add, Reduced(evaluate, command(path)), 1))
    refused(lambda: sync(evaluate, command(path)))


def test_typeof_applied_twice_forges_no_class(tmp_path: Path) -> None:
    attack(forge_classes, tmp_path, [SERVICE])


def give_away(to: str) -> None:
    """Send another worker an RRef to a value that this worker owns."""
    rpc.rpc_sync(to, hold, args=(rpc.RRef(datetime.timedelta(1)),))


def hold(rref: Any) -> None:
    f.HELD["given"] = rref


def forge_with_an_empty_list(path: str) -> None:
    """The steps of forge_classes() against a worker whose allow-list is empty.

    Such a worker makes no value for the attacker; but its own program may have sent the attacker an
    RRef, as give_away() does.
    """
    from torch_rpc_ext.errors import RefusedError

    def refused_here(call: Callable[[], Any], what: str) -> None:
        with pytest.raises(RefusedError) as raised:
            call()
        for words in ('worker "worker1" refused', f"{what}: it is not in its allow_list"):
            assert words in str(raised.value), str(raised.value)
        # worker1 still answers.
        with pytest.raises(RefusedError, match=r"tests\.process\.service\.add"):
            sync(service.add, 1, 2)

    typeof = api._rref_typeof_on_owner
    held = f.HELD.pop("given")
    assert held.to_here() == datetime.timedelta(1)
    timedelta = "datetime.timedelta"
    refused_here(lambda: rpc.remote("worker1", datetime.timedelta).to_here(), timedelta)
    # One request for each step.
    refused_here(lambda: sync(typeof, held), f"the type {timedelta}")
    classes = rpc.remote("worker1", typeof, args=(held,))
    refused_here(classes.to_here, f"the type {timedelta}")
    refused_here(lambda: sync(typeof, classes), f"the type {timedelta}")
    # All steps in one request; the innermost step is read first.
    nested = f"{typeof.__module__}.{typeof.__qualname__} while a pickle is read"
    entry = {"__module__": optimizer.__name__, "__qualname__": "_script_local_optimizer_step"}
    restore = importlib.import_module("torch_rpc_ext._upstream.payloads")._restore_tensor
    for rref in (held, classes):
        made = Reduced(typeof, rref)
        empty = Reduced(made, "Empty", (str,), {"__len__": int})
        name = Reduced(made, "Name", (str,), {"startswith": empty})
        look = Reduced(getattr, Reduced(made, "F", (), entry), Reduced(name, "__getattribute__"))
        there = Reduced(look, restore, "__globals__")
        builtins = Reduced(Reduced(look, there, "__getitem__"), "__builtins__")
        evaluate = Reduced(Reduced(look, builtins, "__getitem__"), "eval")
        refused_here(lambda made=made: sync(made), nested)
        refused_here(lambda evaluate=evaluate: sync(Reduced(evaluate, command(path))), nested)
    # Later steps, with what a pickle may name in place of the results of earlier steps.
    refused_here(lambda: sync(Reduced(type, "Forged", (), entry)), "builtins.type")
    refused_here(lambda: sync(Reduced(getattr, restore, "__globals__")), ".__globals__")


def test_a_worker_that_lists_nothing_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "evil"
    with Group(2, options=[{}, {"allow_list": []}]) as group:
        group[1].run(give_away, "worker0")
        group.run(forge_with_an_empty_list, str(path))
    assert not path.exists(), "the attack ran"


def call_results(path: str) -> None:
    touch = f"touch {path}"
    for picked in (service.pick_function, service.pick_class):
        # The result of a call may not be called: neither by an opcode nor as the request's
        # function.
        refused(lambda p=picked: sync(service.add, Reduced(Reduced(p), touch), 1))
        refused(lambda p=picked: sync(Reduced(p), touch))
    journal = Reduced(service.Journal, path)
    refused(lambda: sync(service.add, Reduced(journal, 1), 1), "Journal")
    refused(lambda: sync(journal, 1), "Journal")
    # Functions that serve upstream's requests may not be called while a pickle is read, nor passed
    # on as values.
    for served in (api._gather_to_leader, rref_proxy._local_invoke, remote_module._create_module):
        refused(
            lambda s=served: sync(service.add, Reduced(s, 1, 2, 3), 1), "while a pickle is read"
        )
        refused(lambda s=served: sync(service.serve_through, s, 1, 2, 3), kind=TypeError)
    refused(lambda: sync(service.serve_through, getattr, 1, "real"), kind=TypeError)
    # What a module imports does not count as defined there; an operator does not either.
    refused(lambda: sync(torch.neg, torch.ones(1)), "aten::neg")
    refused(lambda: sync(Reduced(f.identity), 1), "identity")
    refused(lambda: sync(list, "abc"), "list")
    refused(lambda: sync(service.Counter.count, service.Counter), kind=TypeError)
    assert sync(service.Counter.count, service.Counter()) == 1
    factories = Reduced(collections.defaultdict, service.pick_function)
    refused(lambda: sync(service.add, factories, 1), kind=RuntimeError)
    nested: Any = Reduced(collections.defaultdict, list)
    assert sync(service.serve_through, service.Journal.of, path).path == path
    assert sync(service.add, [nested], []) == [{}]


def test_what_a_call_returns_is_not_called(tmp_path: Path) -> None:
    attack(call_results, tmp_path, LISTED)


def use_the_ellipsis(_: str) -> None:
    dots = named("builtins", "Ellipsis")
    for use in (b")R", b")\x81", b")}\x92"):  # REDUCE, NEWOBJ, NEWOBJ_EX
        refused(lambda u=use: send(call_with(dots + u)), "Ellipsis while a pickle is read")
    refused(lambda: send(call_with(dots + b"}" + text("a") + b"K\x01sb")), "a change of a")
    refused(lambda: send(program(UDF, dots, b")}\x87\x81")), "builtins.Ellipsis")
    look = named("builtins", "getattr") + dots + text("__reduce__") + b"\x86R"
    refused(lambda: send(call_with(look)), "__reduce__")


def test_the_ellipsis_does_nothing(tmp_path: Path) -> None:
    attack(use_the_ellipsis, tmp_path, LISTED)


def use_opcodes(path: str) -> None:
    system = b"cposix\nsystem\n"
    touch = text(f"touch {path}")
    counter = named(SERVICE, "Counter")
    add = named(SERVICE, "add")
    assert send(call_with(b"K\x02")) == 3
    for words, *parts in (
        ("opcode 0x69", b"(", touch, b"iposix\nsystem\n"),  # INST
        ("posix.system", b"(", system, touch, b"o"),  # OBJ
        ("posix.system", system, touch, b"\x85R"),
        ("opcode 0x6f", counter, b"(", add, touch, b"o"),
        ("opcode 0x82", b"\x82\x01"),
        ("opcode 0x84", b"\x84\x01\x00\x00\x00"),  # EXT
        ("opcode 0x50", b"Pposix\n"),
        ("opcode 0x51", text("posix"), b"Q"),  # PERSID
        ("opcode 0x97", b"\x97"),  # NEXT_BUFFER
        ("opcode 0x53", b"S'posix'\n"),
        ("service.add while a pickle is read", add, b")\x81"),  # NEWOBJ of a function
        ("service.add while a pickle is read", add, b")}\x92"),
        # Arguments that are not a tuple.
        ("without a tuple of arguments", named("builtins", "list"), text("ab"), b"R"),
        ("a call of a builtins.NoneType", counter, b"N)\x81"),
        ("a name that is no str", add, add, b"\x86", add, b"\x93"),  # STACK_GLOBAL
        ("a name that is no str", b"K\x01K\x02\x93"),
    ):
        for payload in (call_with(b"".join(parts)), program(*parts)):
            refused(lambda payload=payload: send(payload), words)
    # A place of the memo that holds nothing.
    refused(lambda: send(call_with(b"Nh\x00")), "KeyError: 0", kind=RuntimeError)
    # Before __init__, an object of pybind11 has no C++ part: it must not be used.
    info = named("torch._C._distributed_rpc", "WorkerInfo") + b")\x81"
    refused(lambda: send(call_with(info)), "WorkerInfo")
    for payload, words in (
        (b"", "a pickle ends in the middle"),
        (b"\x80", "a pickle ends in the middle"),
        (b"\x80\x04", "a pickle ends in the middle"),
        (b"\x80\x04X\xff\xff\xff\xff", "a pickle ends in the middle"),
        (b".", "pop from empty list"),
        (b"\x80\x04(.", "pop from empty list"),
        (b"\x80\x63.", "unsupported pickle protocol: 99"),
    ):
        refused(lambda payload=payload: send(payload), words, kind=RuntimeError)


def test_opcodes_that_call(tmp_path: Path) -> None:
    attack(use_opcodes, tmp_path, LISTED)


def use_containers(path: str) -> None:
    state = b"}" + text("path") + text(path) + b"sb"
    journal = named(SERVICE, "Journal") + b")\x81" + state
    for change in (b"Na", b"(Ne", b"K\x01Ns", b"(K\x01Nu", b"(N\x90"):
        refused(lambda change=change: send(call_with(journal + change)), "a change of", "Journal")
    # A deeply nested tuple: hash() of such a tuple ends the process.
    deep = b"}" + b")" + b"\x85" * 200_000 + b"Ns"
    refused(lambda: send(call_with(deep)), "tuples and slices in each other", kind=Exception)
    # From Python 3.12 on slices have a hash() too, which recurses into their parts: a chain of
    # slices, or of slices and tuples by turns, ends the process as well.
    cls, parts = named("builtins", "slice"), (b"", b"N", b"NN")
    for before, in_tuple, call in itertools.product(parts, (b"", b"\x85"), (b"R", b"\x81")):
        # slice(None, ..., (the one before,), None, ...), with the memo's place 1 for the latter.
        arguments = before + b"h\x01" + in_tuple + b"N" * (2 - len(before))
        link = b"h\x00" + arguments + b"\x87" + call + b"q\x010"
        chain = b"}" + cls + b"q\x000Nq\x010" + link * 1100 + b"h\x01Ns"
        refused(lambda c=chain: send(call_with(c)), "tuples and slices in each", kind=Exception)
    # An object whose class has a __hash__ in Python, within tuples that are the object's own state:
    # Python bounds how often the __hash__ runs, but not the tuples between two of its runs.
    tuples = b"h\x00" + b"\x85" * 990
    circle = named(SERVICE, "Point") + b")\x81q\x00}" + text("x") + tuples + b"sb"
    circle += b"0}h\x00Ns"
    refused(lambda: send(call_with(circle)), "a __hash__ in Python", kind=Exception)
    # Objects that are freed recursively: freeing a deep nest of them ends the process.
    slices = named("builtins", "slice") + b"q\x00" + b"h\x00" * 11_000 + b"N" + b"\x85R" * 11_000
    refused(lambda: send(call_with(slices)), "in each other", kind=Exception)
    deques = named("collections", "deque") + b"q\x00)R" + b"h\x00)Ra" * 11_000
    refused(lambda: send(call_with(deques)), "in each other", kind=Exception)
    # So do tuples that are made by a call: tuple([the one before]).
    deep = named("builtins", "tuple") + b"q\x000)" + b"\x85" * 990 + b"q\x010"
    deep += b"h\x00]h\x01a\x85Rq\x010" * 20 + b"h\x01"
    refused(lambda: send(call_with(deep)), "in each other", kind=RuntimeError)


def test_opcodes_that_change(tmp_path: Path) -> None:
    attack(use_containers, tmp_path, LISTED)


def set_state(path: str) -> None:
    picked = named(SERVICE, "pick_function")
    value = named("builtins", "ValueError") + b")R"
    shout = named(SERVICE, "Shout") + b")R"
    counter = named(SERVICE, "Counter") + b")\x81"
    error = named("torch_rpc_ext.errors", "RpcError") + b")R"
    for target in (value, shout, counter, error):
        for name in ("__class__", "__dict__", "__reduce__", "__setstate__", "__init__"):
            state = b"}" + text(name) + picked + b"s"
            for form in (state, b"N" + state + b"\x86"):
                refused(
                    lambda t=target, s=form: send(call_with(t + s + b"b")), "a change of", kind=None
                )
    for target, name in ((value, "with_traceback"), (counter, "count"), (shout, "add_note")):
        state = b"}" + text(name) + picked + b"sb"
        refused(lambda t=target, s=state: send(call_with(t + s)), "a change of", name)
    loud = b"}" + text("loud") + text(path) + b"sb"
    refused(lambda: send(call_with(shout + loud)), "loud")
    # An attribute name that is not a str; a state that is not a dict; the state of a class, of a
    # function, of a tensor.
    refused(lambda: send(call_with(counter + b"}K\x01NsK\x01\x86b")), "a change of")
    for target in (named(SERVICE, "Counter"), picked, b"]", b"K\x01", named("builtins", "list")):
        refused(lambda t=target: send(call_with(t + b"}" + text("a") + b"K\x01sb")), "a change of")


def test_the_state_of_exceptions_and_instances(tmp_path: Path) -> None:
    attack(set_state, tmp_path, LISTED)


def set_other_states(path: str) -> None:
    """A __setstate__ that calls dict.update() takes pairs too, and dicts of other classes."""
    picked = named(SERVICE, "pick_function")
    ordered = named("collections", "OrderedDict") + b")R"
    for cls, name in (
        (named("torch.nn", "Linear"), "forward"),
        (named("torch.nn", "Linear"), "__reduce_ex__"),
        (named("torch.optim", "SGD"), "step"),
        (named(SERVICE, "Double"), "forward"),
        (named(SERVICE, "Diary"), "append"),
    ):
        # What the __setstate__ of SGD needs beside the method.
        named_values = (text(name) + picked, text("param_groups") + b"]", text("defaults") + b"}")
        pairs = b"](" + b"".join(pair + b"\x86" for pair in named_values) + b"e"
        items = ordered + b"(" + b"".join(named_values) + b"u"
        for state in (pairs, items):
            change = cls + b")\x81" + state + b"b"
            refused(lambda c=change: send(call_with(c)), "a change of", kind=None)
    assert sync(service.path_of, service.Diary(path)) == path


def test_states_of_another_form(tmp_path: Path) -> None:
    attack(set_other_states, tmp_path, LISTED)


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def use_ranges(_: str) -> None:
    """Python makes the text of these exceptions of object[start], also where that is negative."""
    decode, encode = (named("builtins", f"Unicode{kind}Error") for kind in ("Decode", "Encode"))
    translate = named("builtins", "UnicodeTranslateError")
    read = named("builtins", "str")

    def made(kind: bytes, start: int, end: int) -> bytes:
        whole = b"C\x01x" if kind == decode else text("x")
        first = b"" if kind == translate else text("utf-8")
        return kind + b"(" + first + whole + number(start) + number(end) + text("r") + b"tR"

    far = 2**45
    for start, end in ((-far, 1 - far), (-8, -7), (-1, 0)):
        for kind in (decode, encode, translate):
            error = made(kind, start, end)
            for argument in (error, read + error + b"\x85R"):
                refused(lambda a=argument: send(call_with(a)), "range", kind=Exception)
    for kind in (decode, encode, translate):
        for name, value in (
            *(("start", number(-far)), ("start", number(-1))),
            *(("object", b"N"), ("object", b"]"), ("object", b"K\x01")),
            ("object", text("y") if kind == decode else b"C\x01y"),
        ):
            error = made(kind, 0, 1) + b"}" + text(name) + value + b"sb"
            refused(lambda e=error: send(call_with(e)), "range", kind=Exception)
        error = kind + b")\x81}" + text("end") + b"K\x01sb"
        refused(lambda e=error: send(call_with(e)), "range", kind=Exception)
    for error in (
        UnicodeDecodeError("utf-8", b"abc", 1, 2, "bad"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "unexpected end"),
        UnicodeEncodeError("ascii", "ab", 1, 9, "bad"),
    ):
        (got,) = sync(service.add, [error], [])
        assert str(got) == str(error) and got.object == error.object


def test_exceptions_with_a_range(tmp_path: Path) -> None:
    attack(use_ranges, tmp_path, [SERVICE])


def nest_exceptions(_: str) -> None:
    """Python frees what these classes hold in C by recursion, which ends the process."""
    many = 11_000
    stop = named("builtins", "StopIteration") + b"q\x00"
    by_call = stop + b"h\x00" * many + b"N" + b"\x85R" * many
    link = b"h\x00)R}h\x01h\x02sbq\x020"
    by_state = stop + b"0" + text("value") + b"q\x010Nq\x020" + link * many + b"h\x02"
    slices = named("builtins", "slice") + b"q\x00" + b"h\x00" * many + b"N" + b"\x85\x81" * many
    both = named("builtins", "slice") + b"q\x010" + stop
    both += b"h\x00h\x01" * (many // 2) + b"N" + b"\x85R" * (many // 2 * 2)
    syntax = named("builtins", "SyntaxError") + b"q\x00"
    # SyntaxError("m", (the next one, 1, 2, None))
    in_tuples = syntax + (b"h\x00" + text("m") + b"(") * many + b"N" + b"K\x01K\x02Nt\x86R" * many
    # SyntaxError("m", [the next one, 1, 2, None]), without the arguments, which Python frees with
    # care.
    link = b"h\x00" + text("m") + b"](h\x02K\x01K\x02Ne\x86R}h\x01)sbq\x020"
    in_lists = syntax + b"0" + text("args") + b"q\x010Nq\x020" + link * many + b"h\x02"
    for chain in (by_call, by_state, slices, both, in_tuples, in_lists):
        refused(lambda c=chain: send(call_with(c)), "in each other", kind=Exception)


def test_exceptions_in_each_other(tmp_path: Path) -> None:
    attack(nest_exceptions, tmp_path, [SERVICE])


def use_dates(_: str) -> None:
    """Python makes dates of bytes without a look at more than the month; the date's ctime() then
    reads beside Python's tables."""
    date, moment, hour = (named("datetime", name) for name in ("date", "datetime", "time"))
    for made, call in (
        *((date + b"C\x04\0\0\1\0\x85", b"R"), (date + b"C\x04\0\0\1\1\x85", b"\x81")),
        (date + b"C\x04\7\xe0\2\x1e\x85", b"R"),
        (moment + b"C\x0a\0\0\1\1\0\0\0\0\0\0\x85", b"R"),
        (moment + b"C\x0a\7\xe0\1\1\0\xff\0\0\0\0\x85", b"R"),
        (hour + b"C\x06\0\0\xff\0\0\0\x85", b"R"),
    ):
        refused(lambda d=made + call: send(call_with(d)), "ValueError", kind=Exception)
    now = datetime.datetime.now(datetime.UTC)
    assert sync(service.add, [now, now.date(), now.time()], []) == [now, now.date(), now.time()]


def test_dates_that_do_not_exist(tmp_path: Path) -> None:
    attack(use_dates, tmp_path, [SERVICE])


def use_short_forms(path: str) -> None:
    assert send(b"\x01Call\0%b\0%b\0" % (HERE, b"pick_class")) is type
    for module, name in (
        (b"posix", b"system"),
        (b"builtins", b"eval"),
        (b"builtins", b"getattr"),
        (b"builtins", b"list"),
        (HERE, b"run_command"),
        (HERE, b"os.system"),
        (HERE, b"add.__globals__"),
        (HERE, b"Counter.__subclasses__"),
        (HERE, b"Counter.count.__globals__"),
        (HERE, b"Counter._reset"),
        (b"", b""),
        (b"torch.distributed.rpc.internal", b"_InternalRPCPickler"),
        (b"torch_rpc_ext._upstream.payloads", b"_restore_tensor"),
        (b"torch_rpc_ext._upstream.payloads", b"_from_pickle"),
        (b"_remote_module_non_scriptable", b"forward"),
        (b"_remote_module_non_scriptable", b"rpc.remote"),
    ):
        refused(lambda m=module, n=name: send(b"\x01Call\0%b\0%b\0" % (m, n)))
    for payload, words in (
        (b"\x01Call\0", "not enough values"),
        (b"\x01Call\0a", "not enough values"),
        (b"\x01Call\0a\0b\0c\0d", "too many values"),
        (b"\x01Call\0\xff\0\xff\0", "UnicodeDecodeError"),
        (b"\x01Tensor", "list index out of range"),  # this message has no tensor
    ):
        refused(lambda payload=payload: send(payload), words, kind=RuntimeError)
    for payload in (b"\x01None", program(b"N"), program(named(SERVICE, "add"))):
        refused(lambda payload=payload: send(payload), "a request that is no call")
    # An object that only looks like a call.
    journal = named(SERVICE, "Journal") + b")\x81}(" + text("func") + named(SERVICE, "add")
    refused(lambda: send(program(journal + text("args") + b")" + text("kwargs") + b"}ub")))


def test_short_payloads(tmp_path: Path) -> None:
    attack(use_short_forms, tmp_path, LISTED)


# ---- by what requests call -----------------------------------------------------


def serve_protocol(x: torch.Tensor) -> None:
    """One valid call of each kind that use_protocol() tries in other forms."""
    from torch_rpc_ext.aio import _batch, _server

    counter = rpc.remote("worker1", service.Counter)
    double = rpc.remote("worker1", service.Double)
    assert sync(rref_proxy._local_invoke, counter, "count", (), {}) == 1
    assert sync(api._rref_typeof_on_owner, counter) is service.Counter
    parameters = sync(remote_module._param_rrefs, double, True)
    local = sync(optimizer._new_local_optimizer, torch.optim.SGD, parameters, 0.5)
    with autograd.context() as context:
        result = sync(rref_proxy._local_invoke, double, "forward", (x,), {})
        autograd.backward(context, [result.sum()])
        sync(optimizer._local_optimizer_step, local, context)
    (weight,) = parameters
    assert weight.to_here().item() == 2 - 0.5 * x.sum().item()
    sync(remote_module._instantiate_template, service.DoubleInterface, False)
    what = (service.Double, (), {}, "cpu")
    made = rpc.remote("worker1", remote_module._create_module, args=what)
    assert sync(rref_proxy._local_invoke, made, "forward", (x,), {}).equal(2 * x)
    scripted = sync(remote_module._create_module_with_interface, *what, service.DoubleInterface)
    assert scripted.owner_name() == "worker1"
    assert sync(_server.run, remote_functions.nap, (1, 2), (0.0, "value"), {}) == "value"
    assert sync(_batch.enqueue, remote_functions.double, (x,)).equal(2 * x)
    assert sync(_server.cancel, (1, 2)) is None


def use_protocol(path: str) -> None:
    from torch_rpc_ext.aio import _batch, _server

    serve_protocol(torch.ones(2))
    journal = service.Journal(path)
    held = rpc.remote("worker1", service.Journal, args=(path,))
    linear = rpc.remote("worker1", service.Double)
    held.to_here(), linear.to_here()
    invoke, served = rref_proxy._local_invoke, service.serve_through
    create, instantiate = remote_module._create_module, remote_module._instantiate_template
    create_scripted = remote_module._create_module_with_interface
    new_optimizer, step = optimizer._new_local_optimizer, optimizer._local_optimizer_step
    no_rref, no_tuple = "expected an RRef, got a Journal", "arguments must be a tuple"
    # Objects that look like an RRef, and calls of what is not a listed class.
    for kind, words, function, *args in (
        (TypeError, no_rref, invoke, journal, "append", (1,), {}),
        (TypeError, no_rref, api._rref_typeof_on_owner, journal),
        (TypeError, no_rref, remote_module._param_rrefs, journal, True),
        (TypeError, no_rref, step, journal, 1),
        (TypeError, "an RRef to a local optimizer", step, held, 1),
        (TypeError, no_rref, new_optimizer, service.Journal, [journal]),
        (TypeError, "a class of Optimizer", new_optimizer, service.Journal, [linear], path),
        (None, "a call of <function serve_through", new_optimizer, served, [linear], path),
        (None, "a call of <bound method Journal.of", create, journal.of, (path,), {}, "cpu"),
        (None, "a call of <tests.process.service.Journal", create, journal, (1,), {}, "cpu"),
        (TypeError, no_tuple, create, service.Double, journal, {}, "cpu"),
        (TypeError, "a class of Module", create_scripted, service.Journal, (), {}, "cpu", None),
        (ValueError, "decorated by @torch.jit.interface", instantiate, service.Journal, False),
        (None, "a call of <tests.process.service.Journal", instantiate, journal, False),
        (None, "Journal.__call__", invoke, held, "__call__", (1,), {}),
        (None, "Journal.path", invoke, held, "path", (), {}),
        (None, "Journal.of.__func__", invoke, held, "of.__func__", (), {}),
        (TypeError, no_tuple, invoke, held, "append", journal, {}),
        (TypeError, "not an async remote function", _server.run, service.add, (1, 2), (1, 2), {}),
        (None, "a tests.process.service.Journal", _server.run, journal, (1, 2), (), {}),
        (TypeError, "not a batched remote function", _batch.enqueue, service.add, (1, 2)),
        (TypeError, "must be two numbers", _server.cancel, [1]),
    ):
        refused(lambda fn=function, a=args: sync(fn, *a), words, kind=kind)


def test_the_protocols_own_calls(tmp_path: Path) -> None:
    asynchronous = [f"{remote_functions.__name__}.{name}" for name in ("nap", "double")]
    attack(use_protocol, tmp_path, [*LISTED, *asynchronous])


def use_rref_data(_: str) -> None:
    receive = internal._InternalRPCPickler._py_rref_receiver
    add = service.add
    # What the forms below lie about: an RRef, tensors, and a RemoteModule.
    assert sync(add, [rpc.RRef(1)], [])[0].to_here() == 1
    assert sync(add, torch.ones(2), torch.ones(2)).sum() == 4
    double: Any = remote_module.RemoteModule("worker1/cpu", service.Double)
    assert sync(service.call_module, double, torch.ones(2)).sum() == 4
    for data in (
        (),
        [1, 2, 3, 4, 5, 6, "Tensor"],
        (0, 0, 10**6, 0, 10**6 + 1, 0, "List[" * 100_000),
        (0, 0, 10**6, 0, 10**6 + 1, 0, "(" * 4000),
        ("0", 0, 10**6, 0, 10**6 + 1, 0, "Tensor"),
        (10**5, 0, 10**6, 0, 10**6 + 1, 0, 7),
    ):
        bad = Reduced(receive, data)
        words = "not what an RRef is pickled as"
        refused(lambda bad=bad: sync(add, bad, 1), words, kind=RuntimeError)
    for index in (-1, 7, slice(0, 1), "0", 1.5, None, True):
        restore = importlib.import_module("torch_rpc_ext._upstream.payloads")
        for function in (restore._restore_tensor, restore._restore_parameter):
            bad = Reduced(function, index)
            words = f"a message of 0 tensors has none at {index!r}"
            refused(lambda bad=bad: sync(add, bad, 1), words, kind=RuntimeError)
    methods = remote_module._NON_SCRIPTABLE_REMOTE_MODULE_MODULE._generated_methods
    remote = remote_module._remote_module_receiver
    for words, attributes in (
        (
            "not what a RemoteModule is pickled as",
            ("worker1", "cpu", False, False, [add], (0,) * 6 + ("PyObject",)),
        ),
        ("not what an RRef is pickled as", ("worker1", "cpu", False, False, methods, ())),
        ("not enough values", (1, 2, 3)),
    ):
        bad = Reduced(remote, *attributes)
        refused(lambda bad=bad: sync(add, bad, 1), words, kind=RuntimeError)


def test_data_that_lies(tmp_path: Path) -> None:
    attack(use_rref_data, tmp_path, LISTED)


def use_scripts(_: str) -> None:
    """TorchScript functions and torch's operators do not belong to a listed module."""
    script = torch.jit.script(f.script_add)
    refused(lambda: sync(script, torch.ones(1), torch.ones(1)), "script_add")
    refused(lambda: sync(torch.mul, torch.ones(1), 1), "aten::mul")
    refused(lambda: rpc.remote("worker1", torch.mul, (torch.ones(1), 1)).to_here(), "aten::mul")


def test_scripts_and_operators(tmp_path: Path) -> None:
    attack(use_scripts, tmp_path, [SERVICE])


# ---- by answers ----------------------------------------------------------------


class Answer:
    """An answer of a worker; its pickle names what the caller has not listed."""

    def __init__(self, reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def answer(kind: str, path: str) -> Any:
    """Runs at the attacker, which answers a call from a worker with an allow-list."""
    touch = f"touch {path}"
    evil = pickle.dumps(Reduced(os.system, touch))
    shout = (pickle.dumps(service.Shout),)
    path_too = {"loud": pickle.dumps(path), "path": pickle.dumps(path)}
    return {
        "command": lambda: Reduced(os.system, touch),
        "class": lambda: internal.RemoteException(touch, os.system),
        "listed": lambda: internal.RemoteException(path, service.Journal),
        "classes": lambda: failed((evil, pickle.dumps(service.Journal)), b"", (), {}, {}),
        "whole": lambda: failed(shout, evil, (), {}, {}),
        "args": lambda: failed(shout, b"", (evil,), {}, {}),
        "attributes": lambda: failed(shout, b"", (), {"x": evil, "path": evil}, {}),
        "fields": lambda: failed(shout, b"", (), path_too, path_too),
        "names": lambda: failed(shout, b"", (), {"__class__": shout[0]}, {}),
        "shape": lambda: failed(Reduced(os.system, touch), 1, 2, 3, 4),
        "state": lambda: Reduced(service.Shout, state={"loud": path}),
        "range": lambda: failed((pickle.dumps(UnicodeDecodeError),), b"", (), {}, FAR),
    }[kind]()


def failed(*parts: Any) -> Any:
    from torch_rpc_ext._upstream.exceptions import RemoteType

    return internal.RemoteException("it failed", RemoteType((*parts, ())))


#: Python would make the text of a UnicodeDecodeError of memory elsewhere.
FAR = {
    name: pickle.dumps(value)
    for name, value in {
        **{"encoding": "utf-8", "reason": "r", "object": b"x"},
        **{"start": -(2**45), "end": 1 - 2**45},
    }.items()
}
REFUSED, FAILED = ("RefusedError", 'worker "worker0" refused'), ("Shout", "it failed")
#: What the caller of each answer sees: a refusal, or the error without the parts that were smuggled
#: into it.
SEEN = {
    "command": REFUSED,
    "class": REFUSED,
    "listed": ("TypeError", "not what an exception is sent as"),
    "classes": ("RuntimeError", "it failed"),
    "whole": FAILED,
    "args": FAILED,
    "attributes": FAILED,
    "fields": FAILED,
    "names": ("TypeError", "not what an exception is sent as"),
    "shape": REFUSED,
    "state": REFUSED,
    "range": ("UnicodeDecodeError", ""),
}


def ask(kind: str, path: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011  SEEN names the class
        rpc.rpc_sync("worker1", functools.partial(answer), args=(kind, path), timeout=20)
    seen, words = SEEN[kind]
    assert type(raised.value).__name__ == seen
    assert words in str(raised.value)


@pytest.mark.parametrize("kind", SEEN)
def test_answers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "evil"
    with Group(2, options=[{"allow_list": LISTED}, {}]) as group:
        group.run(ask, kind, str(path))
        assert group[1].run(call_worker0) == 3
    assert not path.exists(), "the attack ran"


def call_worker0() -> Any:
    return rpc.rpc_sync("worker0", service.add, args=(1, 2), timeout=20)
