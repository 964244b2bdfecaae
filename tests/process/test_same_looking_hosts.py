"""Two hosts that look like one: clones of a machine have the same boot id, and the first namespaces
of every kernel have the same inodes. Comparing these says that both are one host; only a proof
(csrc/transport/ucx/host_proof.h) tells them apart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import netns
from tests.support.backend import ROOT, on_ucx
from tests.support.script import running

pytestmark = pytest.mark.skipif(not on_ucx(), reason="upstream compares names of hosts")

WORKER = """
    import json, os, sys
    import torch
    from torch.distributed import rpc
    from torch_rpc_ext import UcxRpcBackendOptions

    rank, store, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    rpc.init_rpc(f"worker{rank}", backend=rpc.BackendType.UCX, rank=rank, world_size=2,
                 rpc_backend_options=UcxRpcBackendOptions(init_method=store, rpc_timeout=30,
                                                          **options))
    if rank == 0:
        for count in (0, 10, 10_000, 1_000_000, 5_000_000):
            sent = torch.arange(float(count))
            back = rpc.rpc_sync("worker1", torch.add, args=(sent, 1))
            assert torch.equal(back, sent + 1), count
        info = rpc.api._get_current_rpc_agent().get_debug_info()
        print(json.dumps({key: value for key, value in info.items() if ".peer." in key}))
        inodes = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "ipc")}
        assert inodes == {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}, inodes
    rpc.shutdown()
"""


@pytest.fixture(scope="module")
def disguise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("disguise") / "same_looking_host.so"
    source = ROOT / "tests" / "support" / "same_looking_host.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def run_pair(
    hosts: tuple[netns.Host, netns.Host], disguise: Path, store: str, **options: Any
) -> dict[str, str]:
    """Make calls between the hosts; return the paths that worker0 uses, by the names of its debug
    info."""
    with ExitStack() as stack:
        scripts = []
        for rank, host in enumerate(hosts):
            enter = ["nsenter", "-t", str(host.holder), "-n", "-i", "-u", "-m", "-p"]
            arguments = [str(rank), store, json.dumps(options)]
            command = [*enter, sys.executable, "-c", textwrap.dedent(WORKER), *arguments]
            env = {"LD_PRELOAD": str(disguise), "TP_SOCKET_IFNAME": "eth0"}
            scripts.append(stack.enter_context(running(command, env)))
        first = scripts[0].end(120)
        assert first.code == 0, first
        second = scripts[1].end(60)
        assert second.code == 0, second
    paths: dict[str, str] = json.loads(first.out)
    return paths


@pytest.mark.parametrize("encryption", ["off", "between_hosts"])
def test_calls_between_them(
    hosts: tuple[netns.Host, netns.Host], disguise: Path, tmp_path: Path, encryption: str
) -> None:
    """Calls use TCP, also for large tensors, and are encrypted if the option asks for encryption
    between hosts."""
    paths = run_pair(hosts, disguise, f"file://{tmp_path / 'store'}", encryption=encryption)
    control = paths["agent.peer.worker1.control"]
    assert "tcp" in control and "memory" not in control, paths
    assert paths["agent.peer.worker1.bulk"].startswith("lanes"), paths
    assert ("encrypted" in control) == (encryption != "off"), paths
