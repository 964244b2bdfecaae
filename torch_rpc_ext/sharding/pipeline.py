"""Micro-batched execution of a sharded module: GPipe and 1F1B."""

from __future__ import annotations

import math
import pickle
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import rpc as _untyped_rpc
from torch.utils import _pytree as pytree

from torch_rpc_ext.sharding import autocast, losses, runner, tensors
from torch_rpc_ext.sharding.exact import exact
from torch_rpc_ext.sharding.failures import Failure, first_cause
from torch_rpc_ext.sharding.gradients import context_id
from torch_rpc_ext.sharding.job import Evaluation, Job, Result, Route, StageStats, Training
from torch_rpc_ext.sharding.module import ShardedModule
from torch_rpc_ext.sharding.schedule import SCHEDULES, Action, Schedule, forward_only

__all__ = ["Pipeline"]

rpc: Any = _untyped_rpc  # upstream's functions have no types

# How long a stage may take to notice that its batch is over, s. The error names a stage that takes
# longer.
_GRACE = 2.0


class Pipeline:
    """Runs batches through the stages of a sharded module, several micro-batches at a time.

    Activations and their gradients go from worker to worker. The loss is computed on the last
    stage, so outputs do not travel::

        pipeline = Pipeline(model, n_microbatches=8, loss_fn=nn.functional.cross_entropy)
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)
        optimizer.zero_grad()
        loss = pipeline.forward_backward(x, y)
        optimizer.step()

    Gradients are added to the .grad of the parameters, as backward() adds them; or, within a
    distributed autograd context, to those of the context, where DistributedOptimizer looks for
    them. The local module, run on the same micro-batches one after another, has the same gradients,
    to the last bit on the same kind of machine with the same number of compute threads; layers that
    look at the whole batch (BatchNorm) see micro-batches. The stages compute under the caller's
    autocast, the loss included.

    Thread Safety: one batch at a time; others wait.

    Args:
        model: from shard().
        n_microbatches: into how many parts a batch is cut along dimension 0.
        loss_fn: called on the last stage with the output and the target of a micro-batch; returns
            one number. A function of a module or a picklable object. None for a pipeline that only
            runs forward().
        schedule: "gpipe" or "1f1b", which holds fewer activations.
        reduction: "mean" or "sum": how ``loss_fn`` goes over a micro-batch, so that the loss is
            what it would be for the whole batch. None where ``loss_fn`` is one of torch's losses,
            which are known. For any other loss "mean" says that each row counts the same.
        count: for a mean that goes over something else than rows: a function that returns, for the
            target of a micro-batch, over how many terms the mean goes. Called on the caller with
            CPU tensors; 0 for a micro-batch that does not count.
        timeout: for a batch, s; 0 for none, None for the options' rpc_timeout.

    Raises:
        ValueError: an argument out of range; a loss that cannot be pickled; a loss of which nobody
            knows whether it is a mean or a sum; a `reduction` or `count` that contradicts the loss.
        StageError: a stage cannot be reached.
    """

    def __init__(
        self,
        model: ShardedModule,
        n_microbatches: int,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        *,
        schedule: Schedule = "1f1b",
        reduction: losses.Reduction | None = None,
        count: losses.Count | None = None,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(n_microbatches, int) or n_microbatches < 1:
            raise ValueError(f"n_microbatches must be at least 1, got {n_microbatches!r}")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        self._weigh = None
        if loss_fn is not None:
            _check_picklable("loss_fn", loss_fn)
            self._weigh = losses.weigher(loss_fn, reduction, count)
        self._model, self._stages = model, model.stages
        self._count = n_microbatches
        self._timeout = float(rpc.get_rpc_timeout()) if timeout is None else timeout
        if not self._timeout >= 0:
            raise ValueError(f"timeout must be 0 s or more, got {timeout!r}")
        self._steps = [
            SCHEDULES[schedule](stage, len(self._stages), n_microbatches)
            for stage in range(len(self._stages))
        ]
        self.name = uuid.uuid4().hex
        self._batch = 0
        self._one_at_a_time = threading.Lock()
        self._stats: list[StageStats] = []
        self._runners = self._create_runners(loss_fn)

    @property
    def stats(self) -> list[StageStats]:
        """How each stage has spent the last batch that ended well."""
        return list(self._stats)

    def forward_backward(
        self, inputs: Any, target: Any, *, scaler: torch.amp.GradScaler | None = None
    ) -> torch.Tensor:
        """Run a batch; its gradients are then in the distributed autograd context in which this is
        called, or, outside of one, in the .grad of the parameters.

        Gradients add up over several batches. After an error the gradients of some stages may be
        there: call zero_grad(), or leave the context.

        Args:
            inputs: of the module, batch along dimension 0 of each tensor; must not require
                gradients.
            target: for the loss; batch along dimension 0 as well.
            scaler: backward begins with the loss multiplied by the scaler's scale.

        Returns:
            The loss of the batch, shape (), on the CPU, without history and not scaled; NaN if
            no micro-batch counts.

        Raises:
            ValueError: inputs that do not fit each other or the micro-batches; a pipeline without
                ``loss_fn``.
            StageError: a stage raised, or its worker is lost; the others have stopped. The cause is
                a TypeError where a stage returns an object in which gradients would be lost, a
                RuntimeError where a stage changes one of several inputs in place that share memory.
        """
        if self._weigh is None:
            raise ValueError("forward_backward() needs a loss: give Pipeline a loss_fn")
        size = _checked(inputs, target)
        if size < self._count:
            raise ValueError(
                f"a batch of {size} cannot be cut into {self._count} micro-batches: "
                "give a larger batch or fewer micro-batches"
            )
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones(())))
        targets = tensors.micro_batches(tensors.detached(target), self._count)
        task = Training(context_id(), scale)
        return _loss(self._result(task, self._steps, self._weigh(targets), inputs, target))

    def forward(self, inputs: Any) -> Any:
        """Run all stages on a batch, several micro-batches at a time, without autograd.

        Args:
            inputs: of the module, batch along dimension 0 of each tensor. A batch with fewer rows
                than micro-batches is cut into as many as there are rows; one without rows is one
                micro-batch.

        Returns:
            What the module returns for the batch, tensors on the CPU: those of the micro-batches
            put together along dimension 0.

        Raises:
            ValueError: inputs that do not fit each other, outputs that cannot be put together.
            StageError: a stage raised, or its worker is lost; the others have stopped.
        """
        size = _checked(inputs)
        return tensors.joined(self._evaluated(Evaluation(None, False), size, inputs, None))

    def evaluate(
        self, inputs: Any, target: Any, metric: Callable[[Any, Any], Any] | None = None
    ) -> Any:
        """Compute the loss or a metric of a batch on the last stage, several micro-batches at a
        time, without autograd. Outputs do not travel. Layers stay in the mode that model.train() or
        model.eval() has set.

        Args:
            inputs: as those of forward().
            target: batch along dimension 0 as well.
            metric: called on the last stage with the output and the target of a micro-batch; a
                function of a module or a picklable object. None for the loss.

        Returns:
            The loss as forward_backward() returns it. With ``metric`` the list of what it has
            returned for each micro-batch, tensors on the CPU.

        Raises:
            ValueError: inputs that do not fit each other; a metric that cannot be pickled; neither
                a metric nor a ``loss_fn``.
            StageError: a stage raised, or its worker is lost; the others have stopped.
        """
        size = _checked(inputs, target)
        if metric is not None:
            _check_picklable("metric", metric)
        elif self._weigh is None:
            raise ValueError("evaluate() needs a metric, or a loss: give Pipeline a loss_fn")
        found = self._evaluated(Evaluation(metric, metric is None), size, inputs, target)
        return _loss(found) if metric is None else found

    def _evaluated(self, task: Evaluation, size: int, inputs: Any, target: Any) -> Any:
        count = max(1, min(self._count, size))  # an empty batch is one micro-batch
        weights = [1.0] * count
        if task.wants_loss:
            assert self._weigh is not None, "evaluate() has looked"
            weights = self._weigh(tensors.micro_batches(tensors.detached(target), count))
        steps = [forward_only(count)] * len(self._stages)
        return self._result(task, steps, weights, inputs, target)

    def _result(
        self,
        task: Training | Evaluation,
        steps: Sequence[Sequence[Action]],
        weights: Sequence[float],
        inputs: Any,
        target: Any,
    ) -> Any:
        """Run a batch; return what the last stage returns."""
        last = len(self._stages) - 1
        tasks = [task] * len(self._stages)
        if isinstance(task, Evaluation):
            tasks[:last] = [Evaluation(None, task.wants_loss)] * last  # only the last has a metric
        cast = autocast.current(self._model.device_types())
        with self._one_at_a_time:
            self._batch += 1
            results = self._run(
                [
                    Job(
                        batch=self._batch,
                        task=tasks[index],
                        steps=own,
                        weights=weights,
                        autocast=cast,
                        inputs=tensors.detached(inputs) if index == 0 else None,
                        target=tensors.detached(target) if index == last else None,
                    )
                    for index, own in enumerate(steps)
                ]
            )
            self._stats = [stats for _, stats in results]
        return results[-1][0]

    def _create_runners(self, loss_fn: Callable[[Any, Any], torch.Tensor] | None) -> list[Any]:
        workers = [handle.place.worker for handle in self._stages]
        runners = []
        for handle in self._stages:
            own = loss_fn if handle.index == len(workers) - 1 else None
            route = Route(self.name, workers, own, patience=self._longest())
            try:
                with exact():  # the loss may hold tensors: weights of classes
                    made = rpc.rpc_sync(
                        handle.place.worker, runner.create, args=(handle.rref, route)
                    )
            except Exception as error:
                raise handle.lost(error) from error
            runners.append(made)
        return runners

    def _longest(self) -> float:
        """Return after how long a stage that does not answer counts as lost, s; 0 for never."""
        return self._timeout + _GRACE if self._timeout > 0 else 0.0

    def _run(self, jobs: list[Job]) -> list[Result]:
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        futures: list[Any] = []
        try:
            for index, job in enumerate(jobs):
                futures.append(self._start(index, job, ended))
            outcomes = self._collect(futures, ended)
        except BaseException as error:
            # Ctrl-C here must not leave stages that wait for each other.
            self._stop(f"the caller has left with {type(error).__name__}")
            raise
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if failures:
            raise first_cause(failures).error()
        return outcomes

    def _collect(self, futures: list[Any], ended: queue.SimpleQueue[int]) -> list[Any]:
        """Return the outcome of each stage. After the first failure, or at the end of the time,
        all stages are told to stop, so that they answer soon."""
        outcomes: list[Any] = [None] * len(futures)
        end = time.monotonic() + self._timeout if self._timeout > 0 else math.inf
        stopped = False
        for _ in futures:
            try:
                left = None if stopped or end == math.inf else max(end - time.monotonic(), 0.0)
                index = ended.get(timeout=left)
            except queue.Empty:
                self._stop(f"the batch did not end within {self._timeout:g} s")
                stopped = True
                index = ended.get()
            outcomes[index] = self._outcome(index, futures[index])
            if isinstance(outcomes[index], Failure) and not stopped:
                self._stop(str(outcomes[index].error()))
                stopped = True
        return outcomes

    def _start(self, index: int, job: Job, ended: queue.SimpleQueue[int]) -> Any:
        """Return a future of the outcome, or the failure to call at all."""
        worker = self._stages[index].place.worker
        try:
            future = rpc.rpc_async(
                worker, runner.run, args=(self._runners[index], job), timeout=self._longest()
            )
        except Exception as error:  # noqa: BLE001  one of the outcomes
            ended.put(index)
            return Failure.of(index, worker, "lost", error)
        future.add_done_callback(lambda _: ended.put(index))
        return future

    def _outcome(self, index: int, future: Any) -> Any:
        if isinstance(future, Failure):
            return future
        try:
            return future.value()
        except Exception as error:  # noqa: BLE001  one of the outcomes
            return Failure.of(index, self._stages[index].place.worker, "lost", error)

    def _stop(self, reason: str) -> None:
        """Tell all stages to give the batch up, as far as they can be reached."""
        for handle in self._stages:
            name = runner.runner_name(self.name, handle.index)
            try:
                rpc.rpc_async(handle.place.worker, runner.stop, args=(name, self._batch, reason))
            except Exception:  # noqa: BLE001  it is lost, and its own outcome says so
                continue


def _checked(inputs: Any, target: Any = None) -> int:
    """Return the size of a batch."""
    size = tensors.batch_size(inputs, "inputs")
    if target is not None and tensors.batch_size(target, "target") != size:
        raise ValueError(
            f"inputs hold a batch of {size} and target one of "
            f"{tensors.batch_size(target, 'target')}"
        )
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(inputs)):
        raise ValueError(
            "inputs require gradients, which a pipeline does not return: detach() them, or "
            "use the module's forward()"
        )
    return size


def _loss(found: torch.Tensor | None) -> torch.Tensor:
    return torch.tensor(math.nan) if found is None else found  # as a mean over nothing is


def _check_picklable(what: str, function: Any) -> None:
    if not callable(function):
        raise ValueError(f"{what} must be callable, got {function!r}")
    try:
        pickle.dumps(function)
    except Exception as problem:
        raise ValueError(
            f"{what} {function!r} cannot be sent to the last stage: use a function of a module or "
            f"an nn.Module, no lambda or local function ({problem})"
        ) from problem
