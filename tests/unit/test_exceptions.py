"""Remote exceptions: rebuilt as what they were."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest

from torch_rpc_ext import _exceptions


class Plain(Exception):
    """Takes a text."""


class Coded(Exception):
    """Takes a text, and more."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Needs(Exception):
    """Takes something else, but pickle rebuilds it."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(code, where)
        self.code, self.where = code, where


class Cannot(Exception):
    """Takes something else, and pickle does not rebuild it."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")


class Unpicklable(Exception):
    """Has what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function = lambda: None


def travel(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """There and back, without RPC."""

    class Agent:
        def get_worker_info(self) -> str:
            return "WorkerInfo(id=1, name=worker1)"

    monkeypatch.setattr(_exceptions.native_rpc, "_get_current_rpc_agent", Agent)

    def fails() -> None:
        raise error

    udf: Any = _exceptions.internal.PythonUDF(fails, (), {})
    sent = pickle.loads(pickle.dumps(_exceptions.run_function(udf)))
    with pytest.raises(BaseException) as raised:
        _exceptions.handle_exception(sent)
    shown = "".join(traceback.format_exception_only(raised.value))
    assert "fails" in shown and "worker1" in shown
    return raised.value


@pytest.mark.parametrize("text", ["x", "back\\slash \\n \\x41", "é 世界", "100 % {}"])
def test_plain(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Plain(text), monkeypatch)
    assert type(error) is Plain and text in str(error)


def test_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Coded("x", 7), monkeypatch)
    assert isinstance(error, Coded) and error.code == 7


def test_constructor_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Needs(7, "here"), monkeypatch)
    assert isinstance(error, Needs) and (error.code, error.where) == (7, "here")
    # Through a second worker, with both tracebacks.
    again = travel(error, monkeypatch)
    assert isinstance(again, Needs) and again.code == 7 and len(again.__notes__) == 1


def test_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Cannot(7, "here"), monkeypatch)
    assert type(error) is RuntimeError
    assert "Original exception on remote side was" in str(error) and "code 7" in str(error)


def test_unpicklable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(travel(Unpicklable("x"), monkeypatch)) is Unpicklable


def test_anything_else_passes() -> None:
    _exceptions.handle_exception(3)
