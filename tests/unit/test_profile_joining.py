"""profiler/joining.py: executions that only the callee's agent has seen."""

from __future__ import annotations

import pytest

from torch_rpc_ext.profiler.joining import joined
from torch_rpc_ext.profiler.records import Call, Execution, Logged, Recording


def recording(worker: str, calls: list[Call], served: list[Logged]) -> Recording:
    return Recording(worker, "host", 1, calls, [], 0, 0, b"", [], served)


def execution_of(error: str) -> Execution:
    """Return the execution of a call of an operator that raised the error `error`."""
    call = Call(5, 0, "sync", "aten::mm", "worker1", 100, 900, 0, error, number=7)
    logged = Logged(7, "worker0", "aten::mm", 200, 300, 400, 0, 64, False)
    made = joined(
        {"worker0": recording("worker0", [call], []), "worker1": recording("worker1", [], [logged])}
    )
    (execution,) = made["worker1"].executions
    return execution


@pytest.mark.parametrize("error", ["", "RuntimeError", "RefusedError"])
def test_the_error_of_an_execution_is_that_of_its_call(error: str) -> None:
    execution = execution_of(error)
    assert (execution.id, execution.begin_ns, execution.end_ns) == (5, 300, 400)
    assert execution.error == error


@pytest.mark.parametrize("error", ["CallTimeoutError", "PeerLostError"])
def test_the_callers_own_trouble_is_none_of_the_execution(error: str) -> None:
    assert execution_of(error).error == ""
