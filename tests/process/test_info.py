"""`python -m torch_rpc_ext info`: says what the agent would use and why, without init_rpc."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.support import script
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("has no such command")
INFO = [sys.executable, "-m", "torch_rpc_ext", "info"]
# s, for `info` with its self-test, of which the two processes import torch after it: longer than
# the self-test may take.
PATIENCE = 350
with_self_test = pytest.mark.timeout(400)


def test_info_says_what_is_used() -> None:
    ended = script.run([*INFO, "--no-self-test"])
    assert ended.code == 0 and not ended.err, ended
    text = ended.out.lower()
    for word in ("ucx", "torch", "transport", "interface"):
        assert word in text, (word, ended.out)
    assert "1." in text and "lo" in text, ended.out


def test_info_as_json() -> None:
    ended = script.run([*INFO, "--json", "--no-self-test"])
    assert ended.code == 0, ended
    answer = json.loads(ended.out)
    assert isinstance(answer, dict)
    flat = json.dumps(answer).lower()
    assert "ucx" in flat and "transport" in flat and "interface" in flat, answer


@with_self_test
def test_info_measures_between_two_processes() -> None:
    ended = script.run(INFO, timeout=PATIENCE)
    assert ended.code == 0 and not ended.err, ended
    text = ended.out.lower()
    assert "latency" in text and "bandwidth" in text, ended.out


@with_self_test
@pytest.mark.parametrize(
    "broken", [{"UCX_TLS": "tcp"}, {"UCX_TLS": "none_such"}, {"UCX_NET_DEVICES": "none9"}], ids=str
)
def test_info_survives_a_broken_environment(broken: dict[str, str]) -> None:
    ended = script.run(INFO, broken, timeout=PATIENCE)
    assert "Traceback" not in ended.err and ended.code in (0, 1), ended


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_info_does_not_show_the_secret(flags: list[str]) -> None:
    secret = "a-secret-that-nobody-may-see"
    ended = script.run([*INFO, "--no-self-test", *flags], {"TORCH_RPC_EXT_SECRET": secret})
    assert ended.code == 0 and "TORCH_RPC_EXT_SECRET" in ended.out, ended
    assert secret not in ended.out + ended.err


@with_self_test
def test_info_in_the_smallest_environment() -> None:
    keep = {
        name: "" for name in os.environ if name.startswith(("UCX_", "TORCH_RPC_", "GLOO_", "TP_"))
    }
    ended = script.run(INFO, keep, timeout=PATIENCE)
    assert ended.code == 0, ended


def test_help_and_wrong_commands() -> None:
    helped = script.run([sys.executable, "-m", "torch_rpc_ext", "--help"])
    assert helped.code == 0 and "info" in helped.out and "run" in helped.out, helped
    wrong = script.run([sys.executable, "-m", "torch_rpc_ext", "inof"])
    assert wrong.code == 2 and "inof" in wrong.err and "Traceback" not in wrong.err, wrong
