"""torch.ops.torch_rpc_ext: what TorchScript code can ask about its worker and its group."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process import remote_functions
from tests.process.group import Group, workers
from tests.support import script
from tests.support.backend import needs_ucx

NAMES = ["worker0", "worker1", "worker2"]


def scripted() -> Any:
    """The module of TorchScript functions, which worker1 has imported too."""
    from tests.process import script_operators

    rpc.rpc_sync("worker1", script_operators.loaded)
    return script_operators


@workers(3)
def test_names_and_ids() -> None:
    who = scripted().who
    assert who.sync("worker1") == (NAMES, [0, 1, 2], "worker1", 1)
    assert who() == (NAMES, [0, 1, 2], "worker0", 0)
    # Python can call the operators under both names.
    assert torch.ops.torch_rpc_ext.worker_names() == NAMES
    assert torch.ops.torch_rpc_ext.own_id() == 0


@workers(2)
def test_metrics_are_the_agents() -> None:
    numbers = scripted().numbers.sync("worker1")
    counted = rpc.api._get_current_rpc_agent().get_metrics()
    assert set(numbers) == set(counted) and numbers["agent.thread_pool_size"] >= 1


@needs_ucx("does not count calls")
@workers(2)
def test_torchscript_asks_anew_each_time() -> None:
    sent_by_a_call = scripted().sent_by_a_call
    # TorchScript optimises a function from its second run on.
    assert [sent_by_a_call("worker1") for _ in range(4)] == [1] * 4


@needs_ucx("needs the GIL for what came before")
@workers(2)
def test_no_gil_is_needed() -> None:
    who, alive = scripted().who, scripted().alive
    with remote_functions.gil_held("worker1"):
        needs_gil = rpc.rpc_async("worker1", f.identity, (1,))
        for _ in range(20):
            assert who.sync("worker1")[2] == "worker1"
            assert alive.sync("worker1", "worker0")
        assert not needs_gil.done(), "nobody held the GIL: this shows nothing"
    assert needs_gil.wait() == 1


def wait_until_dead(worker: str) -> None:
    alive = scripted().alive
    end = time.monotonic() + 30
    while alive(worker):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert alive("worker0") and alive("worker1")


def expect_all_alive() -> None:
    assert [scripted().alive(name) for name in NAMES] == [True] * 3
    with pytest.raises(RuntimeError, match='"nobody".*3 workers.*worker0, worker1, worker2'):
        scripted().alive("nobody")


@needs_ucx("does not say who is alive")
def test_who_is_alive() -> None:
    with Group(3) as group:
        group.run(expect_all_alive)
        group[2].kill()
        group.run(wait_until_dead, "worker2")
        group.close(gently=False)


def test_without_rpc_and_on_another_back_end() -> None:
    ended = script.python(
        """
        import tempfile, torch
        from torch.distributed import rpc
        from torch_rpc_ext.scripting import operators

        def ask(operator, *args):
            try:
                print(operator(*args))
            except RuntimeError as error:
                print(str(error).splitlines()[0])

        ask(operators.own_name)
        with tempfile.NamedTemporaryFile() as file:
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}")
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
            ask(operators.own_name)
            ask(operators.is_alive, "alone")
            rpc.shutdown()
        """
    )
    before, name, alive = ended.out.splitlines()
    assert "init_rpc() before" in before, ended
    assert name == "alone" and "BackendType.UCX" in alive, ended
