"""Who may speak to a worker, and what somebody who listens on the network learns."""

from __future__ import annotations

import contextlib
import os
import re
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
from tests.process.deaths import QUICK, check_alive
from tests.process.group import Group
from tests.process.test_hostile import listening_ports
from tests.support.backend import needs_ucx
from tests.support.capture import Capture
from tests.support.messages import PROTOCOL_VERSION

pytestmark = needs_ucx("has no authentication and no encryption")

SECRET, OTHER = "a secret of this test, long enough", "not the secret of this test at all"
SHORT = "hush, 14 bytes"
#: Everything travels over sockets, where the test can listen.
SOCKETS = {"UCX_TLS": "tcp"}
DEBUG = {"TORCH_RPC_EXT_LOG": "debug"}


def init_error(group: Group) -> list[str]:
    errors = []
    for call in [worker.init(len(group.workers), **o) for worker, o in group_options(group)]:
        with pytest.raises(Exception) as raised:  # noqa: PT011  the texts are compared below
            call.result(30)
        errors.append(f"{type(raised.value).__name__}: {raised.value}")
    return errors


def group_options(group: Group) -> list[tuple[Any, Any]]:
    return list(zip(group.workers, group._options, strict=True))


def says_no_secret(group: Group) -> None:
    """Check what the workers have written, at the level "debug"."""
    output = group.output()
    assert "[torch_rpc_ext debug]" in output, output
    assert SECRET not in output and OTHER not in output


# ---- the secret ------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [({"secret": SECRET}, {"secret": OTHER}), ({"secret": SECRET}, {})]
)
def test_different_secrets_are_named_at_init(given: tuple[dict[str, str], ...]) -> None:
    with Group(2, options=given, env=DEBUG, init=False) as group:
        for text in init_error(group):
            assert "RefusedError" in text and "worker1 has" in text and "secret" in text, text
            assert SECRET not in text and OTHER not in text
        group.close(gently=False)
        assert SECRET not in group.output() and OTHER not in group.output()


def test_a_secret_of_ones_own() -> None:
    with Group(2, options={"secret": SECRET}, env=DEBUG) as group:
        group.run(check_alive, "worker1")
        assert SECRET not in group.run(own_options)
    says_no_secret(group)


def own_options() -> str:
    return repr(rpc.api._get_current_rpc_agent()._get_backend_options())


def test_secrets_from_file_and_environment(tmp_path: Path) -> None:
    """All three ways give the same secret."""
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    options = [{"secret": SECRET}, {"secret_file": file}, {}, {}]
    env = [
        DEBUG,
        DEBUG,
        {**DEBUG, "TORCH_RPC_EXT_SECRET": SECRET},
        {**DEBUG, "TORCH_RPC_EXT_SECRET_FILE": str(file)},
    ]
    with Group(4, options=options, env=env) as group:
        for to in ("worker1", "worker2", "worker3"):
            group.run(check_alive, to)
    says_no_secret(group)


def unusable(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    shown = tmp_path / "shown"
    shown.write_text(SECRET)
    shown.chmod(0o644)
    short = tmp_path / "short"
    short.write_text(SHORT)
    short.chmod(0o600)
    return {
        "others may read it": ({"secret_file": shown}, "chmod 600"),
        "too short": ({"secret_file": short}, "16 or more"),
        "not there": ({"secret_file": tmp_path / "none"}, "No such file"),
        "too short as an option": ({"secret": SHORT}, "16 or more"),
    }


@pytest.mark.parametrize(
    "which", ["others may read it", "too short", "not there", "too short as an option"]
)
def test_secrets_that_cannot_be_used(tmp_path: Path, which: str) -> None:
    options, words = unusable(tmp_path)[which]
    with Group(1, options=options, env=DEBUG, init=False) as group:
        (text,) = init_error(group)
        assert "ValueError" in text and words in text, text
        group.close(gently=False)
        for secret in (SECRET, SHORT):
            assert secret not in text and secret not in group.output()


# ---- strangers -------------------------------------------------------------


def way_in() -> tuple[bytes, bytes]:
    """(id of the group, this worker's address): everything that the store holds except the
    secret."""
    from torch_rpc_ext._group import sessions

    agent = sessions.require().agent
    return bytes(agent.group_id), bytes(agent.address)


def stranger(secret: bytes, group_id: bytes, address: bytes) -> Any:
    """Make this process's agent one that knows worker0 and is not in its group."""
    from torch.distributed.rpc import api

    from torch_rpc_ext._native import loader

    native = loader.load()
    agent = native.UcxAgent(native.AgentOptions(), "worker1", 1, False)
    agent.set_group(
        group_id, [("worker0", 0, address, 0), ("worker1", 1, bytes(agent.address), 0)], secret
    )
    if api._is_current_rpc_agent_set():
        api._reset_current_rpc_agent()
    api._init_rpc_states(agent)
    return agent


def call_with_secret(secret: bytes, group_id: bytes, address: bytes, timeout: float) -> str:
    """Call worker0 from a process that is not in its group; return the error text."""
    torch.distributed.autograd._init(1)
    agent = stranger(secret, group_id, address)
    try:
        return f"answer: {rpc.rpc_sync('worker0', f.name_here, timeout=timeout)}"
    except RuntimeError as error:
        return str(error)
    finally:
        agent.shutdown()


def knock(times: int, group_id: bytes, address: bytes) -> None:
    """Begin so many calls, each from an agent of its own that does not know the secret, and wait
    for none."""
    if not STRANGERS:
        torch.distributed.autograd._init(1)
    for _ in range(times):
        agent = stranger(OTHER.encode(), group_id, address)
        STRANGERS.append((agent, rpc.rpc_async("worker0", f.nothing, timeout=60)))


STRANGERS: list[Any] = []
STRANGE = re.compile(r"does not know this group's secret(?: \(and (\d+) lines like this\))?")


def refusals(group: Group) -> tuple[int, int]:
    """(lines about strangers, strangers that these lines stand for) in worker0's output."""
    found = STRANGE.findall(group[0].child.output())
    return len(found), len(found) + sum(int(more or 0) for more in found)


def served() -> int:
    return int(rpc.api._get_current_rpc_agent().get_metrics()["agent.calls_served"])


def test_a_client_without_the_secret_gets_nothing() -> None:
    with Group(3, options={"secret": SECRET}, env=DEBUG, init=False) as group:
        group[0].init(1, secret=SECRET).result()
        group_id, address = group[0].run(way_in)
        before = group[0].run(served)
        text = group[1].run(call_with_secret, OTHER.encode(), group_id, address, 3.0)
        assert "answer:" not in text and "worker0" in text
        assert group[0].run(served) == before
        # With the secret the same process is let in: so only the secret was missing.
        text = group[2].run(call_with_secret, SECRET.encode(), group_id, address, 30.0)
        assert text == "answer: worker0"
        assert refusals(group) == (1, 1)
        says_no_secret(group)
        group.close(gently=False)


def test_many_strangers_fill_no_log() -> None:
    """At most one line a second, which says how many strangers came since the line before."""
    with Group(2, options={"secret": SECRET}, env=DEBUG, init=False) as group:
        group[0].init(1, secret=SECRET).result()
        way, start = group[0].run(way_in), time.monotonic()
        group[1].run(knock, 20, *way)
        made, again = 20, time.monotonic()
        while True:
            lines, told = refusals(group)
            seconds = time.monotonic() - start
            assert lines <= 1 + seconds, f"{lines} lines in {seconds:.1f} s"
            if told == made:
                break
            assert seconds < 60, f"{told} of {made} strangers are in the log"
            if time.monotonic() - again > 1.2:  # a line about this one tells of those before it
                group[1].run(knock, 1, *way)
                made, again = made + 1, time.monotonic()
            time.sleep(0.05)
        group.close(gently=False)


@pytest.fixture
def capture() -> Callable[[], Capture]:
    try:
        with Capture():
            pass
    except PermissionError:
        pytest.skip("listening to the network needs root")
    return Capture


def wait_for_lines(group: Group, text: str, count: int) -> None:
    """Wait until worker0 has written so many lines with the text."""
    deadline = time.monotonic() + 60
    while group[0].child.output().count(text) < count:
        assert time.monotonic() < deadline, f"no {count} lines with {text!r}"
        time.sleep(0.05)


def unread(sockets: list[socket.socket]) -> int:
    """How many bytes that these sockets have sent wait at the other end, which is on this host."""
    ports = {one.getsockname()[1] for one in sockets}
    waiting = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, _, queues, *_ = line.split()
        if int(remote.split(":")[1], 16) in ports:
            waiting += int(queues.split(":")[1], 16)
    return waiting


# Without encryption, who has heard a connection can repeat its messages as long as it lasts:
# docs/security.md, "Not promised".
@pytest.mark.parametrize(
    ("encryption", "ended"),
    [("on", False), ("on", True), ("off", True)],
    ids=["encrypted", "encrypted and ended", "ended"],
)
def test_a_recorded_session_gets_nothing(
    capture: Callable[[], Capture], encryption: str, ended: bool
) -> None:
    env, options = {**SOCKETS, **DEBUG}, {"encryption": encryption}
    with Group(3, env=env, options=options) as group, contextlib.ExitStack() as connections:
        with capture() as heard:
            group[1].run(check_alive, "worker0")
        ports = {port for _, port in listening_ports(group[0].child.pid)}
        streams = {flow: data for flow, data in heard.streams().items() if flow[3] in ports}
        assert streams, "heard nothing"
        if ended:
            group[1].kill()
            wait_for_lines(group, 'the connection to worker "worker1" ended', 1)
        before = group[0].run(served)
        fds = group[0].run(open_files)
        replays = []
        for number in range(5):
            for (_, _, address, port), data in streams.items():
                # As it was, and so that UCX does not take it for the connection that it was.
                for stream in (data, as_another(data, 50_000 + number)):
                    replay = connections.enter_context(
                        socket.create_connection((socket.inet_ntoa(address), port), timeout=20)
                    )
                    replays.append(replay)
                    with contextlib.suppress(OSError):
                        replay.sendall(stream)
        # The accepter has seen them all, and has not been given what it waits for.
        if ended:
            wait_for_lines(group, 'the connection to worker "an unknown worker" ended', 5)
        else:
            wait_for_lines(group, "dropped: a sealed message came a second time", 1)
        deadline = time.monotonic() + 60
        while unread(replays):
            assert time.monotonic() < deadline, "the replays are not read"
            time.sleep(0.05)
        alive = [0, 2] if ended else [0, 1, 2]
        start = time.monotonic()
        for rank in alive:
            for to in alive:
                group[rank].run(check_alive, f"worker{to}")
        assert time.monotonic() - start < QUICK
        calls = 20 * len(alive)
        assert group[0].run(served) == before + calls, "a repeated message was served"
        assert group[0].run(open_files) < fds + 5 * len(replays) + 20


SEALED, REFUSED = (struct.pack("<HH", PROTOCOL_VERSION, kind) for kind in (10, 3))


def as_another(stream: bytes, number: int = 50_000) -> bytes:
    """UCX takes a stream for one that is there already by the number of the connection, which comes
    after a magic number and headers of 5 bytes each."""
    return stream[:18] + struct.pack("<Q", number) + stream[26:]


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
