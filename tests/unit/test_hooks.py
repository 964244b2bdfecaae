"""Hooks in upstream's Python, with an agent that is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.rpc import api

from torch_rpc_ext._upstream import hooks


def destroy_with(monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None], table: Any) -> None:
    """Let the agent's stop() be ``stop``, and the end of upstream's table of RRefs ``table``."""
    agent = type("Agent", (), {"stop": lambda self: stop()})()
    monkeypatch.setattr(hooks, "_agent", agent)
    monkeypatch.setitem(hooks._originals, "_destroy_rref_context", (api, table))


def test_ctrl_c_while_the_agent_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    ended: list[Any] = []
    destroy_with(monkeypatch, interrupted, ended.append)
    with pytest.raises(KeyboardInterrupt):
        hooks._destroy(True)
    assert ended == [True], "the RRefs would keep their values for ever"


def test_two_threads_end_rpc_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one's stop() returns at once; the table must stay until the first one's does."""
    order: list[str] = []
    first_is_here, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        if not first_is_here.is_set():
            first_is_here.set()
            go_on.wait(30)
        order.append("stopped")

    destroy_with(monkeypatch, stop, lambda _: order.append("table ended"))
    threads = [threading.Thread(target=hooks._destroy, args=(True,)) for _ in range(2)]
    threads[0].start()
    first_is_here.wait(30)
    threads[1].start()
    threads[1].join(0.3)  # without the lock the thread would have ended the table by now
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert order == ["stopped", "table ended"] * 2
