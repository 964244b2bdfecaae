"""What each micro-batch counts, so that the loss of a batch is what the loss function would return
for the whole batch.

A sum adds up. A mean over n terms is the mean of the micro-batches' means, each weighted by the
number of its terms. For most losses that is the number of rows; for a loss that leaves out some
targets (ignore_index), or weighs them, it is another number. Torch's own losses are known here. Of
any other function the caller has to say what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from torch_rpc_ext.sharding import tensors

__all__ = ["Count", "Reduction", "weigher"]

Reduction = Literal["mean", "sum"]
#: Over how many terms the mean goes, given the target of a micro-batch.
Count = Callable[[Any], "float | torch.Tensor"]
#: The weight of each micro-batch, given the targets of all.
Weigher = Callable[[Sequence[Any]], list[float]]

# The mean of these goes over all elements, so each row of a batch counts the same.
_BY_ROWS_FUNCTIONS: tuple[Any, ...] = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.hinge_embedding_loss,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.mse_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.poisson_nll_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
)
_BY_ROWS_CLASSES = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HingeEmbeddingLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.MultiMarginLoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)
_BY_CLASSES_FUNCTIONS: tuple[Any, ...] = (functional.cross_entropy, functional.nll_loss)
_BY_CLASSES_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)


@dataclass(frozen=True)
class _Known:
    """What is known of one of torch's losses; `count` is None where rows count the same."""

    reduction: str
    count: Count | None


def weigher(loss_fn: Any, reduction: Reduction | None, count: Count | None) -> Weigher:
    """Return the function that weighs the micro-batches of a batch.

    Args:
        loss_fn: called with the output and the target of a micro-batch.
        reduction: "mean" or "sum", how ``loss_fn`` goes over a micro-batch; None to take that of
            ``loss_fn`` itself.
        count: over how many terms its mean goes; None for the number of rows, or what is known of
            one of torch's losses.

    Raises:
        ValueError: nothing is known about ``loss_fn`` and the other two are None, or they
            contradict it or each other.
    """
    if reduction not in (None, "mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if count is not None and not callable(count):
        raise ValueError(f"count must be a function of the target, got {count!r}")
    if count is not None and reduction == "sum":
        raise ValueError("count is for a mean: with reduction='sum' the losses simply add up")
    known = _known(loss_fn)
    if known is None:
        if reduction is None and count is None:
            raise ValueError(
                f"nobody can know what {_name(loss_fn)} is over a batch: pass reduction='sum' if "
                "it returns a sum, reduction='mean' if it returns a mean in which each row counts "
                "the same, or count=, a function that returns over how many terms of a target its "
                "mean goes"
            )
        known = _Known(reduction or "mean", None)
    elif known.reduction not in ("mean", "sum"):
        raise ValueError(
            f"loss_fn must return one number, but {_name(loss_fn)} has "
            f"reduction={known.reduction!r}"
        )
    elif known.reduction != ("mean" if count is not None else reduction or known.reduction):
        raise ValueError(
            f"{_name(loss_fn)} has reduction={known.reduction!r}, which is not "
            + ("what count is for" if count is not None else f"{reduction!r}")
        )
    if known.reduction == "sum":
        return _equally
    return functools.partial(_by_count, count or known.count or _rows)


def _equally(targets: Sequence[Any]) -> list[float]:
    return [1.0] * len(targets)


def _by_count(count: Count, targets: Sequence[Any]) -> list[float]:
    counts = [float(count(target)) for target in targets]
    if min(counts) < 0:
        raise ValueError(f"count returned {min(counts)} for a target; it must be 0 or more")
    total = sum(counts)
    return [part / total if total else 0.0 for part in counts]


def _rows(target: Any) -> float:
    return float(tensors.batch_size(target, "target"))


def _by_classes(
    target: torch.Tensor, *, weight: torch.Tensor | None, ignore_index: int
) -> float | torch.Tensor:
    """Return what the mean of cross_entropy() and nll_loss() divides the sum by."""
    if target.is_floating_point():  # probabilities of all classes
        return float(target.shape[0])
    kept = target[target != ignore_index]
    return kept.numel() if weight is None else weight.detach().cpu()[kept].sum()


def _known(loss_fn: Any) -> _Known | None:
    if type(loss_fn) in _BY_ROWS_CLASSES:
        return _Known(_mean_or_sum(loss_fn.reduction), None)
    if type(loss_fn) in _BY_CLASSES_CLASSES:
        options = {"weight": loss_fn.weight, "ignore_index": loss_fn.ignore_index}
        return _Known(loss_fn.reduction, functools.partial(_by_classes, **options))
    given: dict[str, Any] = {}
    if isinstance(loss_fn, functools.partial):
        if loss_fn.args or {"size_average", "reduce"} & loss_fn.keywords.keys():
            return None
        loss_fn, given = loss_fn.func, loss_fn.keywords
    reduction = _mean_or_sum(given.get("reduction", "mean"))
    if loss_fn in _BY_ROWS_FUNCTIONS:
        return _Known(reduction, None)
    if loss_fn in _BY_CLASSES_FUNCTIONS:
        options = {"weight": given.get("weight"), "ignore_index": given.get("ignore_index", -100)}
        return _Known(reduction, functools.partial(_by_classes, **options))
    return None


def _mean_or_sum(reduction: str) -> str:
    return "mean" if reduction == "batchmean" else reduction  # of KLDivLoss: a mean over the rows


def _name(loss_fn: Any) -> str:
    return str(getattr(loss_fn, "__name__", None) or repr(loss_fn))
