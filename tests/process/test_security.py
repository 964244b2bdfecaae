"""Who may speak to a worker, and what somebody who listens on the network learns."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import check_alive
from tests.process.group import Group, workers
from tests.process.test_hostile import listening_ports
from tests.support.backend import needs_ucx
from tests.support.capture import Capture
from tests.support.messages import PROTOCOL_VERSION

pytestmark = needs_ucx("has no authentication and no encryption")

SECRET, OTHER = "a secret of this test, long enough", "not the secret of this test at all"
#: Everything travels over sockets, where the test can listen.
SOCKETS = {"UCX_TLS": "tcp"}


def init_error(group: Group) -> list[str]:
    errors = []
    for call in [worker.init(len(group.workers), **o) for worker, o in group_options(group)]:
        with pytest.raises(Exception) as raised:  # noqa: PT011  the texts are compared below
            call.result(30)
        errors.append(f"{type(raised.value).__name__}: {raised.value}")
    return errors


def group_options(group: Group) -> list[tuple[Any, Any]]:
    return list(zip(group.workers, group._options, strict=True))


# ---- the secret ------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [({"secret": SECRET}, {"secret": OTHER}), ({"secret": SECRET}, {})]
)
def test_different_secrets_are_named_at_init(given: tuple[dict[str, str], ...]) -> None:
    with Group(2, options=given, init=False) as group:
        for text in init_error(group):
            assert "RefusedError" in text and "worker1 has" in text and "secret" in text, text
            assert SECRET not in text and OTHER not in text
        group.close(gently=False)


@workers(2, options={"secret": SECRET})
def test_a_secret_of_ones_own() -> None:
    check_alive("worker1")
    assert SECRET not in repr(rpc.api._get_current_rpc_agent()._get_backend_options())


def test_secrets_from_file_and_environment(tmp_path: Path) -> None:
    """All three ways give the same secret."""
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    options = [{"secret": SECRET}, {"secret_file": file}, {}, {}]
    env = [
        {},
        {},
        {"TORCH_RPC_EXT_SECRET": SECRET},
        {"TORCH_RPC_EXT_SECRET_FILE": str(file)},
    ]
    with Group(4, options=options, env=env) as group:
        for to in ("worker1", "worker2", "worker3"):
            group.run(check_alive, to)


def unusable(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    shown = tmp_path / "shown"
    shown.write_text(SECRET)
    shown.chmod(0o644)
    short = tmp_path / "short"
    short.write_text("secret")
    short.chmod(0o600)
    return {
        "others may read it": ({"secret_file": shown}, "chmod 600"),
        "too short": ({"secret_file": short}, "16 or more"),
        "not there": ({"secret_file": tmp_path / "none"}, "No such file"),
        "too short as an option": ({"secret": "secret"}, "16 or more"),
    }


@pytest.mark.parametrize(
    "which", ["others may read it", "too short", "not there", "too short as an option"]
)
def test_secrets_that_cannot_be_used(tmp_path: Path, which: str) -> None:
    options, words = unusable(tmp_path)[which]
    with Group(1, options=options, init=False) as group:
        (text,) = init_error(group)
        assert "ValueError" in text and words in text, text
        assert SECRET not in text
        group.close(gently=False)


# ---- strangers -------------------------------------------------------------


def way_in() -> tuple[bytes, bytes]:
    """(id of the group, this worker's address): everything that the store holds except the
    secret."""
    from torch_rpc_ext._group import sessions

    agent = sessions.require().agent
    return bytes(agent.group_id), bytes(agent.address)


def call_with_secret(secret: bytes, group_id: bytes, address: bytes) -> str:
    """Call worker0 from a process that is not in its group; return the error text."""
    from torch.distributed.rpc import api

    from torch_rpc_ext._native import loader

    native = loader.load()
    agent = native.UcxAgent(native.AgentOptions(), "worker1", 1, False)
    agent.set_group(
        group_id, [("worker0", 0, address, 0), ("worker1", 1, bytes(agent.address), 0)], secret
    )
    torch.distributed.autograd._init(1)
    api._init_rpc_states(agent)
    try:
        return f"answer: {rpc.rpc_sync('worker0', f.name_here, timeout=3)}"
    except RuntimeError as error:
        return str(error)
    finally:
        agent.shutdown()


def served() -> int:
    return int(rpc.api._get_current_rpc_agent().get_metrics()["agent.calls_served"])


def test_a_client_without_the_secret_gets_nothing() -> None:
    with Group(3, options={"secret": SECRET}, init=False) as group:
        group[0].init(1, secret=SECRET).result()
        group_id, address = group[0].run(way_in)
        before = group[0].run(served)
        text = group[1].run(call_with_secret, OTHER.encode(), group_id, address)
        assert "answer:" not in text and "worker0" in text
        assert group[0].run(served) == before
        # With the secret the same process is let in: so only the secret was missing.
        text = group[2].run(call_with_secret, SECRET.encode(), group_id, address)
        assert text == "answer: worker0"
        assert "does not know this group's secret" in group.output()
        group.close(gently=False)


@pytest.fixture
def capture() -> Callable[[], Capture]:
    try:
        with Capture():
            pass
    except PermissionError:
        pytest.skip("listening to the network needs root")
    return Capture


def test_a_recorded_session_gets_nothing(capture: Callable[[], Capture]) -> None:
    with Group(3, env=SOCKETS) as group, contextlib.ExitStack() as connections:
        with capture() as heard:
            group[1].run(check_alive, "worker0")
        ports = {port for _, port in listening_ports(group[0].child.pid)}
        streams = {flow: data for flow, data in heard.streams().items() if flow[3] in ports}
        assert streams, "heard nothing"
        before = group[0].run(served)
        fds = group[0].run(open_files)
        for _ in range(5):
            for (_, _, address, port), data in streams.items():
                replay = connections.enter_context(
                    socket.create_connection((socket.inet_ntoa(address), port), timeout=2)
                )
                with contextlib.suppress(OSError):
                    replay.sendall(data)
        time.sleep(1)
        assert group[0].run(served) == before, "a repeated message was served"
        assert group[0].run(open_files) < fds + 10 * len(streams) + 20
        start = time.monotonic()
        for rank, to in ((2, "worker0"), (2, "worker1"), (1, "worker0"), (0, "worker1")):
            group[rank].run(check_alive, to)
        assert time.monotonic() - start < 10


SEALED, REFUSED = (struct.pack("<HH", PROTOCOL_VERSION, kind) for kind in (10, 3))


def as_another(stream: bytes) -> bytes:
    """UCX takes a stream for one that is there already by the number of the connection, which comes
    after a magic number and headers of 5 bytes each."""
    return stream[:18] + struct.pack("<Q", 50_000) + stream[26:]


def test_a_listener_cannot_refuse_what_is_encrypted(capture: Callable[[], Capture]) -> None:
    """Each message names its connection by a token that is not encrypted."""
    with Group(2, env=SOCKETS, options={"encryption": "on"}) as group:
        with capture() as heard:
            group[1].run(check_alive, "worker0")
        ports = {port for _, port in listening_ports(group[0].child.pid)}
        forged = [
            (socket.inet_ntoa(flow[2]), flow[3], as_another(data.replace(SEALED, REFUSED)))
            for flow, data in heard.streams().items()
            if flow[3] in ports and SEALED in data
        ]
        assert forged, "heard nothing"
        call = group[1].start(rpc.rpc_sync, "worker0", f.sleep, args=(3.0,))
        with contextlib.ExitStack() as connections:
            for address, port, data in forged:
                stranger = connections.enter_context(socket.create_connection((address, port)))
                with contextlib.suppress(OSError):
                    stranger.sendall(data)
            assert call.result(60) == 3.0
        assert "dropped: a plain refusal" in group.output()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- encryption ------------------------------------------------------------


def say_it(words: str) -> None:
    assert rpc.rpc_sync("worker1", f.identity, args=(words * 3,)) == words * 3
    bulk = torch.frombuffer(bytearray(words.encode() * 20_000), dtype=torch.uint8)
    assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(bulk,)), bulk)


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_what_one_hears_who_listens(capture: Callable[[], Capture], encryption: str) -> None:
    options = {"encryption": encryption, "use_cma": False}
    # Words of this test alone: where tests run in parallel, traffic of the other variant may be
    # recorded as well.
    words = f"words of {secrets.token_hex(8)} that nobody else should read "
    with Group(2, options=options, env=SOCKETS) as group:
        with capture() as heard:
            group.run(say_it, words)
        everything = b"".join(heard.streams().values())
        assert len(everything) > 40_000 * len(words)
        assert (words.encode() in everything) == (encryption == "off")
        paths = group.run(control_paths)
        assert all(("encrypted" in path) == (encryption == "on") for path in paths) and paths


def control_paths() -> list[str]:
    peers: Any = rpc.api._get_current_rpc_agent()
    return [peer["control"] for peer in peers.describe_peers() if peer["worker"] != "worker0"]


def check_sizes() -> None:
    for count in (0, 1, 1_000, 5_000, 300_000, 4 << 20, 10_000_001):
        tensor = torch.arange(count, dtype=torch.int32)
        back = rpc.rpc_sync("worker1", f.identity, args=(tensor,))
        assert torch.equal(back, tensor), count
    many = [torch.full((n,), float(n)) for n in range(0, 60_000, 1_500)]
    back = rpc.rpc_sync("worker1", f.identity, args=(many,))
    assert all(torch.equal(a, b) for a, b in zip(back, many, strict=True))
    futures = [
        rpc.rpc_async("worker1", torch.add, args=(torch.full((200_000,), float(i)), 1))
        for i in range(20)
    ]
    assert [int(future.wait()[-1]) for future in futures] == list(range(1, 21))
    text = "x" * 300_000
    assert rpc.rpc_sync("worker1", f.identity, args=(text,)) == text


@pytest.mark.parametrize("use_cma", [True, False], ids=["cma", "through UCX"])
def test_encrypted_tensors_of_all_sizes(use_cma: bool) -> None:
    options = {"encryption": "on", "use_cma": use_cma}
    with Group(2, options=options, env={} if use_cma else SOCKETS) as group:
        group.run_all(check_sizes_with_other)


def check_sizes_with_other() -> None:
    if rpc.get_worker_info().id == 0:
        check_sizes()


def test_between_hosts_only() -> None:
    with Group(2, options={"encryption": "between_hosts"}) as group:
        group.run(check_alive, "worker1")
        assert group.run(control_paths) and not any(
            "encrypted" in path for path in group.run(control_paths)
        )


def refusal() -> str:
    from torch_rpc_ext.errors import RpcError

    with pytest.raises(RpcError) as raised:
        rpc.rpc_sync("worker1", f.nothing, timeout=10)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_one_wants_encryption_and_the_other_has_none() -> None:
    with Group(2, options=[{"encryption": "on"}, {}]) as group:
        text = group.run(refusal)
        assert "RefusedError" in text and "encryption" in text, text
        group.close(gently=False)
