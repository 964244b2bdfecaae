"""The sequences in docs/design show what the workers really send each other."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group
from tests.support import messages
from tests.support.backend import ROOT, needs_ucx
from tests.support.capture import Capture

sys.path.insert(0, str(ROOT / "docs"))
import figures  # noqa: E402  the path comes first

pytestmark = needs_ucx("speaks another wire format")
Listen = Callable[[], Capture]
#: When no worker has sent anything for so long, all messages that follow from a call are sent; s.
QUIET = 0.4
#: Attempts for a sequence that a busy machine may change.
TRIES = 20
MEGABYTE = 1_000_000
kept: list[Any] = []


@pytest.fixture(scope="module")
def listen() -> Listen:
    try:
        with Capture():
            pass
    except PermissionError:
        pytest.skip("listening to the network needs root")
    return Capture


@pytest.fixture(scope="module")
def three(listen: Listen) -> Iterator[Group]:
    """Three workers that are connected, and whose messages are recorded."""
    with Group(3, env={"UCX_TLS": "tcp"}) as group:
        group.run_all(call_all)
        yield group


def call_all() -> None:
    for rank in range(3):
        rpc.rpc_sync(f"worker{rank}", f.identity, args=(1,))


def check(heard: list[messages.Sent], figure: Any, *, in_order: bool = True) -> None:
    expected = figure.messages()
    assert Counter(heard) == Counter(expected), heard
    if in_order:
        assert heard == expected


def traffic() -> tuple[int, list[str]]:
    """How many calls are under way at this worker, and what it has counted so far."""
    counted = rpc.api._get_current_rpc_agent().get_metrics()
    running = [counted[f"agent.{of}_active_calls"] for of in ("client", "server")]
    running.append(counted["agent.server_active_async_calls"])
    names = ("calls_sent", "calls_served", "bytes_sent", "bytes_received")
    return sum(map(int, running)), [counted[f"agent.{name}"] for name in names]


def settle(group: Group) -> None:
    """Wait until all messages that follow from earlier calls have been sent."""
    end = time.monotonic() + 60
    before = group.run_all(traffic)
    while True:
        time.sleep(QUIET)
        now = group.run_all(traffic)
        if now == before and not any(running for running, _ in now):
            return
        assert time.monotonic() < end, now
        before = now


def listen_to(group: Group, listen: Listen, *functions: Callable[[], Any]) -> Capture:
    settle(group)  # what the test before has let go is told to its owner
    with listen() as heard:
        for function in functions:
            group[0].run(function)
            settle(group)
    return heard


# ---- RRefs and autograd ----------------------------------------------------


def create() -> None:
    kept.append(rpc.remote("worker1", f.identity, args=(torch.ones(2),)))


def fetch() -> None:
    assert kept[-1].to_here().sum() == 2


def forget() -> None:
    kept.clear()
    gc.collect()


def value_of(rref: Any) -> float:
    return float(rref.to_here().sum())


def share() -> None:
    assert rpc.rpc_sync("worker2", value_of, args=(kept[-1],)) == 2


def is_mine(rref: Any) -> bool:
    return bool(rref.is_owner())


def bring_home() -> None:
    assert rpc.rpc_sync("worker1", is_mine, args=(kept[-1],))


def test_life_of_an_rref(three: Group, listen: Listen) -> None:
    heard = listen_to(three, listen, create, fetch, forget)
    check(messages.calls(heard, three), figures.RREF_LIFE)


def test_an_rref_is_passed_on(three: Group, listen: Listen) -> None:
    three[0].run(create)
    sent = messages.calls(listen_to(three, listen, share), three)
    three[0].run(forget)
    # The confirmation of the child reaches the parent at the same time as the function's messages.
    check(sent, figures.RREF_SHARE, in_order=False)
    confirmed = sent.index(("worker1", "worker2", "RREF_ACK"))
    assert sent.index(("worker2", "worker1", "RREF_FORK_REQUEST")) < confirmed
    assert confirmed < sent.index(("worker2", "worker1", "PYTHON_RREF_FETCH_CALL"))
    assert confirmed < sent.index(("worker2", "worker0", "RREF_CHILD_ACCEPT"))


def test_an_rref_comes_home(three: Group, listen: Listen) -> None:
    three[0].run(create)
    sent = messages.calls(listen_to(three, listen, bring_home), three)
    three[0].run(forget)
    check(sent, figures.RREF_HOME, in_order=False)


def share_my_own() -> None:
    kept.append(rpc.RRef(torch.ones(2)))
    share()


def test_an_owner_passes_its_own(three: Group, listen: Listen) -> None:
    sent = messages.calls(listen_to(three, listen, share_my_own), three)
    three[0].run(forget)
    assert ("worker2", "worker0", "SCRIPT_RREF_FETCH_CALL") in sent
    assert not {"RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT"} & {name for _, _, name in sent}


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def step() -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", double, args=(x,))
        dist_autograd.backward(context, [y.sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [2, 2]


def test_a_backward_pass(three: Group, listen: Listen) -> None:
    sent = messages.calls(listen_to(three, listen, step), three)
    # The answers with gradients cross each other.
    check(sent, figures.AUTOGRAD, in_order=False)
    assert sent[:3] == figures.AUTOGRAD.messages()[:3]
    assert all("CLEANUP" in name for _, _, name in sent[-2:])


# ---- The transport ---------------------------------------------------------


def send(elements: int) -> None:
    rpc.rpc_sync("worker1", f.nothing, args=(torch.ones(elements),))


def send_little() -> None:
    send(1)


def send_much() -> None:
    send(MEGABYTE)


def echo() -> None:
    kept.append(rpc.rpc_sync("worker1", f.identity, args=(torch.ones(MEGABYTE),)))


def test_a_connection_opens(listen: Listen) -> None:
    with Group(2, env={"UCX_TLS": "tcp"}) as group:
        sent = messages.frames(listen_to(group, listen, send_little), group)
        check(sent, figures.HANDSHAKE)


@pytest.mark.parametrize(
    ("use_cma", "figure"), [(True, figures.BULK_LENT), (False, figures.BULK_PULL)]
)
def test_bulk(listen: Listen, use_cma: bool, figure: Any) -> None:
    with Group(2, env={"UCX_TLS": "tcp"}, options={"use_cma": use_cma}) as group:
        group.run(send_little)
        if use_cma and "cma" not in group.run(bulk_path):
            pytest.skip("this machine does not let processes read each other's memory")
        sent = messages.frames(listen_to(group, listen, send_much), group)
        # A kDone is sent alone, and not with the answer, if the answer takes more than 5 ms.
        check([message for message in sent if message[2] != "kDone"], figure)


def send_some() -> None:
    kept.append(rpc.rpc_sync("worker1", f.identity, args=(torch.ones(8192),)))


def test_small_bulk_is_in_the_frame(listen: Listen) -> None:
    with Group(2, env={"UCX_TLS": "tcp"}, options={"use_cma": False}) as group:
        group.run(send_little)
        sent = messages.frames(listen_to(group, listen, send_some), group)
        kinds = [kind for _, _, kind in sent if kind != "kDone"]
        assert kinds == ["kFrame", "kFrame"], sent


def bulk_path() -> str:
    agent: Any = rpc.api._get_current_rpc_agent()
    [path] = [peer["bulk"] for peer in agent.describe_peers() if peer["worker"] == "worker1"]
    return str(path)


def test_a_result_is_handed_over(listen: Listen) -> None:
    with Group(2, env={"UCX_TLS": "tcp"}) as group:
        group.run(echo)  # so that the callee learns that it returns its argument
        group.run(forget)
        if "cma" not in group.run(bulk_path):
            pytest.skip("this machine does not let processes read each other's memory")
        for _ in range(TRIES):
            sent = messages.frames(listen_to(group, listen, echo, forget), group)
            if sent == figures.HANDOVER.messages():
                break  # else a step took more than 5 ms, and a kDone was sent alone
        check(sent, figures.HANDOVER)
