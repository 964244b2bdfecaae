"""torch_rpc_ext.scripting: remote functions, in TorchScript and in Python, and calls to many."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import wait_for_file, wait_until_stopped
from tests.process.group import Group
from tests.support.backend import needs_ucx, on_ucx

ONE = torch.ones(2)


def functions() -> Any:
    """The module of remote functions, which all workers import: a callee must have defined its
    TorchScript functions."""
    from tests.process import remote_functions

    for worker in remote_functions.WORKERS[
        : len(rpc.api._get_current_rpc_agent().get_worker_infos())
    ]:
        rpc.rpc_sync(worker, remote_functions.ran)
    return remote_functions


def check_from_python() -> None:
    scale, split = functions().scale, functions().split
    me = rpc.get_worker_info("worker1")
    assert scale.sync("worker1", ONE).tolist() == [2, 2]
    assert scale.sync(me, x=ONE, factor=3.0).tolist() == [3, 3]
    assert scale.sync(1, ONE, 4.0, rpc_timeout=10).tolist() == [4, 4]
    assert scale.async_("worker1", ONE, factor=3.0).wait().tolist() == [3, 3]
    assert scale.remote("worker1", ONE).to_here().tolist() == [2, 2]
    assert asyncio.run(scale.call("worker1", ONE)).tolist() == [2, 2]
    assert scale(ONE, 7.0).tolist() == [7, 7]
    assert rpc.rpc_sync("worker1", scale.script, (ONE,)).tolist() == [2, 2]
    assert rpc.rpc_sync("worker1", scale, (ONE,)).tolist() == [2, 2], "by its name, as any other"
    first, second = split.sync("worker1", functions().Pair(ONE, 1), {"a": [1, 2]}, 10)
    assert first.tolist() == [2, 2] and second == 13
    assert functions().nothing.sync("worker1", ONE) is None
    own_names = {"to": "a", "workers": ["b"], "items": 1, "rpc": 2}
    assert functions().own_names.sync("worker1", **own_names) == "ab3"
    assert functions().scripted_own_names("worker1") == ["ab3"]


def check_from_torchscript() -> None:
    names = ["worker1", "worker0"]
    results = functions().scripted_user("worker1", names, ONE)
    assert [result.flatten().tolist() for result in results] == [
        [2, 2],
        [5, 5],
        [2, 2],
        [7, 7],
        [3, 3, 3, 3],
        [40, 40],
    ]
    assert len(set(functions().scripted_twice("worker1"))) == 4
    # Both the caller and the callee are TorchScript functions.
    results = rpc.rpc_sync("worker1", functions().scripted_user, ("worker0", names, ONE))
    assert results[0].tolist() == [2, 2]


def check_errors_within_torchscript() -> None:
    scripted_gather = functions().scripted_gather
    with pytest.raises(RuntimeError, match="three are too many"):
        scripted_gather(["worker1"], torch.ones(3), -1.0)
    with pytest.raises(torch.jit.Error, match="one worker or more"):
        scripted_gather([], ONE, -1.0)
    with pytest.raises(RuntimeError, match="nobody"):
        scripted_gather(["worker1", "nobody"], ONE, -1.0)
    with pytest.raises(RuntimeError, match="RPCErr:1.*(?s:100 ms)"):
        functions().scripted_spin(["worker1"], torch.ones(1), 500_000, 0.1)


def check_bad_arguments() -> None:
    scale = functions().scale
    with pytest.raises(RuntimeError, match="argument 'x'.*'str'"):
        scale.sync("worker1", "text")
    with pytest.raises(RuntimeError, match="three are too many"):
        scale.sync("worker1", torch.ones(3))
    with pytest.raises(TypeError, match="whoami.*'rpc_timeout'|unexpected keyword"):
        functions().whoami.sync("worker1", postfix="")
    assert scale.sync("worker1", ONE).tolist() == [2, 2]


def check_only_defined_here() -> None:
    from torch_rpc_ext import errors, scripting

    source = "def only_here(x: Tensor) -> Tensor:\n    return x\n"
    import linecache

    linecache.cache["<only_here>"] = (len(source), None, source.splitlines(True), "<only_here>")
    variables: dict[str, Any] = {"Tensor": Tensor, "__name__": "module_of_worker0"}
    exec(compile(source, "<only_here>", "exec"), variables)
    only_here = scripting.script(variables["only_here"])
    with pytest.raises(
        errors.RefusedError, match="undefined function only_here: .* module_of_worker0, there"
    ):
        only_here.sync("worker1", ONE)


def check_no_gil() -> None:
    scale = functions().scale
    with functions().gil_held("worker1"):
        needs_gil = rpc.rpc_async("worker1", f.identity, (1,))
        results = [scale.sync("worker1", ONE).sum() for _ in range(20)]
        assert results == [4] * 20
        assert not needs_gil.done(), "nobody held the GIL: this shows nothing"
    assert needs_gil.wait() == 1


def define_functions() -> None:
    functions()


def tensor_of_python() -> Tensor:
    return torch.from_numpy(numpy.ones(1 << 20, dtype=numpy.float32))


_taken = threading.Event()


def take(*_: Any) -> None:
    _taken.set()


def call_and_hold_the_gil(file: Path) -> None:
    """A message with a pickle of so many bytes is kept until the callee has taken it."""
    args = (tensor_of_python(), bytes(1 << 20))
    f.HELD["call"] = rpc.rpc_async("worker1", take, args=args)
    from tests.process.remote_functions import hold_gil

    hold_gil(str(file))


def check_the_other_serves_without_the_gil(file: Path) -> None:
    from tests.process.remote_functions import scale

    assert _taken.wait(30)
    time.sleep(0.5)  # by now this worker has said, too, that it has taken the message
    needs_gil = rpc.rpc_async("worker0", f.identity, (1,))
    results = [scale.sync("worker0", ONE).sum() for _ in range(20)]
    assert results == [4] * 20
    assert not needs_gil.done(), "nobody held the GIL: this shows nothing"
    file.unlink()
    assert needs_gil.wait() == 1


def test_torchscript_runs_while_memory_of_python_is_given_back(pair: Group, tmp_path: Path) -> None:
    file = tmp_path / "held"
    for worker in pair:
        worker.run(define_functions)
    pair[1].signal(signal.SIGSTOP)
    try:
        wait_until_stopped(pair[1].child.pid)
        holds = pair[0].start(call_and_hold_the_gil, file)
        wait_for_file(file)
    finally:
        pair[1].signal(signal.SIGCONT)
    try:
        pair[1].run(check_the_other_serves_without_the_gil, file)
    finally:
        file.unlink(missing_ok=True)
        holds.result()


def check_autograd() -> None:
    scale = functions().scale
    x = torch.ones(2, requires_grad=True)
    y = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        parts = scale.gather(["worker0", "worker1"], x, 3.0)
        loss = torch.stack(parts).sum() + functions().scripted_gather(["worker1"], y, -1.0)[0].sum()
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
        assert gradients[x].tolist() == [6, 6]
        assert gradients[y].tolist() == [2, 2]


@pytest.mark.parametrize(
    "check",
    [
        check_from_python,
        check_from_torchscript,
        check_errors_within_torchscript,
        check_bad_arguments,
        check_only_defined_here,
        check_no_gil,
        check_autograd,
    ],
)
def test_torchscript(pair: Group, check: Any) -> None:
    pair.run(check)


def test_calls_to_many() -> None:
    with Group(4) as group:
        group[0].run(check_calls_to_many)
        group[0].run(check_errors_of_calls_to_many)


def check_calls_to_many() -> None:
    from torch_rpc_ext import scripting

    m = functions()
    all_names = m.WORKERS
    assert m.whoami.gather(all_names) == all_names
    assert scripting.gather([3, "worker1"], m.whoami, ("I am ",)) == [
        "I am worker3",
        "I am worker1",
    ]
    assert scripting.gather(all_names[1:], torch.add, (ONE, 1))[2].tolist() == [2, 2]
    assert m.whoami.broadcast(all_names) is None
    stacked = torch.stack(m.scale.gather(all_names, ONE, 3.0))
    assert stacked.shape == (4, 2) and stacked.unique().tolist() == [3]
    # The fastest worker wins; workers that fail do not count.
    assert m.fail_on.first_of(all_names, ["worker0", "worker2", "worker3"]) == "worker1"
    start = time.monotonic()
    assert scripting.first_of(["worker1", "worker2"], m.fail_on, (["worker1"], 0.2)) == "worker2"
    assert time.monotonic() - start > 0.2
    # The results are in order, whichever came first; each worker has one item at a time.
    assert m.characters.map_reduce(all_names, list("abcdefgh"), suffix="-") == "a-b-c-d-e-f-g-h-"
    assert scripting.map_reduce(["worker1"], m.characters, ["x"], m.add, (".",)) == "x."
    assert m.scale.map_reduce(all_names, [ONE * i for i in range(9)]).tolist() == [16, 16]


def kept_group_error() -> type[Exception]:
    from torch_rpc_ext import scripting

    return scripting.GroupError if on_ucx() else RuntimeError


def check_errors_of_calls_to_many() -> None:
    from torch_rpc_ext import scripting

    m = functions()
    with pytest.raises(
        scripting.GroupError, match="worker2: LookupError: not on worker2$"
    ) as caught:
        m.fail_on.gather(m.WORKERS, ["worker2"])
    assert caught.value.worker == "worker2"
    assert isinstance(caught.value.errors["worker2"], LookupError if on_ucx() else RuntimeError)
    with pytest.raises(scripting.GroupError, match="1 of 2 .*: worker2: ") as by_rank:
        m.fail_on.gather([1, 2], ["worker2"])
    assert by_rank.value.worker == "worker2" and list(by_rank.value.errors) == ["worker2"]
    assert by_rank.value.results == {"worker1": "worker1"}
    with pytest.raises(scripting.GroupError, match="99: "):
        m.whoami.gather([1, 99])
    assert len(str(caught.value)) < 500, "one line for each; the rest is in the errors"
    assert caught.value.results == {name: name for name in ("worker0", "worker1", "worker3")}
    with pytest.raises(scripting.GroupError, match="2 of 4 .*worker1: .*worker3: ") as caught:
        scripting.gather(m.WORKERS, m.fail_on, (["worker1", "worker3"],))
    assert caught.value.worker is None and set(caught.value.errors) == {"worker1", "worker3"}
    with pytest.raises(scripting.GroupError, match="worker1.*RPCErr:1"):
        scripting.gather(["worker0", "worker1"], m.fail_on, ([], 1.0), timeout=0.2)
    with pytest.raises(scripting.GroupError, match="nobody"):
        m.whoami.gather(["worker1", "nobody"])
    with pytest.raises(scripting.GroupError, match="2 of 2 workers failed"):
        m.fail_on.first_of(["worker1", "worker2"], ["worker1", "worker2"])
    with pytest.raises(scripting.GroupError, match="no such character") as caught:
        m.characters.map_reduce(m.WORKERS, list("ab?cd"), "")
    assert "items[2] of map_reduce" in str(caught.value.__cause__.__notes__)
    with pytest.raises(ValueError, match=r"one item or more"):
        m.characters.map_reduce(m.WORKERS, [], "")
    for bad in ([], "worker1"):
        with pytest.raises(ValueError, match=f"one worker or more, got {re.escape(repr(bad))}"):
            m.whoami.gather(bad)
    with pytest.raises(TypeError, match=r"fail_on.map_reduce\(\).*reduce="):
        m.fail_on.map_reduce(["worker1"], [[]])
    # A group error that a worker raises arrives as a group error.
    with pytest.raises(kept_group_error(), match="worker2: .*not on worker2"):
        rpc.rpc_sync("worker1", m.fail_on.gather, (["worker2"], ["worker2"]))


@needs_ucx("does not notice a death at once")
def test_a_lost_worker_is_named() -> None:
    with Group(3) as group:
        group[0].run(load)
        group[2].kill()
        group[0].run(check_lost)
        group.close(gently=False)


def load() -> None:
    functions()


def check_lost() -> None:
    from tests.process import remote_functions as m
    from torch_rpc_ext import errors, scripting

    with pytest.raises(scripting.GroupError, match="1 of 2 .*worker2") as caught:
        m.whoami.gather(["worker1", "worker2"])
    assert isinstance(caught.value.errors["worker2"], errors.PeerLostError)
    assert m.whoami.first_of(["worker2", "worker1"]) == "worker1"
