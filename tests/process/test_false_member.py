"""Messages that no agent sends, from a member of the group that is no agent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.process.group import Group
from tests.support import core, cxx
from tests.support.backend import needs_ucx

pytestmark = [
    needs_ucx("has no messages at the end of a group"),
    pytest.mark.timeout(cxx.TIMEOUT),
]

HERE = Path(__file__).parent
BUILD = cxx.ROOT / "build" / "false_member"
SOURCES = (
    HERE / "false_member.cpp",
    cxx.CSRC / "agent" / "executor.cpp",
    cxx.CSRC / "agent" / "hello.cpp",
)


def end_group(
    program: Path, environment: dict[str, str], member: str, what: str
) -> tuple[str, str]:
    """Be worker "m" of a static group whose other member is the program, and let the group end.

    Returns:
        The error, empty for none; and what happened to the other member.
    """
    from torch.distributed.rpc import api

    from torch_rpc_ext._native import loader

    native = loader.load()
    agent = native.UcxAgent(native.AgentOptions(), "m", 1, True)
    address = bytes(agent.address)
    members = [(member, 0, b"", 0), ("m", 1, address, 0)]
    agent.set_group(b"the group", members, b"the secret of the group")
    torch.distributed.autograd._init(1)
    api._init_rpc_states(agent)
    error = ""
    with subprocess.Popen(
        [program, member, what, address.hex()],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        try:
            agent.join(True, 2.0)
        except RuntimeError as raised:
            error = str(raised)
        other.stdin.close()
        heard = other.stdout.read()
    agent.shutdown()
    return error, heard


def outcome(member: str, what: str) -> tuple[str, str]:
    """What end_group() returns."""
    built, environment = core.build(BUILD, {"false_member": SOURCES})
    with Group(1, init=False) as group:
        ended = group.run(end_group, built["false_member"], environment, member, what)
        group.close(gently=False)
    return ended


def test_an_answer_that_is_too_short_is_no_sign_of_rest() -> None:
    """The leader of the group's end is the member whose name comes first."""
    error, _ = outcome("a", "short answer")
    assert 'the answer of worker "a" is too short' in error, error


@pytest.mark.parametrize("what", ["lost report", "lost offer"])
def test_a_message_that_does_not_arrive_is_not_served(what: str) -> None:
    """Its bytes would be zeros: a report without calls under way, or an offer that is cut off."""
    error, heard = outcome("z", what)
    assert "a worker of the group has not called shutdown()" in error, error
    assert heard == ""
