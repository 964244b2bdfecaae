"""Runs a suite of upstream's in forked children: torch's own test classes and return-code rules,
our process start.

Upstream spawns (seconds of import per child), polls, and lets a hung case run for 300 s. Here
children are forked from a server that has everything loaded, a case has a hard limit, and a failure
shows what every child wrote.
"""

from __future__ import annotations

import os
import time
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import distributed
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed import rpc_utils

from tests.support.child import Child, dump_stacks, wait_for_end
from tests.upstream.skips import SKIPS

SECONDS_PER_CASE = 90.0


class Forked:
    """Mixed in before rpc_utils.SpawnHelper: replaces how the processes start and how they are
    waited for.

    Owns: the children of one case.
    """

    #: Runs in the child before upstream's code, in place of the case's own environment set-up.
    prepare: Callable[[], None] | None = None

    # Of MultiProcessTestCase, which the generated classes derive from.
    processes: list[Child]
    pid_to_pipe: dict[int, Any]
    file_name: str
    rank: int

    def _spawn_processes(self) -> None:
        self._start_processes(self._child)  # type: ignore[attr-defined]

    def _child(
        self,
        target: Callable[..., None],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Child:
        return Child(
            _enter, (type(self), args), name=name.replace("process ", "worker"), kwargs=kwargs
        )

    def _join_processes(self, fn: Callable[..., None]) -> None:
        started = time.monotonic()
        try:
            in_time = wait_for_end(self.processes, SECONDS_PER_CASE, stop=_reported_an_error)
            if not in_time:
                dump_stacks(self.processes)
            for child in self.processes:
                child.terminate()
            if not in_time and not any(_reported_an_error(child) for child in self.processes):
                raise RuntimeError(f"Not done after {SECONDS_PER_CASE:.0f} s")
            self._check_return_codes(fn, time.monotonic() - started)  # type: ignore[attr-defined]
            self._check_signals()
        except unittest.SkipTest:
            raise
        except BaseException:
            print(*(child.output() for child in self.processes), sep="\n")
            raise
        finally:
            for pipe in self.pid_to_pipe.values():
                pipe.close()

    def _check_signals(self) -> None:
        """Upstream looks at rank 0 only; a crash of any other rank is a failure too."""
        killed = {
            child.name: child.exitcode for child in self.processes if (child.exitcode or 0) < 0
        }
        if killed:
            raise RuntimeError(f"Ended by a signal: {killed}")

    def tearDown(self) -> None:
        for child in getattr(self, "processes", []):
            child.close()
        self.processes = []
        if os.path.exists(self.file_name):
            os.unlink(self.file_name)
        super().tearDown()  # type: ignore[misc]


def _reported_an_error(child: Child) -> bool:
    return child.exitcode == MultiProcessTestCase.TEST_ERROR_EXIT_CODE


def _enter(case: Any, args: tuple[Any, ...], **kwargs: Any) -> None:
    if case.prepare is not None:
        case.prepare()
    with _process_groups_kept():
        case._run(*args, **kwargs)


@contextmanager
def _process_groups_kept() -> Iterator[None]:
    """Keep what destroy_process_group() lets go of.

    Else DistributedDataParallel may be the last that holds the group. It destroys it with the GIL,
    and waits for a thread of the group that wants the GIL (pytorch issue 56297): on a busy machine
    one run of fifteen of DdpComparisonTest hangs, whatever the RPC back end.
    """
    kept: list[Any] = []
    destroy = distributed.destroy_process_group

    def destroy_later(*args: Any, **kwargs: Any) -> None:
        if distributed.is_initialized():
            kept.append(distributed.group.WORLD)
        destroy(*args, **kwargs)

    distributed.destroy_process_group = destroy_later
    try:
        yield
    finally:
        distributed.destroy_process_group = destroy


def generate(
    module: str,
    mixin: type[Any],
    suites: list[type[Any]],
    *,
    prefix: str = "",
    unless: str | None = None,
) -> dict[str, type[Any]]:
    """Upstream's generate_tests with our mixin and our list of skips; ``unless`` is a reason to
    skip all of them."""
    classes = rpc_utils.generate_tests(prefix, mixin, suites, module)
    for suite in suites:
        name = f"{prefix}{suite.__name__}"
        cases: Any = classes[name]
        for entry, reason in SKIPS.items():
            owner, _, case = entry.partition(".")
            if owner == suite.__name__:
                setattr(cases, case, unittest.skip(reason)(getattr(cases, case)))
        if unless is not None:
            classes[name] = unittest.skip(unless)(cases)
    return dict(classes)
