"""Scaled losses of sharded modules: torch's GradScaler, the gradients on the stages."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_rpc_ext.sharding.optimizer import ShardedOptimizer

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler for ShardedOptimizers; it takes other optimizers as well.

    ::

        scaler = sharding.ShardedGradScaler()
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = pipeline.forward_backward(x, y, scaler=scaler)
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()

    The gradients are unscaled on the stages. A step in which a gradient of any stage is infinite or
    NaN is skipped on all stages, and update() makes the scale smaller. The scale is on the caller;
    state_dict() is that of torch.amp.GradScaler.

    Args:
        init_scale: scale at the beginning.
        growth_factor: update() multiplies the scale by this after `growth_interval` steps in a row
            of which none was skipped.
        backoff_factor: update() multiplies the scale by this after a step that was skipped.
        growth_interval: see growth_factor.
        enabled: False for a scaler that does nothing.

    Raises:
        TypeError: `init_scale` is no number: torch.amp.GradScaler's first argument, a device, is
            not needed here.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not isinstance(init_scale, (int, float)):
            raise TypeError(
                f"init_scale must be a number, got {init_scale!r}; ShardedGradScaler takes no "
                "device, because the gradients are on those of the stages"
            )
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._outcomes: dict[ShardedOptimizer, _Outcome] = {}  # since the last update()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale: those of the distributed autograd context in which
        this is called, outside of a context the .grad of the parameters.

        Raises:
            RuntimeError: unscale_() or step() has been called since the last update().
            ValueError: a gradient is float16.
            StageError: a stage raised, or its worker is lost.
        """
        if not self.is_enabled() or not isinstance(optimizer, ShardedOptimizer):
            super().unscale_(optimizer)
            return
        outcome = self._outcomes.get(optimizer)
        if outcome is None:
            outcome = _Outcome(optimizer, optimizer.unscale(1.0 / self.get_scale()))
            self._outcomes[optimizer] = outcome
        # Raises where unscale_() or step() has been called since the last update().
        super().unscale_(outcome)  # type: ignore[arg-type]

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call optimizer.step(), after unscale_() if that was not called, unless a gradient of any
        stage is infinite or NaN.

        Raises:
            RuntimeError: step() has been called since the last update().
            StageError: a stage raised, or its worker is lost.
        """
        if not self.is_enabled() or not isinstance(optimizer, ShardedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if optimizer not in self._outcomes:
            self.unscale_(optimizer)
        return super().step(self._outcomes[optimizer], *args, **kwargs)  # type: ignore[arg-type]

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch.amp.GradScaler.update()."""
        super().update(new_scale)
        self._outcomes.clear()


class _Outcome:
    """Stands for a ShardedOptimizer before torch's GradScaler: an optimizer whose one gradient is
    infinite if one on the stages was infinite or NaN."""

    def __init__(self, optimizer: ShardedOptimizer, is_finite: bool) -> None:
        self._optimizer = optimizer
        flag = torch.zeros(())
        flag.grad = torch.tensor(0.0 if is_finite else math.inf)
        self.param_groups = [{"params": [flag]}]

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._optimizer.step(*args, **kwargs)
