"""Parts of the UCX transport, without an agent, and most of them without a peer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.sanitize.programs import compiler
from tests.support import core, cxx

HERE = Path(__file__).parent
BUILD = cxx.ROOT / "build" / "unit_transport"
#: Of what needs no UCX: what else the program is built from.
ALONE = {
    "handshake_session": (
        "base/error.cpp",
        "crypto/crypto.cpp",
        "transport/ucx/handshake.cpp",
        "transport/ucx/handshake_session.cpp",
        "transport/ucx/protocol.cpp",
        "transport/ucx/secure_channel.cpp",
    )
}
#: Built with the core library.
WITH_UCX = {
    "exchange": (),
    "failing_sends": (),
    "pulled": (),
    "worker": (),
    "abandoned_slots": (),
    "ucx_channel": (),
    "goodbye": ("agent/executor.cpp",),
    "told_again": ("agent/executor.cpp",),
    "many_connections": ("agent/executor.cpp",),
    "out_of_memory": ("agent/executor.cpp",),
}


def run(program: Path, environment: dict[str, str] | None = None) -> None:
    ended = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(cxx.TIMEOUT)
@pytest.mark.parametrize("name", ALONE)
def test_a_part_without_ucx(name: str) -> None:
    sources = [HERE / f"{name}.cpp", *(cxx.CSRC / source for source in ALONE[name])]
    built = cxx.build(
        BUILD / "alone",
        {name: sources},
        compiler=compiler(),
        flags=("-O1", "-pthread"),
        libraries=("-lcrypto",),
    )
    run(built[name])


@pytest.mark.timeout(cxx.TIMEOUT)
@pytest.mark.parametrize("name", WITH_UCX)
def test_a_part_with_ucx(name: str) -> None:
    """worker: peers that send as fast as it receives; deadlines. abandoned_slots: a queue that was
    unmapped. exchange, pulled: how bulk is offered, taken, acknowledged and returned.
    failing_sends: what fails before anything is sent. ucx_channel: chunks that come before they are
    expected, or too late. goodbye: a worker that leaves while another connects to it is heard to
    leave. told_again: the word that a connection broke at one end is lost. many_connections: those
    that have opened do not count as opening. out_of_memory: an allocation fails where others would
    wait for ever for what follows."""
    built, environment = core.build(
        BUILD,
        {
            name: [HERE / f"{name}.cpp", *(cxx.CSRC / source for source in sources)]
            for name, sources in WITH_UCX.items()
        },
    )
    run(built[name], environment)
