"""The option allow_list: what is listed runs; everything else is refused by name and does not
run."""

from __future__ import annotations

import collections
import datetime
import os
import pathlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import autograd, rpc

from tests.process import functions as f
from tests.process import service
from tests.process.group import Group
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("has no allow-list")

SERVICE = ["tests.process.service", "torch.add"]
#: worker1 offers a service; worker0 is a client without an allow-list.
OPTIONS: list[dict[str, Any]] = [{}, {"allow_list": SERVICE}]


def refused(call: Callable[[], Any], what: str) -> None:
    """Check that the error has its type, and says which worker refused what, and by which
    option."""
    from torch_rpc_ext.errors import RefusedError

    with pytest.raises(RefusedError) as raised:
        call()
    for word in (what, "worker1", "allow_list"):
        assert word in str(raised.value), str(raised.value)
    assert raised.value.worker == "worker1"


def sync(fn: Any, *args: Any) -> Any:
    return rpc.rpc_sync("worker1", fn, args=args, timeout=20)


def remote(fn: Any, *args: Any) -> Any:
    return rpc.remote("worker1", fn, args=args, timeout=20).to_here(timeout=20)


def still_serves() -> None:
    assert sync(service.add, 1, 2) == 3


class Reduced:
    """Is pickled as what a hostile peer may write."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced

    def __call__(self) -> None:
        """Makes the object callable, so that it is taken for a function."""


def serve_listed() -> None:
    assert sync(service.add, 1, 2) == 3
    assert sync(service.add, torch.ones(2), torch.ones(2)).sum() == 4
    assert sync(torch.add, torch.ones(2), 1).sum() == 4
    assert sync(service.script_add, torch.ones(2), torch.ones(2)).sum() == 4
    for fn in (service.add, torch.add, service.script_add):
        assert remote(fn, torch.ones(2), torch.ones(2)).sum() == 4
    future = rpc.rpc_async("worker1", service.add, args=([1, {2: (3, {4})}], [b"x", 1j]))
    assert future.wait() == [1, {2: (3, {4})}, b"x", 1j]
    with pytest.raises(ValueError, match="no such"):
        sync(service.fail, "no such")
    with pytest.raises(AttributeError, match="only_here"):
        sync(only_here)


def only_here() -> None:
    """A function that claims to be in the service, and is not."""


only_here.__module__ = service.__name__


def test_what_is_listed_runs() -> None:
    service_only_here = service.__dict__.get("only_here")
    assert service_only_here is None
    with Group(2, options=OPTIONS) as group:
        group.run(with_only_here, "serve_listed")


def with_only_here(name: str) -> None:
    service.only_here = only_here  # type: ignore[attr-defined]
    globals()[name]()


def refuse_targets() -> None:
    refused(lambda: sync(os.system, "true"), "posix.system")
    refused(lambda: sync(f.identity, 1), "tests.process.functions.identity")
    refused(lambda: sync(torch.mul, torch.ones(2), 2), "aten::mul")
    refused(
        lambda: sync(f.script_add, torch.ones(2), torch.ones(2)),
        "tests.process.functions.script_add",
    )
    refused(lambda: rpc.rpc_async("worker1", eval, args=("1",)).wait(), "builtins.eval")
    for what, fn in (
        ("tests.process.functions.identity", f.identity),
        ("aten::neg", torch.neg),
        ("tests.process.functions.script_add", f.script_add),
    ):
        args = (torch.ones(2),) * (2 if fn is f.script_add else 1)
        refused(lambda fn=fn, args=args: remote(fn, *args), what)
    with autograd.context():
        ones = torch.ones(2, requires_grad=True)
        refused(lambda: sync(torch.mul, ones, 2), "aten::mul")
        refused(lambda: sync(f.identity, ones), "tests.process.functions.identity")
    still_serves()


def test_what_is_not_listed_is_refused() -> None:
    with Group(2, options=OPTIONS) as group:
        group.run(refuse_targets)


def refuse_arguments(path: str) -> None:
    refused(lambda: sync(service.add, service.Evil(path), 1), "posix.system")
    refused(lambda: remote(service.add, service.Evil(path), 1), "posix.system")
    refused(lambda: sync(service.add, Reduced(eval, ("1",)), 1), "builtins.eval")
    still_serves()


def test_a_pickle_that_runs_a_command(tmp_path: Path) -> None:
    with Group(2, options=OPTIONS) as group:
        group.run(refuse_arguments, str(tmp_path / "evil"))
    assert not list(tmp_path.iterdir()), "the command ran"


def named(module: str, name: str) -> bytes:
    """The pickle of a request that calls a global, by module and dotted name."""
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93)R."


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def build(module: str, name: str) -> bytes:
    """The pickle of a request that sets an attribute of a global: BUILD with (None, {"x": 1})."""
    body = _text(module) + _text(name) + b"\x93" + b"N}" + _text("step") + b"K\x05s\x86b."
    return b"\x80\x04" + body


def send(payload: bytes) -> None:
    """Send a pickle as a request for a Python function."""
    from torch._C import _distributed_rpc as native

    future = native._invoke_rpc_python_udf(  # type: ignore[attr-defined]
        rpc.get_worker_info("worker1"), payload, [], 20.0, False
    )
    future.wait()


def refuse_tricks() -> None:
    here = service.__name__
    for module, name in (
        (here, "os.system"),
        (here, "run_command"),
        (here, "add.__globals__"),
        (here, "Counter.__subclasses__"),
        (here, "Counter.count.__globals__"),
        ("builtins", "exec"),
        ("no_such_module", "x"),
        ("torch.distributed.rpc.internal", "_InternalRPCPickler.serialize"),
        ("torch.distributed.rpc.internal", "sys"),
    ):
        refused(lambda module=module, name=name: send(named(module, name)), f"{module}.{name}")
        short = f"\x01Call\0{module}\0{name}\0".encode()  # torch_rpc_ext/_upstream/payloads.py
        refused(lambda short=short: send(short), f"{module}.{name}")
    # Pickles may name getattr, but only for methods of listed classes.
    for owner, name in (
        (service.add, "__globals__"),
        (service.Counter, "__subclasses__"),
        (service.Counter, "_reset"),
        (service.Counter, "step"),
        ((), "__class__"),
    ):
        refused(lambda o=owner, n=name: sync(service.add, Reduced(getattr, (o, n)), 1), name)
    assert sync(Reduced(getattr, (service.Counter(), "count"))) == 1
    # A pickle may set the state of instances, but not that of classes and functions.
    for module, name in ((here, "Counter"), (here, "add"), ("torch_rpc_ext.errors", "RpcError")):
        refused(lambda module=module, name=name: send(build(module, name)), "a change of a")
    still_serves()


def test_ways_around_it() -> None:
    with Group(2, options=OPTIONS) as group:
        group.run(refuse_tricks)
        assert group[1].run(step) == 1


def step() -> int:
    return service.Counter.step


def use_rrefs() -> None:
    counter = rpc.remote("worker1", service.Counter)
    assert counter.rpc_sync().count() == 1
    assert counter.rpc_async().count().wait() == 2
    assert counter.remote().count().to_here() == 3
    refused(lambda: counter.rpc_sync()._reset(), "_reset")
    assert counter.rpc_sync().count() == 4
    with autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        loss = sync(service.add, x, x).sum() + remote(torch.add, x, x).sum()
        autograd.backward(context, [loss])
        assert autograd.get_gradients(context)[x].sum() == 8


def use_remote_module() -> None:
    from torch.distributed.nn.api import remote_module
    from torch.distributed.nn.api.remote_module import RemoteModule
    from torch.distributed.optim import DistributedOptimizer

    module: Any = RemoteModule("worker1/cpu", service.Double)
    assert module.forward(torch.ones(2)).sum() == 4
    with autograd.context() as context:
        autograd.backward(context, [module.forward(torch.ones(2)).sum()])
        optimizer: Any = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.5)
        optimizer.step(context)
    assert module.forward(torch.ones(2)).sum() == 2
    assert sync(service.call_module, module, torch.ones(2)).sum() == 2
    # To a worker that does not own the module; and one that its owner passes on.
    own: Any = RemoteModule("worker0/cpu", service.Double)
    for passed, total in ((module, 2), (own, 4)):
        for _ in range(2):
            arguments = (passed, torch.ones(2))
            assert rpc.rpc_sync("worker2", service.call_module, args=arguments).sum() == total
    scripted: Any = remote_module._RemoteModule(
        "worker1/cpu", service.Double, _module_interface_cls=service.DoubleInterface
    )
    assert scripted.forward(torch.ones(2)).sum() == 4
    other: Any = RemoteModule("worker1/cpu", torch.nn.Linear, args=(1, 1))
    refused(lambda: other.get_module_rref().to_here(), "Linear")


def test_upstreams_own_protocol_works() -> None:
    """Upstream itself uses RRefs, autograd, RemoteModule, optimizers, and a shutdown of all three
    workers together."""
    allow = [*SERVICE, "torch.optim.SGD"]
    with Group(3, options={"allow_list": allow}) as group:
        group.run(use_rrefs)
        group.run(use_remote_module)


def send_all_kinds() -> None:
    with_metadata = collections.OrderedDict(a=1)
    with_metadata._metadata = {"version": 2}  # type: ignore[attr-defined]
    nested: Any = ((((1,),),),)
    read = service.Vector(3, 4)
    assert read.length == 5  # the value is in the instance from now on
    for value in (
        *(rpc.get_worker_info("worker1"), torch.float32, torch.strided, torch.channels_last),
        *(
            torch.device("cpu"),
            torch.Size([1, 2]),
            datetime.timedelta(1),
            datetime.date(2000, 1, 1),
            Path("a/b"),
        ),
        *(
            range(3),
            slice(1, 2),
            (slice(None), ...),
            frozenset({1}),
            bytearray(b"ab"),
            2**70,
            -1.5,
            "\udc80",
            nested,
        ),
        *(collections.deque([1], 3), collections.defaultdict(list, a=[1]), collections.OrderedDict),
        *(service.Point(1, service.add), service.Names("ab"), read, service.Pair(1, 2)),
        *(service.Colour.RED, service.Counter, [service.add], int, ValueError),
    ):
        arrived = sync(service.serve_through, service.Pair, value, 1)[0]
        assert type(arrived) is type(value)
        assert arrived == value
    for array in (np.eye(2), np.array(["ab"]), np.float32(3), np.array("2000-01-01", "M8[D]")):
        arrived = sync(service.serve_through, service.Pair, array, 1)[0]
        assert type(arrived) is type(array) and arrived.dtype == array.dtype
        assert np.array_equal(arrived, array)
    arrived = sync(service.serve_through, service.Pair, with_metadata, 1)[0]
    assert arrived._metadata == {"version": 2}
    errors = sync(service.serve_through, service.Pair, OSError(2, "no", "file"), service.Shout("x"))
    assert errors[0].filename == "file" and errors[1].args == ("x",)
    arrived = sync(service.serve_through, service.Pair, torch.eye(2).to_sparse_csr(), 1)[0]
    assert arrived.to_dense().trace() == 2


def test_values_of_all_kinds_arrive() -> None:
    with Group(2, options={"allow_list": SERVICE}) as group:
        group.run(send_all_kinds)


def take_evil_answer() -> None:
    # Upstream raises a RuntimeError for anything that is wrong with an answer.
    with pytest.raises(RuntimeError, match='worker "worker1" refused posix.system.*allow_list'):
        sync(service.call_back, "worker0")
    still_serves()


def send_paths_as_another_python() -> None:
    """Python 3.13 has the classes of paths in pathlib._local, the other versions in pathlib."""
    names = {"pathlib", "pathlib._local"} - {pathlib.PosixPath.__module__}
    for cls in (pathlib.PosixPath, pathlib.PurePosixPath):
        (cls.__module__,) = names
        sys.modules.setdefault(cls.__module__, pathlib)
        assert sync(str, cls("/a/b")) == "/a/b"


def test_paths_of_another_python_arrive() -> None:
    with Group(2, options=[{}, {"allow_list": ["builtins.str"]}]) as group:
        group.run(send_paths_as_another_python)


def test_answers_are_checked_too() -> None:
    with Group(2, options=OPTIONS) as group:
        group.run(take_evil_answer)


def refuse_all_but_data(tensor: Tensor) -> None:
    refused(lambda: sync(service.add, tensor, 1), "tests.process.service.add")
    refused(lambda: sync(torch.add, tensor, 1), "aten::add")


def test_an_empty_list_allows_nothing() -> None:
    with Group(2, options=[{}, {"allow_list": []}]) as group:
        group.run(refuse_all_but_data, torch.ones(2))


def test_a_dynamic_group() -> None:
    with Group(2, options={"allow_list": ["tests.process.service.add"]}, dynamic=True) as group:
        group.run(still_serves)
        group.run(refuse_one)
        for worker in group:
            worker.run(rpc.shutdown)


def refuse_one() -> None:
    refused(lambda: sync(service.fail, "x"), "tests.process.service.fail")


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ("no_such_module.add", "no_such_module"),
        ("tests.process.service.ad", "ad"),
        ("aten::no_such", "no operator"),
        ("tests.process.service.__name__", "a str"),
        ("not a name", "not a name"),
    ],
)
def test_an_entry_that_names_nothing(entry: str, word: str) -> None:
    with Group(2, init=False) as group:
        calls = [
            group[0].init(2, rpc_timeout=10),
            group[1].init(2, rpc_timeout=10, allow_list=[entry]),
        ]
        with pytest.raises(ValueError) as raised:
            calls[1].result(30)
        assert "allow_list" in str(raised.value) and word in str(raised.value)
        with pytest.raises(RuntimeError, match="allow_list"):
            calls[0].result(30)


def test_wrong_types_are_refused() -> None:
    from torch_rpc_ext import UcxRpcBackendOptions

    with pytest.raises(TypeError, match="allow_list must be a list"):
        UcxRpcBackendOptions(allow_list="os.system")
    with pytest.raises(ValueError, match="each entry of allow_list must not be empty"):
        UcxRpcBackendOptions(allow_list=[""])
    assert UcxRpcBackendOptions(allow_list=["a.b"]).allow_list == ("a.b",)
