"""What is recorded: one entry for each call at its caller, one for each execution at its callee::

    recording = prof.recordings["worker0"]  # a Recording
    for call in recording.calls:  # each a Call
        print(call.to, call.function, (call.end_ns - call.begin_ns) / 1e3, "us")
    for execution in recording.executions:  # each an Execution
        print(execution.caller, execution.function, execution.execution_ns / 1e3, "us")

Entries travel as plain tuples, because a worker with an allow_list refuses objects of our classes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

__all__ = ["Call", "Execution", "Logged", "Recording", "tensor_bytes"]


class Call(NamedTuple):
    """A call as its caller sees it::

        [call.function for call in recording.calls if call.error]  # calls that failed

    Attributes:
        id: of the call, unique in the group; 0 for none.
        parent: id of the call whose function made this call; 0 for none.
        kind: "sync", "async", "remote", or "message" for a message that torch's C++ sends by
            itself; a message is there only if it had ended when recording stopped.
        function: what is called, with its module; an operator as "aten::add".
        to: name of the callee.
        begin_ns: on the caller's time.perf_counter_ns().
        end_ns: as begin_ns; 0 where the call had not ended when recording stopped.
        sent_bytes: of a Python function the whole request, else the tensors among the arguments.
        error: class of the error that the call raised, '' for none; of a message "failed".
        number: the agent's number of the call; 0 where there is none.
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
    """The function of a call as it runs on the callee::

        max(recording.executions, key=lambda execution: execution.queue_ns)  # waited longest

    For an operator, a TorchScript function or a message begin_ns is start_ns, so the time includes
    reading the request and waiting for the GIL.

    Attributes:
        id: of the call.
        function: as in Call.
        caller: name of the caller.
        begin_ns: on the callee's time.perf_counter_ns().
        end_ns: as begin_ns; of an asynchronous function when its future was done; 0 where the
            function had not ended when recording stopped.
        thread: native id of the thread that ran the function; 0 where it is not known.
        result_bytes: of a Python function the tensors in the result, 0 for an asynchronous one;
            else the whole answer.
        error: class of the error that the function raised, '' for none. Of what is no Python
            function, and of a request that failed before its function ran, the call's error,
            unless that is a time-out or the loss of the callee; of a message "failed" for these
            too.
        arrival_ns: when the whole request had arrived; as begin_ns. 0 where it is not known, on
            TENSORPIPE; then start_ns and gil_wait_ns are 0 too.
        start_ns: when a thread took the request, which was queued until then.
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
        """How long the request waited for a thread."""
        return self.start_ns - self.arrival_ns

    @property
    def execution_ns(self) -> int:
        """How long the function ran, without the waits for the GIL before it."""
        waited = self.gil_wait_ns if self.begin_ns == self.start_ns else 0
        return self.end_ns - self.begin_ns - waited


class Logged(NamedTuple):
    """A call in the log of the caller's or the callee's agent (csrc/metrics/call_log.h).

    Attributes:
        number: the number that the caller's agent gave to the call.
        peer: at the caller the name of the callee, and the other way round.
        label: what is called; of a message that torch's C++ sends by itself, its type.
        begin_ns: at the caller when the request was sent; at the callee when all of it had arrived.
            The clock is that of Call.begin_ns.
        start_ns: at the callee, when a thread took the request.
        end_ns: at the caller when the call had an answer or failed; at the callee when the answer
            was made.
        gil_wait_ns: at the callee, how long the thread waited for the GIL.
        bytes: at the callee, size of the answer.
        failed: at the caller, whether the call ended with an error.
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
    """What one worker recorded::

        for name, recording in prof.recordings.items():
            print(name, recording.host, len(recording.calls), "calls made")

    Attributes:
        worker: the name of the worker.
        host: the host that it runs on.
        pid: its process.
        calls: the calls that it made.
        executions: the calls that it served, its own calls to itself included.
        dropped: number of entries that were not kept because of max_entries.
        epoch_ns: time.time_ns() minus time.perf_counter_ns(), at the end.
        operators: torch.profiler's Chrome trace, zlib-compressed JSON; b'' without one.
        sent: the agent's log of the calls that this worker made; empty on TENSORPIPE.
        served: the agent's log of the calls that this worker served; empty on TENSORPIPE.
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
        """Return the recording as tuples and plain values."""
        plain = self._replace(
            calls=[tuple(call) for call in self.calls],  # type: ignore[misc]
            executions=[tuple(execution) for execution in self.executions],  # type: ignore[misc]
            sent=[tuple(logged) for logged in self.sent],  # type: ignore[misc]
            served=[tuple(logged) for logged in self.served],  # type: ignore[misc]
        )
        return tuple(plain)

    @staticmethod
    def from_plain(plain: tuple[Any, ...]) -> Recording:
        """Undo to_plain().

        Raises:
            ValueError: another value, as from a worker with another release of torch_rpc_ext.
        """
        made = _made(Recording, plain)
        return made._replace(
            calls=[_made(Call, call) for call in made.calls],
            executions=[_made(Execution, execution) for execution in made.executions],
            sent=[_made(Logged, logged) for logged in made.sent],
            served=[_made(Logged, logged) for logged in made.served],
        )


_Entry = TypeVar("_Entry", bound=NamedTuple)


@functools.cache
def _types(kind: type) -> tuple[type, ...]:
    return tuple(get_origin(hint) or hint for hint in get_type_hints(kind).values())


def _made(kind: type[_Entry], plain: Any) -> _Entry:
    """Make an entry of what a worker has sent; all that reads an entry relies on its types."""
    if type(plain) is not tuple or tuple(map(type, plain)) != _types(kind):
        raise ValueError(
            f"the worker has sent no valid {kind.__name__}: does it have another release of "
            "torch_rpc_ext?"
        )
    return kind(*plain)


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
