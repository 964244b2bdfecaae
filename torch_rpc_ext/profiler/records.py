"""What is recorded: one entry for each call at its caller, one for each execution at its callee.

Entries travel as plain tuples, so that a worker with an allow_list takes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call as its caller sees it.

    Attributes:
        id: of the call in the whole group; 0 is none.
        parent: id of the call during which it was made, 0 for none.
        kind: "sync", "async" or "remote".
        function: what is called, with its module; an operator as "aten::add".
        to: name of the callee.
        begin_ns: of the caller's time.perf_counter_ns().
        end_ns: as begin_ns; 0 where it had not ended when recording stopped.
        sent_bytes: of a Python function the whole request, else the tensors among the arguments.
        error: class of what it raised, '' for nothing.
    """

    id: int
    parent: int
    kind: str
    function: str
    to: str
    begin_ns: int
    end_ns: int
    sent_bytes: int
    error: str


class Execution(NamedTuple):
    """The function of a call as it runs on the callee.

    Attributes:
        id: of the call.
        function: as Call's.
        caller: name of the caller.
        begin_ns: of the callee's time.perf_counter_ns().
        end_ns: as begin_ns; of an asynchronous function when its future was done; 0 where it had
            not ended when recording stopped.
        thread: native id of the thread that ran it.
        result_bytes: of the tensors in the result; 0 for an asynchronous function.
        error: class of what it raised, '' for nothing.
    """

    id: int
    function: str
    caller: str
    begin_ns: int
    end_ns: int
    thread: int
    result_bytes: int
    error: str


class Recording(NamedTuple):
    """What one worker recorded.

    Attributes:
        worker: its name.
        host: where it runs.
        pid: its process.
        calls: that it made.
        executions: of calls that others, or itself, made to it.
        dropped: entries above the limit that were not kept.
        epoch_ns: time.time_ns() minus time.perf_counter_ns(), at the end.
        operators: torch.profiler's Chrome trace, zlib-compressed JSON; b'' without one.
    """

    worker: str
    host: str
    pid: int
    calls: list[Call]
    executions: list[Execution]
    dropped: int
    epoch_ns: int
    operators: bytes

    def to_plain(self) -> tuple[Any, ...]:
        """Return it without our classes."""
        plain = self._replace(
            calls=[tuple(call) for call in self.calls],  # type: ignore[misc]
            executions=[tuple(execution) for execution in self.executions],  # type: ignore[misc]
        )
        return tuple(plain)

    @staticmethod
    def from_plain(plain: tuple[Any, ...]) -> Recording:
        """Return what to_plain() was made from."""
        made = Recording(*plain)
        return made._replace(
            calls=[Call(*call) for call in made.calls],
            executions=[Execution(*execution) for execution in made.executions],
        )


def tensor_bytes(value: Any) -> int:
    """Return the size of the tensors in a value, within tuples, lists and dicts; bytes."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(tensor_bytes, value))
    return 0
