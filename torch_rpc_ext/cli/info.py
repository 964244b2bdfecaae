"""``python -m torch_rpc_ext info``: which UCX and transports are used on this machine, and why."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import Any

from torch_rpc_ext.cli import common

__all__ = ["collect", "main"]

_EXAMPLE = """examples:
  python -m torch_rpc_ext info
  python -m torch_rpc_ext info --json > info.json
  python -m torch_rpc_ext info --interface eth1 --no-self-test
"""
_WIDTH = 98
_INDENT = " " * 22


def main(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: of the command.

    Returns:
        0, or 1 where UCX cannot be used or the self-test failed.
    """
    parser = common.parser(
        "info",
        "Show versions, the UCX in use, what it can use on this host and why, the "
        "network interface that would be chosen, and a self-test between two processes.",
        _EXAMPLE,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-self-test", action="store_true", help="skip the self-test")
    parser.add_argument(
        "--interface", metavar="NAME", help="as the option `interface`: a name or an IP address"
    )
    given = parser.parse_args(arguments)
    data = collect(interface=given.interface, self_test=not given.no_self_test)
    if given.json:
        print(json.dumps(data, indent=2))
    else:
        _show(data)
    return 1 if "error" in data["ucx"] or "error" in data["self_test"] else 0


def collect(*, interface: str | None, self_test: bool) -> dict[str, Any]:
    """Gather what the command shows.

    Args:
        interface: as the option `interface`.
        self_test: whether to run the self-test, which takes a few seconds.
    """
    from torch_rpc_ext._base import option_checks
    from torch_rpc_ext._group import interfaces
    from torch_rpc_ext._lifecycle.info import info
    from torch_rpc_ext.cli import probes, selftest

    data = info()
    try:
        wanted = option_checks.interface("--interface", interface)
        choice = interfaces.choose(wanted, option_checks.DEFAULT_INIT_METHOD)
        data["interface"] = choice.described()
    except ValueError as error:
        data["interface"] = {"error": str(error)}
    except ImportError:
        data["interface"] = {"error": "unknown, because UCX cannot be used"}
    data["findings"] = [vars(finding) for finding in probes.findings()]
    if not self_test:
        data["self_test"] = {"skipped": "--no-self-test"}
    elif "error" in data["ucx"]:
        data["self_test"] = {"skipped": "UCX cannot be used"}
    elif "error" in data["interface"]:
        data["self_test"] = {"skipped": "no such interface"}
    else:
        if sys.stderr.isatty():
            print("self-test between two processes ...", file=sys.stderr, flush=True)
        data["self_test"] = selftest.run(interface=interface)
    return data


def _show(data: dict[str, Any]) -> None:
    for name, version in data["versions"].items():
        _line(name, version)
    _show_ucx(data["ucx"])
    _line("network interface", data["interface"].get("error") or data["interface"]["reason"])
    for finding in data["findings"]:
        _line(finding["name"], f"{'yes' if finding['usable'] else 'no'}: {finding['why']}")
    _line("takeover", "on" if data["takeover"] else "off (TORCH_RPC_BACKEND=ucx turns it on)")
    for name, value in data["environment"].items():
        preset = " (set by torch_rpc_ext)" if name in data["ucx"].get("preset", {}) else ""
        _line(name, f"{value}{preset}")
    _show_self_test(data["self_test"])


def _show_ucx(ucx: dict[str, Any]) -> None:
    if "error" in ucx:
        _line("UCX", f"not usable: {ucx['error']}")
        return
    _line("UCX", f"{ucx['version']}, {ucx['source']}: {ucx['reason']}")
    _line("", ucx["path"])
    _line("transports of UCX", "and the devices that each can use here:")
    by_transport: dict[str, list[str]] = {}
    for entry in ucx["transports"]:
        by_transport.setdefault(entry["transport"], []).append(entry["device"])
    for transport, devices in by_transport.items():
        _line(f"  {transport}", ", ".join(devices))


def _show_self_test(result: dict[str, Any]) -> None:
    if "error" in result:
        _line("self-test", f"FAILED: {result['error']}")
    elif "skipped" in result:
        _line("self-test", f"skipped: {result['skipped']}")
    else:
        _line(
            "self-test",
            f"passed: latency {result['latency_us']:.0f} us (empty call), bandwidth "
            f"{result['bandwidth_gb_s']:.1f} GB/s (64 MB tensor there and back)",
        )
        _line("", f"control over {result['control']}, bulk over {result['bulk']}")
        if result["why"]:
            _line("", result["why"])


def _line(label: str, text: str) -> None:
    label = f"{label:<21} "
    if len(label) > len(_INDENT):
        print(label.rstrip())
        label = _INDENT
    print(
        textwrap.fill(
            text,
            _WIDTH,
            initial_indent=label,
            subsequent_indent=_INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
