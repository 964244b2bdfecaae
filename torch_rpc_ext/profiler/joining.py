"""Joining the agents' logs with what was recorded in Python.

The agents log what the hooks in Python do not see: when a request arrived and when a thread took
it, the callee's side of operators and TorchScript functions, and calls that begin in C++.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from torch_rpc_ext import errors
from torch_rpc_ext.profiler.records import Call, Execution, Logged, Recording

__all__ = ["joined"]

# Messages that torch's C++ sends by itself and for whose answer a program waits. Messages that
# count RRefs and end autograd contexts are left out.
_MESSAGES = {
    "PYTHON_RREF_FETCH_CALL": "RRef.to_here",
    "SCRIPT_RREF_FETCH_CALL": "RRef.to_here",
    "BACKWARD_AUTOGRAD_REQ": "dist_autograd.backward",
    "RREF_BACKWARD_REQ": "RRef.backward",
}
# Errors of a call that say nothing of its execution, whose end they have not waited for.
_OF_THE_CALLER = (errors.CallTimeoutError.__name__, errors.PeerLostError.__name__)


def joined(recordings: Mapping[str, Recording]) -> dict[str, Recording]:
    """Complete the recordings of a group.

    Args:
        recordings: worker -> its recording.

    Returns:
        The recordings with messages added to the calls, the agents' times added to the executions,
        and executions added for operators, TorchScript functions and messages. `sent` and `served`
        are empty.
    """
    numbers = itertools.count(-1, -1)
    served = {
        (callee, logged.peer, logged.number): logged
        for callee, recording in recordings.items()
        for logged in recording.served
    }
    executions = {name: {e.id: e for e in r.executions} for name, r in recordings.items()}
    calls = {
        name: [*recording.calls, *_messages(recording, numbers)]
        for name, recording in recordings.items()
    }
    for caller, made in calls.items():
        for call in made:
            logged = served.get((call.to, caller, call.number))
            if logged is not None:
                own = executions[call.to]
                own[call.id] = _execution(call, caller, own.get(call.id), logged)
    return {
        name: recording._replace(
            calls=calls[name], executions=list(executions[name].values()), sent=[], served=[]
        )
        for name, recording in recordings.items()
    }


def _messages(recording: Recording, numbers: Iterator[int]) -> Iterator[Call]:
    for logged in recording.sent:
        function = _MESSAGES.get(logged.label)
        if function is not None:
            error = "failed" if logged.failed else ""
            times = (logged.begin_ns, logged.end_ns)
            yield Call(
                *(next(numbers), 0, "message", function, logged.peer, *times, 0, error),
                number=logged.number,
            )


def _execution(call: Call, caller: str, known: Execution | None, logged: Logged) -> Execution:
    if known is None:  # of a Python function too, if the request failed before the function ran
        error = "" if call.error in _OF_THE_CALLER else call.error
        times = (logged.start_ns, logged.end_ns)
        known = Execution(call.id, call.function, caller, *times, 0, logged.bytes, error)
    return known._replace(
        arrival_ns=logged.begin_ns, start_ns=logged.start_ns, gil_wait_ns=logged.gil_wait_ns
    )
