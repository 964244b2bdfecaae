"""The part of an optimizer that one stage has: its methods run one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_rpc_ext.sharding.placement import Place
from torch_rpc_ext.sharding.stage import Spec, Stage
from torch_rpc_ext.sharding.stage_optimizer import Group, StageOptimizer

SECONDS = 30.0


class HeldInStep(torch.optim.SGD):
    """Stays in step() until it is let go."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.begun, self.let_go = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.begun.set()
        assert self.let_go.wait(SECONDS)


CALLS: dict[str, Callable[[StageOptimizer, Path], Any]] = {
    "step": lambda own, path: own.step(None, [{"lr": 2.0}]),
    "zero_grad": lambda own, path: own.zero_grad(True),
    "unscale": lambda own, path: own.unscale(None, 0.5),
    "state": lambda own, path: own.state([{}]),
    "load_state": lambda own, path: own.load_state({}),
    "plan_checkpoint": lambda own, path: own.plan_checkpoint(str(path), "", [{"lr": 2.0}]),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_call_waits_for_a_step(method: str, tmp_path: Path) -> None:
    stage = Stage(Spec(0, Place("worker0", "cpu"), nn.Linear(2, 1), [], None, 0))
    groups = [Group(0, ["weight", "bias"], {"lr": 1.0})]
    own = StageOptimizer(stage, HeldInStep, groups, {})
    held: Any = own._optimizer
    stepping = threading.Thread(target=own.step, args=(None, [{"lr": 1.0}]))
    calling = threading.Thread(target=CALLS[method], args=(own, tmp_path))
    stepping.start()
    try:
        assert held.begun.wait(SECONDS)
        calling.start()
        calling.join(0.3)  # long enough for a call that does not wait
        assert calling.is_alive() and held.param_groups[0]["lr"] == 1.0
    finally:
        held.let_go.set()
        stepping.join(SECONDS)
        calling.join(SECONDS)
    assert not calling.is_alive()
    changes = method in ("step", "plan_checkpoint")
    assert held.param_groups[0]["lr"] == (2.0 if changes else 1.0)
