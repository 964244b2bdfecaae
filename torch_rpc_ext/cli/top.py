"""``python -m torch_rpc_ext top``: a live view of a group."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch_rpc_ext.cli import common, guest

if TYPE_CHECKING:
    from torch_rpc_ext.cli.poller import Poller, WorkerState

_EXAMPLES = """examples:
  MASTER_ADDR=host0 MASTER_PORT=29500 python -m torch_rpc_ext top
      the dynamic group (world_size=None) whose store is at host0:29500; q ends it
  python -m torch_rpc_ext top --once --json --init-method tcp://host0:29500
      one look, for a script; without --once one line of JSON each interval

calls/s and sent are of the worker's own calls and messages, served/s of those that it answers;
latency is the median of its calls since the last look, p99 their 99th percentile, wait that of
the time that requests waited for a thread (all three within a factor of 2); answer is the round
trip from here; queue are requests that wait for a thread now, run those that run, pend its own
calls that wait for an answer.

"""
_HINT = "q: quit"
_KEY_WAIT = 0.1  # s


def main(arguments: list[str]) -> int:
    """Join a group and watch it.

    Args:
        arguments: of the command.

    Returns:
        The exit status, see common.EXIT_STATUSES; of a live view always 0.
    """
    parser = common.parser(
        "top",
        "Watch a dynamic group (world_size=None): its workers, transports, calls and "
        "bytes per second, latencies, queues, and who is suspect or dead. While it runs, the "
        "group has one more member.",
        _EXAMPLES + common.EXIT_STATUSES,
    )
    parser.add_argument("--once", action="store_true", help="look for one interval, then end")
    parser.add_argument("--json", action="store_true", help="print JSON, one line for each look")
    common.add_seconds(parser, "--interval", 1.0, "between two looks")
    guest.add_arguments(parser)
    given = parser.parse_args(arguments)
    live = not given.json and not given.once
    if live and not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error("the live view needs a terminal; use --once or --json")
    if not given.json:
        import rich  # noqa: F401  before joining, if it is missing
    with guest.joined(given):
        from torch_rpc_ext.cli.poller import Poller

        asker = Poller(guest.other_workers)
        if live:
            show(interval=given.interval, poller=asker)
            return common.OK
        return _print_looks(asker, given)


def show(*, interval: float = 1.0, poller: Poller | None = None) -> None:
    """Show the group of this process in the terminal until q or Ctrl-C.

    Args:
        interval: between two looks, s.
        poller: who asks the workers; by default one that asks all.
    """
    from rich.live import Live

    from torch_rpc_ext.cli import terminal, view
    from torch_rpc_ext.cli.poller import Poller

    poll = (poller or Poller()).poll
    # Asked in a thread of its own: a worker that does not answer must not hold the keys up.
    with (
        ThreadPoolExecutor(1) as thread,
        terminal.keys() as key,
        Live("asking the workers ...", screen=True, auto_refresh=False) as screen,
    ):
        try:
            for states in _repeat(lambda: thread.submit(poll), interval, key):
                screen.update(view.draw(states, screen.console.width, _HINT), refresh=True)
        except KeyboardInterrupt:
            pass


def _repeat(
    start: Callable[[], Any], interval: float, key: Callable[[float], str]
) -> Iterator[list[WorkerState]]:
    """Yield the results until q is pressed."""
    while True:
        began, look = time.monotonic(), start()
        shown = False
        while not shown or time.monotonic() - began < interval:
            if key(_KEY_WAIT) in ("q", "Q"):
                return
            if not shown and look.done():
                shown = True
                yield look.result()


def _print_looks(asker: Poller, given: argparse.Namespace) -> int:
    from torch_rpc_ext.cli.poller import ALIVE

    states = asker.poll()  # the first has no rates
    try:
        while True:
            time.sleep(given.interval)
            states = asker.poll()
            _print(states, given)
            if given.once:
                break
    except KeyboardInterrupt:
        pass
    return common.OK if all(state.state == ALIVE for state in states) else common.UNWELL


def _print(states: Sequence[WorkerState], given: argparse.Namespace) -> None:
    if given.json:
        look = {"time": time.time(), "workers": [asdict(state) for state in states]}
        print(json.dumps(look), flush=True)
        return
    from rich.console import Console

    from torch_rpc_ext.cli import view

    console = Console()
    console.print(view.draw(states, console.width))
