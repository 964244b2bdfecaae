"""Random programs of pickle's opcodes against the option allow_list; a target of `make fuzz`.

The programs are made by a grammar, so that most of them run to some depth, with the names that an
attacker would use; one in eight is then damaged at random. None may call what the list does not
name: the bait (bait.py) must not be called, and Python's audit hooks must not hear of a command, a
file, an import or code that is compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import pickle
import random
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch

# str(tensor) imports this when torch first runs it.
from torch._subclasses import schema_check_mode as _schema_check_mode
from torch.distributed.nn.api import remote_module as _remote_module
from torch.distributed.optim import optimizer as _optimizer

from tests.fuzz import bait

# Calls of the library's own import these when they first run.
from torch_rpc_ext._group import dynamic, returning
from torch_rpc_ext.aio import _batch, _server

_ON_DEMAND = (dynamic, returning, _batch, _server, _schema_check_mode)

_WATCHED = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "marshal.", "code.")
_WATCHED_NAMES = ("open", "exec", "compile", "import", "cpython.run_command")
# str() and bytes() look encodings up, in the standard library.
_HARMLESS_IMPORT = "encodings."

_OFFERED = "tests.fuzz.offered"
_INTERNAL = "torch.distributed.rpc.internal"
_GOOD = [
    *((_OFFERED, name) for name in ("take", "pick_function", "pick_class", "pick_type")),
    *((_OFFERED, name) for name in ("pick_instance", "Holder", "Failure", "Items", "Holder.of")),
    *((_OFFERED, "Holder.first"), (_INTERNAL, "PythonUDF"), (_INTERNAL, "RemoteException")),
    *((_INTERNAL, "_InternalRPCPickler"), ("builtins", "getattr")),
    *(("builtins", name) for name in ("list", "dict", "str", "bytes", "int", "tuple", "set")),
    *(("builtins", name) for name in ("ValueError", "OSError", "frozenset", "slice", "range")),
    *(("collections", name) for name in ("OrderedDict", "defaultdict", "deque")),
    *(("torch", name) for name in ("float32", "device", "Size")),
    *(("torch_rpc_ext._upstream.payloads", n) for n in ("_restore_tensor", "_restore_parameter")),
    *(("torch_rpc_ext._upstream.exceptions", "RemoteType"), ("torch_rpc_ext.errors", "RpcError")),
    *(("torch._C._distributed_rpc", "WorkerInfo"), ("datetime", "timedelta")),
    (PosixPath.__module__, "PosixPath"),
    *(("numpy", "ndarray"), ("numpy", "dtype")),
    *(("numpy._core.multiarray", n) for n in ("_reconstruct", "scalar")),
    ("numpy._core.numeric", "_frombuffer"),
    *(("torch.distributed.rpc.api", n) for n in ("_rref_typeof_on_owner", "_gather_to_leader")),
    *(
        ("torch.distributed.rpc.rref_proxy", "_local_invoke"),
        ("torch_rpc_ext._group.dynamic", "member_left"),
    ),
    *((_remote_module.__name__, n) for n in ("_create_module", "_remote_module_receiver")),
    *(("_remote_module_non_scriptable", n) for n in ("forward", "_remote_forward")),
    *((_optimizer.__name__, n) for n in ("_new_local_optimizer", "_local_optimizer_step")),
    *(("torch_rpc_ext.aio._server", "run"), ("torch_rpc_ext.aio._batch", "enqueue")),
]
_EVIL = [
    *(("posix", "system"), ("os", "system"), ("subprocess", "Popen"), ("builtins", "eval")),
    *(("builtins", "exec"), ("builtins", "type"), ("builtins", "object"), ("builtins", "open")),
    *(("builtins", "__import__"), ("builtins", "map"), ("builtins", "object.__getattribute__")),
    *(("functools", "partial"), ("operator", "attrgetter"), ("types", "FunctionType")),
    *(("copyreg", "_reconstructor"), ("importlib", "import_module"), ("this", "s")),
    *(("tests.fuzz.bait", n) for n in ("function", "Class", "INSTANCE", "Class.method")),
    *((_OFFERED, n) for n in ("bait.function", "take.__globals__", "Holder.__init__", "bait")),
    *((_OFFERED, n) for n in ("Holder.text", "Holder.kind", "Holder.__subclasses__", "Any")),
    *(("sys", "modules"), ("torch", "load"), ("torch.jit", "load"), ("torch.serialization", "os")),
    *(
        (_INTERNAL, "sys"),
        ("torch_rpc_ext._upstream.payloads", "sys"),
        ("torch_rpc_ext._upstream.payloads", "_find"),
    ),
]
_WORDS = [
    *("true", "", "a", "append", "first", "of", "text", "kind", "extend", "__class__", "__dict__"),
    *("__globals__", "__reduce__", "__setstate__", "__init__", "func", "args", "cls", "path"),
    *("_tensor_receiver", "_py_rref_receiver", "_script_module_receiver", "utf-8", "cpu", "strict"),
    *("__import__('os').system('true')", "values", "__notes__", "worker0", "with_traceback"),
]


# Without the first two bytes, which name the protocol, and the last one, which ends the pickle.
_ARRAYS = [
    pickle.dumps(value, protocol=3)[2:-1]
    for value in (
        *(np.ones((2, 1)), np.arange(3)[::2], np.array(["ab", "c"]), np.float32(1)),
        *(np.array(["2000-01-01"], "M8[25s]"), np.dtype(">f4"), np.void(b"ab"), np.dtype("O")),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
    )
]


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


class Programs:
    """Makes programs.

    Args:
        seed: the same one makes the same programs.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._remembered = 0

    def next(self) -> bytes:
        """Return a payload."""
        draw = self._random
        if draw.random() < 0.05:
            module, name = self._names()
            return b"\x01Call\0%b\0%b\0" % (module.encode(), name.encode())
        body = b"\x80\x04"
        for place in range(2):
            self._remembered = place
            body += self._value(3) + b"q" + bytes([place]) + b"0"
        self._remembered = 2
        if draw.random() < 0.6:
            function = self._callee(3)
            body += self._name(_INTERNAL, "PythonUDF") + function + self._tuple(2) + b"}\x87\x81."
        else:
            body += self._value(5) + b"."
        return self._damaged(body) if draw.random() < 0.125 else body

    def _damaged(self, body: bytes) -> bytes:
        draw, data = self._random, bytearray(body)
        for _ in range(draw.randrange(1, 5)):
            at = draw.randrange(len(data))
            kind = draw.randrange(3)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                del data[at : at + draw.randrange(1, 9)]
            else:
                data[at:at] = draw.choice(
                    (b"R", b"\x81", b"b", b"\x93", b"0", b"2", b"(", b"o", b"u")
                )
            if not data:
                break
        return bytes(data)

    def _names(self) -> tuple[str, str]:
        return self._random.choice(_GOOD if self._random.random() < 0.8 else _EVIL)

    def _name(self, module: str, name: str) -> bytes:
        if self._random.random() < 0.1:
            return f"c{module}\n{name}\n".encode()
        return text(module) + text(name) + b"\x93"

    def _tuple(self, depth: int) -> bytes:
        items = b"".join(self._value(depth - 1) for _ in range(self._random.randrange(4)))
        return b"(" + items + b"t"

    def _callee(self, depth: int) -> bytes:
        if depth > 0 and self._random.random() < 0.3:
            return self._value(depth - 1)
        return self._name(*self._names())

    def _state(self, depth: int) -> bytes:
        pairs = b"".join(
            text(self._random.choice(_WORDS)) + self._value(depth - 1)
            for _ in range(self._random.randrange(3))
        )
        state = b"}(" + pairs + b"u"
        return state if self._random.random() < 0.7 else b"N" + state + b"\x86"

    def _value(self, depth: int) -> bytes:
        draw = self._random
        if self._remembered and draw.random() < 0.1:
            return b"h" + bytes([draw.randrange(self._remembered)])
        if depth <= 0 or draw.random() < 0.2:
            return draw.choice(
                (
                    *(
                        b"N",
                        b"K\x00",
                        b"K\x01",
                        b")",
                        b"]",
                        b"}",
                        b"\x8f",
                        b"\x88",
                    ),
                    text(draw.choice(_WORDS)),
                    b"C\x02ab",
                    self._name(*self._names()),
                )
            )
        value, callee = self._value, self._callee
        kind = draw.randrange(18)
        if kind < 4:
            return callee(depth) + self._tuple(depth) + b"R"
        if kind == 4:
            return callee(depth) + self._tuple(depth) + b"\x81"
        if kind == 5:
            return callee(depth) + self._tuple(depth) + self._state(depth) + b"\x92"
        if kind in (6, 7):
            return value(depth - 1) + self._state(depth) + b"b"
        if kind == 8:
            return self._tuple(depth)
        if kind == 9:
            return value(depth - 1) + value(depth - 1) + b"a"
        if kind == 10:
            return value(depth - 1) + b"(" + value(depth - 1) + value(depth - 1) + b"e"
        if kind == 11:
            return value(depth - 1) + value(depth - 1) + value(depth - 1) + b"s"
        if kind == 12:
            return value(depth - 1) + b"(" + value(depth - 1) + b"\x90"
        if kind == 13:  # getattr(value, word)
            name = self._name("builtins", "getattr")
            return name + callee(depth) + text(draw.choice(_WORDS)) + b"\x86R"
        if kind == 14:
            return value(depth - 1) + b"q" + bytes([draw.randrange(2)])
        if kind == 15:
            module, function = self._names()
            return draw.choice(
                (
                    b"(" + value(depth - 1) + f"i{module}\n{function}\n".encode(),
                    b"(" + callee(depth) + value(depth - 1) + b"o",
                    b"Pposix\n",
                    b"\x82\x01",
                    value(depth - 1) + value(depth - 1) + b"\x93",
                    b"(" + value(depth - 1) + b"\x91",
                )
            )
        if kind == 16:
            array = draw.choice(_ARRAYS)
            return self._damaged(array) if draw.random() < 0.7 else array
        return value(depth - 1) + b"0" + value(depth - 1)


class Watch:
    """Hears of what Python's audit hooks tell, while it is armed."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._armed = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: Any) -> None:
        if self._armed and (event in _WATCHED_NAMES or event.startswith(_WATCHED)):
            if event == "import" and str(arguments[0]).startswith(_HARMLESS_IMPORT):
                return
            self.heard.append(f"{event}{arguments!r:.200}")

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        self._armed = True
        try:
            yield
        finally:
            self._armed = False


def allow_list(worker: str = "worker0") -> Any:
    """Return the list that is attacked."""
    from torch_rpc_ext._lifecycle.starting import SERVED
    from torch_rpc_ext._security.allow_list import AllowList

    return AllowList.of([_OFFERED], worker, SERVED)


def execute(allowed: Any, payload: bytes) -> str:
    """Do with a payload what a worker does; return what came of it."""
    from torch_rpc_ext._security.entries import Request
    from torch_rpc_ext._upstream.exceptions import Refused

    stage = "read"
    try:
        value = allowed.deserialize(payload, [torch.ones(1)])
        if type(value) is Refused:
            return "refused"
        stage = "ran"
        if type(value) is Request:
            value.func(*value.args, **value.kwargs)
            return "ran"
        return "data"
    except Exception as error:  # noqa: BLE001  whatever a program has raised
        return f"{stage}: {type(error).__name__}"


class Missed(Exception):
    """Something was called that the list does not name."""


def run(programs: Programs, allowed: Any, watch: Watch, until: float, most: int) -> dict[str, int]:
    """Run programs; return how many had which outcome.

    Raises:
        Missed: with the program.
    """
    outcomes: dict[str, int] = {}
    for _ in range(most):
        if time.monotonic() > until:
            break
        payload = programs.next()
        signal.alarm(20)  # a program that does not end ends this process
        with watch.armed():
            outcome = execute(allowed, payload)
        signal.alarm(0)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if watch.heard or bait.CALLED:
            raise Missed(payload, [*watch.heard, *bait.CALLED])
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--programs", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=None, help="else by the clock")
    parser.add_argument("--findings", type=Path, help="a folder for a program that gets through")
    given = parser.parse_args()
    logging.disable()
    seed = int(time.time()) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    begin, watch = time.monotonic(), Watch()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            outcomes = run(
                Programs(seed), allow_list(), watch, begin + given.seconds, given.programs
            )
    except Missed as missed:
        payload, called = missed.args
        if given.findings:
            given.findings.mkdir(parents=True, exist_ok=True)
            (given.findings / f"{seed}").write_bytes(payload)
        print(f"{payload!r}\ncalled {called}")
        return 1
    count = sum(outcomes.values())
    rate = count / max(1e-9, time.monotonic() - begin)
    print(f"{count} programs, {rate:.0f} a second, {len(outcomes)} outcomes")
    for outcome, times in sorted(outcomes.items(), key=lambda each: -each[1]):
        print(f"{times:9} {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
