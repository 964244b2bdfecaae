"""``python -m torch_rpc_ext top``: a live view of a group."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch_rpc_ext.cli import columns, common, guest

if TYPE_CHECKING:
    from torch_rpc_ext.cli.poller import Poller, WorkerState

__all__ = ["main", "show"]

_EXAMPLES = """examples:
  MASTER_ADDR=host0 MASTER_PORT=29500 python -m torch_rpc_ext top
      the dynamic group (world_size=None) whose store is at host0:29500; q ends it
  python -m torch_rpc_ext top --once --json --init-method tcp://host0:29500
      one look, for a script; without --once one line of JSON each interval

columns (a narrow terminal leaves some out):
"""
_HINT = "q: quit  s: sort  ?: help"
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
        "\n".join([_EXAMPLES + "\n".join(columns.meanings()), "", common.EXIT_STATUSES]),
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
        interval: time between two polls, s.
        poller: asks the workers; by default a Poller that asks all.
    """
    from rich.live import Live

    from torch_rpc_ext.cli import terminal, view
    from torch_rpc_ext.cli.poller import Poller

    poll = (poller or Poller()).poll
    # A thread of its own polls: a worker that does not answer must not delay the keys.
    with (
        ThreadPoolExecutor(1) as thread,
        terminal.keys() as key,
        Live("asking the workers ...", screen=True, auto_refresh=False) as screen,
    ):
        shown = _Shown(screen, view)
        try:
            _look_until_quit(lambda: thread.submit(poll), interval, key, shown)
        except KeyboardInterrupt:
            pass


class _Shown:
    """The content of the live view, and what the keys change in it.

    Args:
        screen: rich's Live.
        view: the module that draws, which needs rich.
    """

    def __init__(self, screen: Any, view: Any) -> None:
        self._screen, self._view = screen, view
        self._states: Sequence[WorkerState] = ()
        self._order = 0
        self._explains = False

    def look(self, states: Sequence[WorkerState]) -> None:
        """Show the workers as they are now."""
        self._states = states
        self._draw()

    def press(self, key: str) -> None:
        """Do what a key other than q asks for."""
        if self._explains:
            self._explains = False
        elif key == "?":
            self._explains = True
        elif key in ("s", "S"):
            self._order = (self._order + 1) % len(columns.ORDERS)
        self._draw()

    def _draw(self) -> None:
        view = self._view
        if self._explains:
            picture = view.explain()
        elif self._states:
            width, order = self._screen.console.width, columns.ORDERS[self._order]
            picture = view.draw(self._states, width, _HINT, order)
        else:
            return  # the first answers are still to come
        self._screen.update(picture, refresh=True)


def _look_until_quit(
    start: Callable[[], Any], interval: float, key: Callable[[float], str], shown: _Shown
) -> None:
    """Look again and again until q is pressed."""
    while True:
        began, look = time.monotonic(), start()
        answered = False
        while not answered or time.monotonic() - began < interval:
            pressed = key(_KEY_WAIT)
            if pressed in ("q", "Q"):
                return
            if pressed:
                shown.press(pressed)
            if not answered and look.done():
                answered = True
                shown.look(look.result())


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
