"""A store that does not answer: init_rpc ends in time, hears Ctrl-C, and says which store it is."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from tests.process.deaths import wait_for_file, wait_until_stopped
from tests.process.group import Group
from tests.support import script
from tests.support.backend import needs_ucx
from tests.support.ports import free_port
from torch_rpc_ext._group.rendezvous import PREFIX, Rendezvous

pytestmark = needs_ucx("waits for ever, deaf to signals")
SOON = 60.0  # s, which a wait without an end is longer than


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """The listener of a program that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON)
        yield listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def wait_until_served(port: int) -> None:
    end = time.monotonic() + SOON
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < end, "rank 0 serves no store"
            time.sleep(0.02)


def wait_until_it_waits(group: Group, rank: int) -> None:
    """Wait until the worker has told the store that it is there, and so waits for the others."""
    port = int(group.init_method.rpartition(":")[2])
    wait_until_served(port)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SOON), False)
    end = time.monotonic() + SOON
    while not store.check([f"{PREFIX}/rank/{rank}"]):
        assert time.monotonic() < end, f"worker{rank} has not come"
        time.sleep(0.02)


def stop_store(group: Group) -> None:
    """Stop worker0, which serves the store."""
    group[0].signal(signal.SIGSTOP)
    wait_until_stopped(group[0].child.pid)


def look_only_after(go: Path) -> None:
    """Let this worker, once it is in the store, look into the store only when a file is there."""
    kind: Any = Rendezvous
    wait_for_group = kind._wait_for_group

    def later(meeting: Rendezvous) -> None:
        wait_for_file(go, SOON)
        wait_for_group(meeting)

    kind._wait_for_group = later


def group_at_a_port(size: int) -> Group:
    return Group(size, init=False, init_method=f"tcp://127.0.0.1:{free_port()}")


def test_a_port_that_no_store_has(silent: socket.socket) -> None:
    port = port_of(silent)
    with Group(2, init=False, init_method=f"tcp://127.0.0.1:{port}") as group:
        call = group[1].init(2, init_timeout=2)
        with pytest.raises(RuntimeError, match=f"127.0.0.1:{port} takes connections, but"):
            call.result(SOON)


def test_ctrl_c_at_a_port_that_no_store_has(silent: socket.socket) -> None:
    with Group(2, init=False, init_method=f"tcp://127.0.0.1:{port_of(silent)}") as group:
        call = group[1].init(2, init_timeout=600)
        silent.accept()[0].close()  # it looks whether anybody is there
        with silent.accept()[0]:
            time.sleep(0.2)  # most likely, it waits for the answer by then
            group[1].signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                call.result(SOON)


def test_rank_0_is_stopped_before_another_comes() -> None:
    with group_at_a_port(2) as group:
        group[0].init(2, init_timeout=600)
        wait_until_it_waits(group, 0)
        stop_store(group)
        with pytest.raises(RuntimeError, match="does not answer as a store .nothing comes back"):
            group[1].init(2, init_timeout=2).result(SOON)
        group.close(gently=False)


@pytest.mark.parametrize("ends", ["at the time-out", "by Ctrl-C"])
def test_rank_0_is_stopped_while_another_waits(ends: str, tmp_path: Path) -> None:
    by_hand = ends == "by Ctrl-C"
    go = tmp_path / "go"
    with group_at_a_port(3) as group:
        group[0].init(3, init_timeout=600)
        wait_until_it_waits(group, 0)
        group[1].run(look_only_after, go)
        waiting = group[1].init(3, init_timeout=600 if by_hand else 5)
        wait_until_it_waits(group, 1)
        stop_store(group)
        go.touch()
        if by_hand:
            time.sleep(0.5)
            group[1].signal(signal.SIGINT)
        error = KeyboardInterrupt if by_hand else RuntimeError
        with pytest.raises(error) as raised:
            waiting.result(SOON)
        assert by_hand or "does not answer: the process that serves it" in str(raised.value)
        group.close(gently=False)


def test_rank_0_dies_while_another_waits() -> None:
    with group_at_a_port(3) as group:
        group[0].init(3, init_timeout=600)
        wait_until_it_waits(group, 0)
        waiting = group[1].init(3, init_timeout=600)
        wait_until_it_waits(group, 1)
        group[0].kill()
        with pytest.raises(RuntimeError, match=r"The store at tcp://.* has ended"):
            waiting.result(SOON)
        group.close(gently=False)


def test_rank_0_finds_its_port_at_one_that_closes_all_connections() -> None:
    """What looks who has the port may not abort the process at its end."""
    ended = script.python(
        """
        import socket, threading
        from torch.distributed import rpc

        def close_all():
            while True:
                listener.accept()[0].close()

        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=close_all, daemon=True).start()
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        options = {"init_method": url}
        import torch_rpc_ext
        rpc.init_rpc("a", backend=rpc.BackendType.UCX, rank=0, world_size=2,
                     rpc_backend_options=torch_rpc_ext.UcxRpcBackendOptions(**options))
        """
    )
    assert ended.code == 1 and "Address already in use" in ended.err, ended
    assert "terminate called" not in ended.err, ended
