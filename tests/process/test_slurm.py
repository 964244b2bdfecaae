"""The how-to's program and batch script on a real SLURM: two nodes on this host."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.support import script
from tests.support.backend import needs_ucx
from tests.support.pages import blocks, programs
from tests.support.ports import free_port

HOWTO = "docs/howto/torchrun_slurm.md"
# Debian's packages slurmctld, slurmd, slurm-client and munge have them.
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# Runs in namespaces of its own, so the names of the nodes are known here only, and what it starts
# ends with it. A cluster does not come up at once: 3 is the exit status where it never did.
CLUSTER = """
cd "$1"
export SLURM_CONF="$1/slurm.conf"
mount --bind hosts /etc/hosts
mungekey --create --keyfile munge.key
munged --force --socket="$1/munge.socket" --key-file="$1/munge.key" --log-file="$1/munged.log" \
    --pid-file="$1/munged.pid" --seed-file="$1/munged.seed" || exit 3
slurmctld && slurmd -N node1 && slurmd -N node2 || exit 3
for attempt in $(seq 60); do
    [ "$(sinfo --noheader --states=idle --format=%D)" = 2 ] && ready=1 && break
    sleep 1
done
[ "$ready" ] || exit 3
sbatch --wait --quiet --output=printed.txt job.sh
ended=$?
cat printed.txt
exit $ended
"""


@pytest.mark.rare
@needs_ucx("is not what the page is about")
def test_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"], "/usr/sbin"]))
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"SLURM cannot be started here: no {' '.join(missing) or 'root'}")
    [program] = [program for program in programs(HOWTO) if program.name == "slurm_train.py"]
    program.write(tmp_path)
    [batch] = [text for _, text in blocks(HOWTO) if "#SBATCH" in text]
    (tmp_path / "job.sh").write_text(batch)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.0.1 node1 node2\n")
    (tmp_path / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    first, second, controller = (free_port() for _ in range(3))
    (tmp_path / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=host, folder=tmp_path, first=first, second=second, controller=controller
        )
    )
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    ended = script.run([*namespaces, "sh", "-c", CLUSTER, "sh", str(tmp_path)], timeout=160)
    logs = "".join(log.read_text()[-2000:] for log in sorted(tmp_path.glob("*.log")))
    if ended.code == 3:
        pytest.skip(f"SLURM does not start here: {ended.err}\n{logs}")
    assert ended.code == 0 and ended.out == program.prints, f"{ended}\n{logs}"
