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
        kind: "sync", "async", "remote", or "message": one that torch's C++ sends by itself.
        function: what is called, with its module; an operator as "aten::add".
        to: name of the callee.
        begin_ns: of the caller's time.perf_counter_ns().
        end_ns: as begin_ns; 0 where it had not ended when recording stopped.
        sent_bytes: of a Python function the whole request, else the tensors among the arguments.
        error: class of what it raised, '' for nothing; of a message "failed".
        number: the agent's number for it; 0 where there is none.
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
    number: int = 0


class Execution(NamedTuple):
    """The function of a call as it runs on the callee.

    Of an operator, a TorchScript function or a message begin_ns is start_ns: it includes reading
    the request, and the wait for the GIL where it needs one.

    Attributes:
        id: of the call.
        function: as Call's.
        caller: name of the caller.
        begin_ns: of the callee's time.perf_counter_ns().
        end_ns: as begin_ns; of an asynchronous function when its future was done; 0 where it had
            not ended when recording stopped.
        thread: native id of the thread that ran it; 0 where it is not known.
        result_bytes: of a Python function the tensors in the result, 0 for an asynchronous one;
            else the whole answer.
        error: class of what it raised, '' for nothing.
        arrival_ns: when all of the request was there; as begin_ns. 0 where it is not known, on
            TENSORPIPE; then start_ns and gil_wait_ns are 0 too.
        start_ns: when a thread took it up: until then it was queued.
        gil_wait_ns: how long that thread waited for the GIL, outside of the function.
    """

    id: int
    function: str
    caller: str
    begin_ns: int
    end_ns: int
    thread: int
    result_bytes: int
    error: str
    arrival_ns: int = 0
    start_ns: int = 0
    gil_wait_ns: int = 0

    @property
    def queue_ns(self) -> int:
        """How long it waited for a thread."""
        return self.start_ns - self.arrival_ns

    @property
    def execution_ns(self) -> int:
        """How long it ran, without waits for the GIL before it."""
        waited = self.gil_wait_ns if self.begin_ns == self.start_ns else 0
        return self.end_ns - self.begin_ns - waited


class Logged(NamedTuple):
    """A call as the agent has logged it, at its caller or its callee (csrc/metrics/call_log.h).

    Attributes:
        number: the caller's agent's number for it.
        peer: name of the callee, or of the caller.
        label: what was asked for; of what torch's C++ sends by itself the message's type.
        begin_ns: caller: sent; callee: all of the request is there. As Call's.
        start_ns: callee: a thread has taken it up.
        end_ns: caller: answered, or failed; callee: its answer is made.
        gil_wait_ns: callee: how long the thread waited for the GIL.
        bytes: callee: of the answer.
        failed: caller: with an error.
    """

    number: int
    peer: str
    label: str
    begin_ns: int
    start_ns: int
    end_ns: int
    gil_wait_ns: int
    bytes: int
    failed: bool


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
        sent: what the agent has logged of calls that this worker made; none on TENSORPIPE.
        served: as sent, of calls to it.
    """

    worker: str
    host: str
    pid: int
    calls: list[Call]
    executions: list[Execution]
    dropped: int
    epoch_ns: int
    operators: bytes
    sent: list[Logged]
    served: list[Logged]

    def to_plain(self) -> tuple[Any, ...]:
        """Return it without our classes."""
        plain = self._replace(
            calls=[tuple(call) for call in self.calls],  # type: ignore[misc]
            executions=[tuple(execution) for execution in self.executions],  # type: ignore[misc]
            sent=[tuple(logged) for logged in self.sent],  # type: ignore[misc]
            served=[tuple(logged) for logged in self.served],  # type: ignore[misc]
        )
        return tuple(plain)

    @staticmethod
    def from_plain(plain: tuple[Any, ...]) -> Recording:
        """Return what to_plain() was made from."""
        made = Recording(*plain)
        return made._replace(
            calls=[Call(*call) for call in made.calls],
            executions=[Execution(*execution) for execution in made.executions],
            sent=[Logged(*logged) for logged in made.sent],
            served=[Logged(*logged) for logged in made.served],
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
