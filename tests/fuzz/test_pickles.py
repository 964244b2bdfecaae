"""A short run of the target `pickles`, and proof that it would notice."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from typing import Any

from tests.support import cxx

# A reader that calls whatever lies on its stack, as pickle's own does.
WEAK = """
import os, sys
from tests.fuzz import bait, pickles
from torch_rpc_ext._security import unpickling

def reduce(reader):
    args, function = reader._stack.pop(), reader._stack.pop()
    reader._stack.append(function(*args))

os.system = bait.function
unpickling._OPCODES[ord("R")] = reduce
sys.argv[1:] = ["--programs", "20000", "--seed", "1"]
sys.exit(pickles.main())
"""


def fuzz(*arguments: str) -> Any:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cxx.ROOT)


def test_random_programs_call_nothing_else() -> None:
    ended = fuzz("-m", "tests.fuzz.pickles", "--programs", "10000", "--seed", "7")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # They are no random bytes: some are calls, which run.
    ran = re.search(r"(\d+) ran$", ended.stdout, re.MULTILINE)
    assert ran is not None and int(ran[1]) > 50, ended.stdout


def test_it_notices() -> None:
    ended = fuzz("-c", WEAK)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "called" in ended.stdout


def test_its_opcodes_are_pickles() -> None:
    """What the generator writes means the same to the reader of Python."""
    from tests.fuzz.pickles import text

    assert pickle.loads(b"\x80\x04(" + text("a") + b"K\x01t.") == ("a", 1)
