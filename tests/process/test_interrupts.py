"""A signal handler raises while an answer is being unpickled: the caller gets its exception."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group, workers
from tests.support.backend import needs_ucx
from torch_rpc_ext._native import loader


class Stop(Exception):
    """The exception that the signal handler raises."""


class Signals:
    """Unpickling this object sends a signal to the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_signalled, ())


class SignallingError(Exception):
    """The same for an exception of a remote function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_signalled, ())


def _signalled() -> str:
    signal.raise_signal(signal.SIGINT)
    # The handler runs on the main thread, before this line.
    return "signalled"


def signalling() -> Any:
    return {"first": Signals(), "second": torch.ones(2)}


def raising() -> None:
    raise SignallingError("no")


class Owned:
    def fetch(self) -> Any:
        return signalling()


def _keyboard_interrupt(number: int, frame: FrameType | None) -> None:
    signal.default_int_handler(number, frame)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(3)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stop("by a handler")


HANDLERS: list[tuple[Callable[..., None], type[BaseException]]] = [
    (_keyboard_interrupt, KeyboardInterrupt),
    (_exit, SystemExit),
    (_stop, Stop),
]


def ways() -> list[Callable[[], Any]]:
    owned = rpc.remote("worker1", Owned)
    owned.to_here()
    return [
        lambda: rpc.rpc_sync("worker1", signalling),
        lambda: rpc.rpc_async("worker1", signalling).wait(),
        lambda: rpc.remote("worker1", signalling).to_here(),
        lambda: owned.rpc_sync().fetch(),
        lambda: owned.remote().fetch().to_here(),
    ]


def check_interrupted(which: int) -> None:
    handler, expected = HANDLERS[which]
    before = signal.signal(signal.SIGINT, handler)
    try:
        for number, way in enumerate(ways()):
            for _ in range(3):
                with pytest.raises(expected) as caught:
                    way()
                    for _ in range(1000):  # lets the handler run if a pool thread got the signal
                        pass
                # An Exception also is a RuntimeError, as everything is that upstream raises here.
                assert isinstance(caught.value, expected), number
                assert expected is Stop or type(caught.value) is expected, number
                if expected is Stop:
                    assert str(caught.value) == "by a handler"
                if expected is SystemExit:
                    assert caught.value.code == 3
                assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).sum() == 4
                assert loader.load().set_synchronous(False) is False
        if expected is not Stop:
            with pytest.raises(expected):
                rpc.rpc_sync("worker1", raising)
    finally:
        signal.signal(signal.SIGINT, before)


@needs_ucx("reads the answer on the thread that waits")
@pytest.mark.parametrize("which", range(len(HANDLERS)), ids=lambda n: HANDLERS[n][1].__name__)
def test_what_a_handler_raises_while_an_answer_is_read_is_raised(which: int) -> None:
    with Group(2) as group:
        group[0].run(check_interrupted, which)


def answer(size: int) -> dict[str, int]:
    return {f"key {i}": i for i in range(size)}


@workers(2)
def test_a_storm_of_signals_raises_nothing_but_what_the_handler_raises() -> None:
    armed = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    interrupts = 0
    try:
        while interrupts < 200:
            try:
                armed = True
                rpc.rpc_sync("worker1", answer, args=(2000,))
                armed = False
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0, 0)
        signal.signal(signal.SIGALRM, before)
    assert rpc.rpc_sync("worker1", f.identity, args=(1,)) == 1
