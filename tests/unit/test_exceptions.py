"""Remote exceptions: rebuilt as what they were."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from torch_rpc_ext import _exceptions


class Plain(Exception):
    """Takes a text."""


class Needs(Exception):
    """Takes something else."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code, self.where = code, where
        self.cannot = lambda: None

    def __str__(self) -> str:
        return f"{self.code}"


class Layout(OSError):
    """Cannot be combined with RuntimeError."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


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
    assert "fails" in str(raised.value) and "worker1" in str(raised.value)
    return raised.value


@pytest.mark.parametrize("text", ["x", "back\\slash \\n \\x41", "é 世界", "100 % {}"])
def test_plain(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Plain(text), monkeypatch)
    assert type(error) is Plain and text in str(error)


def test_constructor_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Needs(7, "here"), monkeypatch)
    assert isinstance(error, Needs) and (error.code, error.where) == (7, "here")
    assert not hasattr(error, "cannot")
    # What such exceptions are upstream, and programs catch.
    assert isinstance(error, RuntimeError)
    assert "Original exception on remote side was" in str(error)
    assert type(error).__name__ == "Needs"
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, Needs) and again.code == 7


def test_twice_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(travel(Needs(7, "here"), monkeypatch), monkeypatch)
    assert isinstance(error, Needs) and error.code == 7


def test_cannot_be_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Layout(1, 2), monkeypatch)
    assert isinstance(error, RuntimeError) and "Layout" in str(error)


def test_anything_else_passes() -> None:
    _exceptions.handle_exception(3)
