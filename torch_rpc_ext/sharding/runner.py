"""A stage at work in a pipeline. This file runs on the worker of the stage.

A stage has one thread per batch, which goes through the steps of the schedule. The neighbours send
values by short calls that only put them into a mailbox. So no call waits for another, and one free
RPC thread is enough for a pipeline.

The backward of a micro-batch is one torch.autograd.backward() on the stage; the gradient of the
input goes to the stage before. Distributed autograd cannot do this: it runs one backward over all
workers, so the backward could not begin before all forwards have ended, and the graphs of all
micro-batches would be kept until then. With a distributed autograd context the gradients of the
parameters are put there at the end of the batch, without one they are in .grad.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import rpc as _untyped_rpc
from torch.utils import _pytree as pytree

from torch_rpc_ext.sharding import autocast, device_maps, tensors
from torch_rpc_ext.sharding.failures import Failure
from torch_rpc_ext.sharding.gradients import collected_in, enter, into_context
from torch_rpc_ext.sharding.job import Evaluation, Job, Result, Route, StageStats, Training
from torch_rpc_ext.sharding.mailbox import Mailbox, StoppedError
from torch_rpc_ext.sharding.stage import Resident, Stage, own_value

__all__ = ["StageRunner", "create", "find", "leave", "run", "runner_name", "stop"]

rpc: Any = _untyped_rpc  # upstream's functions have no types

# Neighbours find each other's runner by name. With RRefs to each other they would never be freed.
_RUNNERS: weakref.WeakValueDictionary[str, StageRunner] = weakref.WeakValueDictionary()


@dataclass
class _Held:
    """The tensors that a stage keeps of a micro-batch between its forward and its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


@dataclass
class _Batch:
    """The state of one batch on a stage."""

    job: Job
    inputs: list[Any]
    targets: list[Any]
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    loss: torch.Tensor | None = None
    results: list[Any] = field(default_factory=list)
    held: dict[int, _Held] = field(default_factory=dict)
    peak: int = 0
    compute_s: float = 0.0
    sent: list[tuple[int, Any]] = field(default_factory=list)


class StageRunner(Resident):
    """One stage of one pipeline.

    Owns: the mailbox. Thread: run() in one thread at a time; the mailbox from any.
    Outlives: nothing; the caller's RRef keeps it.
    """

    def __init__(self, stage: Stage, route: Route) -> None:
        self._stage, self._route = stage, route
        self._first = stage.index == 0
        self._last = stage.index == len(route.workers) - 1
        self._here = route.workers[stage.index]
        neighbours = route.workers[max(stage.index - 1, 0) : stage.index + 2]
        self._mapped = {worker: set(device_maps.mapped(worker)) for worker in neighbours}
        self._busy = threading.Lock()
        self.mailbox = Mailbox()
        _RUNNERS[runner_name(route.name, stage.index)] = self

    def run(self, job: Job) -> Result | Failure:
        """Do the steps of a batch and put the gradients where they belong. Raises nothing.

        Returns:
            What the task asks for, which is None on all stages but the last, and statistics. Or a
            Failure.
        """
        if not self._busy.acquire(blocking=False):
            return self._failure("raised", RuntimeError("it is still busy with an earlier batch"))
        try:
            return self._run(job)
        except _NeighbourLostError as lost:
            worker = self._route.workers[lost.stage]
            return Failure.of(lost.stage, worker, "lost", lost.error)
        except _AtWorkError as late:
            return self._failure("late", late)
        except StoppedError as stopped:
            return self._failure("stopped", stopped)
        except BaseException as error:  # noqa: BLE001  the caller raises it
            return self._failure("raised", error)
        finally:
            self.mailbox.open(job.batch + 1)  # drops the values of an unfinished batch
            self._busy.release()

    def _run(self, job: Job) -> Result:
        begin = time.perf_counter()
        self.mailbox.open(job.batch)
        count = len(job.weights)
        parameters: list[torch.Tensor] = [
            parameter for parameter in self._stage.module.parameters() if parameter.requires_grad
        ]
        batch = _Batch(
            job,
            inputs=tensors.micro_batches(job.inputs, count) if self._first else [],
            targets=tensors.micro_batches(job.target, count) if self._last else [],
            parameters=parameters,
            gradients=[None] * len(parameters),
        )
        for step in job.steps:
            if step.kind == "forward":
                self._forward(batch, step.micro_batch)
            else:
                self._backward(batch, step.micro_batch)
            self._check_sent(batch, wait=False)
            reason = self.mailbox.stopped(job.batch)
            if reason is not None:
                raise _AtWorkError(
                    f"{reason}; it was at work on the {step.kind} of micro-batch {step.micro_batch}"
                )
        self._check_sent(batch, wait=True)
        if isinstance(job.task, Training) and job.task.context is not None:
            into_context(job.task.context, batch.parameters, batch.gradients)
        stats = StageStats(
            self._stage.index,
            self._stage.place.worker,
            batch.peak,
            batch.compute_s,
            time.perf_counter() - begin,
        )
        wants_loss = isinstance(job.task, Training) or job.task.wants_loss
        result = batch.loss if wants_loss or not self._last else batch.results
        return tensors.detached(result), stats

    def _forward(self, batch: _Batch, index: int) -> None:
        if self._first:
            given, wanted = batch.inputs[index], None
        else:
            given, wanted = self._take(batch, "forward", index)
        with self._at_work(batch), autocast.entered(batch.job.autocast, self._stage.device):
            if isinstance(batch.job.task, Training):
                made, flags = self._recorded(batch, batch.job.task, index, given, wanted)
            else:
                made, flags = self._unrecorded(batch, batch.job.task, index, given), None
        if not self._last:
            self._send(batch, self._stage.index + 1, ("forward", index), (made, flags))

    def _recorded(
        self, batch: _Batch, task: Training, index: int, given: Any, wanted: list[bool] | None
    ) -> tuple[Any, list[bool]]:
        """Run forward with autograd; return the output, and which of its leaves want gradients."""
        leaves, form = pytree.tree_flatten(tensors.moved(given, self._stage.device))
        wanted = wanted or [False] * len(leaves)
        inputs = [
            leaf.requires_grad_() if need else None
            for leaf, need in zip(leaves, wanted, strict=True)
        ]
        values = [
            _alone(leaf) if own is None else enter(own)
            for leaf, own in zip(leaves, inputs, strict=True)
        ]
        versions = _versions(values)
        made = self._stage.forward(pytree.tree_unflatten(values, form))
        _check_changes(values, wanted, versions)
        if self._last:
            loss = self._weighted_loss(batch, index, made)
            made = loss if loss is None or task.scale == 1 else loss * task.scale
        outputs = pytree.tree_leaves(made)
        if not self._last:
            tensors.check_gradients_are_seen(outputs)
        flags = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in outputs]
        batch.held[index] = _Held(
            [own for own in inputs if own is not None],
            [leaf for leaf, need in zip(outputs, flags, strict=True) if need],
        )
        batch.peak = max(batch.peak, len(batch.held))
        return made, flags

    def _unrecorded(self, batch: _Batch, task: Evaluation, index: int, given: Any) -> Any:
        """Run forward without autograd; return the output."""
        with torch.no_grad():
            made = self._stage.forward(given)
            if self._last and task.wants_loss:
                self._weighted_loss(batch, index, made)
            elif self._last and task.metric is not None:
                target = tensors.moved(batch.targets[index], self._stage.device)
                batch.results.append(tensors.detached(task.metric(made, target)))
            elif self._last:
                batch.results.append(tensors.detached(made))
        return made

    def _weighted_loss(self, batch: _Batch, index: int, made: Any) -> torch.Tensor | None:
        """Return the weighted loss of a micro-batch, and add it up; None if it does not count."""
        assert self._route.loss_fn is not None, "the last stage has it"
        weight = batch.job.weights[index]
        if weight == 0:
            return None  # a mean over nothing is NaN, also times 0
        loss = self._route.loss_fn(made, tensors.moved(batch.targets[index], self._stage.device))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return one number in a tensor, it returned {what}")
        loss = loss.reshape(()) * weight
        value = loss.detach()
        batch.loss = value if batch.loss is None else batch.loss + value
        return loss

    def _backward(self, batch: _Batch, index: int) -> None:
        if self._last:
            gradients: list[torch.Tensor | None] = [None] * len(batch.held[index].outputs)
        else:
            gradients = self._take(batch, "backward", index)
        with self._at_work(batch):
            found = self._gradients(batch, batch.held.pop(index), gradients)
        if not self._first:
            self._send(batch, self._stage.index - 1, ("backward", index), found)

    def _gradients(
        self, batch: _Batch, held: _Held, gradients: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Add up the gradients of the parameters; return the gradients of the inputs."""
        pairs = [
            (output, None if gradient is None else gradient.to(output.device))
            for output, gradient in zip(held.outputs, gradients, strict=True)
            if gradient is not None or self._last
        ]
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            assert isinstance(batch.job.task, Training), "an evaluation has no backward"
            if batch.job.task.context is None:
                torch.autograd.backward(outputs, given)
            else:
                with self._stage.grads, collected_in(batch.gradients, batch.parameters):
                    torch.autograd.backward(outputs, given)
        return [own.grad for own in held.inputs]

    @contextlib.contextmanager
    def _at_work(self, batch: _Batch) -> Iterator[None]:
        """Wait until no other stage of this worker computes; within the block this one does."""
        with self._stage.turn(lambda: self._check_stopped(batch)):
            begin = time.perf_counter()
            try:
                yield
            finally:
                batch.compute_s += time.perf_counter() - begin

    def _check_stopped(self, batch: _Batch) -> None:
        reason = self.mailbox.stopped(batch.job.batch)
        if reason is not None:
            raise StoppedError(reason)

    def _take(self, batch: _Batch, kind: str, index: int) -> Any:
        return self.mailbox.take(batch.job.batch, (kind, index), self._route.patience)

    def _send(self, batch: _Batch, neighbour: int, key: Any, value: Any) -> None:
        worker = self._route.workers[neighbour]
        name = runner_name(self._route.name, neighbour)
        try:
            if worker == self._here:
                # A copy, as on the way to another worker: its first layer may change it in place.
                leave(name, batch.job.batch, key, tensors.copied(value))
                return
            sent = tensors.detached(value, self._mapped[worker])
            future = rpc.rpc_async(worker, leave, args=(name, batch.job.batch, key, sent))
        except Exception as error:
            raise _NeighbourLostError(neighbour, error) from error
        batch.sent.append((neighbour, future))

    def _check_sent(self, batch: _Batch, wait: bool) -> None:
        """Raise if a neighbour did not take a value that was sent to it."""
        left = []
        for neighbour, future in batch.sent:
            if not wait and not future.done():
                left.append((neighbour, future))
                continue
            try:
                future.wait()
            except Exception as error:
                raise _NeighbourLostError(neighbour, error) from error
        batch.sent = left

    def _failure(self, kind: Any, error: BaseException) -> Failure:
        return Failure.of(self._stage.index, self._stage.place.worker, kind, error)


def create(stage: Any, route: Route) -> Any:
    """Return an RRef of a new runner.

    Args:
        stage: RRef of its stage, owned by this worker.
        route: of the pipeline.

    Raises:
        TypeError: `stage` is something else.
    """
    return rpc.RRef(StageRunner(own_value(stage, Stage), route))


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def run(runner: Any, job: Job) -> Any:
    """Run a batch in a thread of its own; the RPC thread is free meanwhile.

    Raises:
        TypeError: `runner` is no RRef of a StageRunner of this worker.
    """
    own = own_value(runner, StageRunner)
    future: torch.futures.Future[Any] = torch.futures.Future()

    def answer() -> None:
        try:
            future.set_result(own.run(job))
        except BaseException as error:  # noqa: BLE001  upstream pickles the result
            future.set_result(own._failure("raised", error))

    threading.Thread(target=answer, name="pipeline-stage", daemon=True).start()
    return future


def find(name: str) -> StageRunner | None:
    """Return a runner of this worker, None when its pipeline is gone."""
    return _RUNNERS.get(name)


def leave(name: str, batch: int, key: Any, value: Any) -> None:
    """Put a value into the mailbox of a runner of this worker."""
    runner = find(name)
    if runner is None:
        raise RuntimeError("its pipeline is gone")
    runner.mailbox.put(batch, key, value)


def stop(name: str, batch: int, reason: str) -> None:
    """Let a runner of this worker give a batch up."""
    runner = find(name)
    if runner is not None:
        runner.mailbox.stop(batch, reason)


def _alone(leaf: Any) -> Any:
    """Return an input that gets no gradient, so that the first layer may change it in place.

    All micro-batches of a tensor are views with one version counter. With it autograd would take a
    change of one for a change of the others. .data has a counter of its own.
    """
    return leaf.data if isinstance(leaf, torch.Tensor) else leaf


def _versions(values: list[Any]) -> list[int | None]:
    return [value._version if isinstance(value, torch.Tensor) else None for value in values]


def _check_changes(values: list[Any], wanted: list[bool], before: list[int | None]) -> None:
    """Raise if the stage has changed an input in place that shares memory with another input.

    Autograd does not know that the change has changed the other input too, because each input has a
    history of its own. So the gradients would be wrong.

    Args:
        values: the leaves of the input, after forward.
        wanted: which of them want gradients.
        before: what _versions() has returned before forward.
    """
    for at, (value, version) in enumerate(zip(values, before, strict=True)):
        if version is None or value._version == version:
            continue
        for other, (beside, need) in enumerate(zip(values, wanted, strict=True)):
            if other == at or not (wanted[at] or need) or not isinstance(beside, torch.Tensor):
                continue
            if tensors.share_memory(value, beside):
                raise RuntimeError(
                    "the stage changed one of its inputs in place, and another input shares the "
                    "memory with it, so the gradients would be wrong: return a clone() of one of "
                    "them from the stage before, or do not change it in place"
                )


class _NeighbourLostError(Exception):
    def __init__(self, stage: int, error: Exception) -> None:
        super().__init__()
        self.stage, self.error = stage, error


class _AtWorkError(Exception):
    """The batch was given up while the stage was at work on it."""


def runner_name(name: str, stage: int) -> str:
    """Return the name of a runner, given that of its pipeline."""
    return f"{name}/{stage}"
