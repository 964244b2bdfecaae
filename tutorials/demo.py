"""The main job of torch.distributed.rpc on real data, on TENSORPIPE and on UCX; `make demo`.

digits_job.py is the program: a parameter server and two trainers. Here both back ends run it in
processes of their own, from the same seeds, and take turns, epoch by epoch, so that a busy machine
treats both alike. Exits with 0 only if both reach the accuracy that the data allows, on the back
end that was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from digits_job import SERVER, WORKERS, Leader, digits, work
from tqdm import tqdm  # type: ignore[import-untyped]

BACKENDS = ("TENSORPIPE", "UCX")
LEAST_ACCURACY = 0.9  # a linear model reaches more: below it, gradients were lost or wrong
ECHO_ROUNDS = 5
PATIENCE = 100.0  # s to wait for a worker before calling it lost


class DemoFailed(Exception):
    """What makes the demo exit with 1; the text says why."""


class Group:
    """The three processes of one back end.

    Args:
        backend: its name.
        folder: for the rendezvous.
    """

    def __init__(self, backend: str, folder: str) -> None:
        self.backend = backend
        context = multiprocessing.get_context("forkserver")
        # So that a child starts in milliseconds and not by importing torch anew.
        context.set_forkserver_preload(["torch.distributed.rpc", "sklearn.datasets"])
        self.pipe, theirs = context.Pipe()
        init_method = f"file://{os.path.join(folder, backend)}"
        self.processes = [
            context.Process(target=work, args=(backend, rank, init_method, theirs), daemon=True)
            for rank in range(len(WORKERS))
        ]
        for process in self.processes:
            process.start()
        theirs.close()

    def ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Run a method of Leader there; returns what it returns."""
        self.pipe.send((method.__name__, arguments))
        end = time.monotonic() + PATIENCE
        while not self.pipe.poll(0.2):
            ended = {
                name: process.exitcode
                for name, process in zip(WORKERS, self.processes, strict=True)
                if process.exitcode is not None
            }
            if ended or time.monotonic() > end:
                what = f"exit codes {ended}" if ended else f"no answer in {PATIENCE:.0f} s"
                raise DemoFailed(f"{self.backend}: {method.__name__} did not end: {what}")
        value, error = self.pipe.recv()
        if error:
            raise DemoFailed(f"{self.backend}: {method.__name__} failed:\n{error}")
        return value

    def end(self) -> None:
        """Shut down, all three; each must leave by itself, with exit code 0."""
        self.pipe.send(None)
        for process in self.processes:
            process.join(20)
        codes = {n: p.exitcode for n, p in zip(WORKERS, self.processes, strict=True)}
        if any(codes.values()) or None in codes.values():
            raise DemoFailed(f"{self.backend}: exit codes after shutdown: {codes}")

    def kill(self) -> None:
        """End what is left of it; nothing after a good end()."""
        for process in self.processes:
            process.kill()


@contextlib.contextmanager
def groups() -> Iterator[dict[str, Group]]:
    """Both back ends' processes, alive side by side; gone afterwards, whatever happened."""
    started: dict[str, Group] = {}
    with tempfile.TemporaryDirectory(prefix="rpc_demo_") as folder:
        try:
            for backend in BACKENDS:
                started[backend] = Group(backend, folder)
            yield started
            for group in started.values():
                group.end()
        finally:
            for group in started.values():
                group.kill()


def check(backend: str, report: dict[str, Any], accuracy: float) -> None:
    """Raise unless every worker runs on the back end that was asked for, and it learned."""
    wanted = {"TENSORPIPE": "TensorPipeAgent", "UCX": "UcxAgent"}[backend]
    for name, said in report.items():
        if said["agent"] != wanted:
            raise DemoFailed(
                f"{name} of {backend} runs on {said['agent']}, not on {wanted}. "
                f"(TORCH_RPC_BACKEND is {os.environ.get('TORCH_RPC_BACKEND', 'not set')!s}; "
                "the demo compares both back ends and needs it unset.)"
            )
    if not accuracy >= LEAST_ACCURACY:
        raise DemoFailed(
            f"{backend} reached an accuracy of {accuracy:.3f} on held-out data, "
            f"less than {LEAST_ACCURACY}"
        )


def print_transports(report: dict[str, Any]) -> None:
    """Print the paths between the workers of the UCX group, and why they were chosen."""
    print("\nTransports in use by UCX, from torch_rpc_ext.info():")
    print(f"  {'pair':<20}  {'small messages':<16}  {'bulk tensors':<24}  why")
    seen: set[frozenset[str]] = set()
    for name, said in report.items():
        for peer in said["peers"]:
            pair = frozenset((name, peer["worker"]))
            if pair in seen or len(pair) == 1:  # a worker that calls itself
                continue
            seen.add(pair)
            why = peer["why"] or "same host; the fastest ways both work"
            label = f"{name} - {peer['worker']}"
            print(f"  {label:<20}  {peer['control']:<16}  {peer['bulk']:<24}  {why}")
    if not seen:
        raise DemoFailed("UCX does not say which transports it uses")
    print(f"  network interface, for workers elsewhere: {report[SERVER]['interface']}")
    print("  (TENSORPIPE does not tell what it uses.)")


def count(report: dict[str, Any], key: str) -> float | None:
    """Return the sum of a metric over the workers; None where the back end does not count it."""
    values = [said["metrics"].get(key) for said in report.values()]
    return None if None in values else sum(float(value) for value in values)


def print_table(rows: list[tuple[str, list[float | None], str, bool]]) -> None:
    """Print rows of (what, a value for each back end, format, whether a ratio says anything)."""
    print(f"\n{'':<34}{BACKENDS[0]:>12}{BACKENDS[1]:>12}{'UCX is':>16}")
    for what, values, form, comparable in rows:
        cells = "".join(f"{'-' if v is None else format(v, form):>12}" for v in values)
        ratio = ""
        if comparable and values[0] and values[1]:
            gain = values[0] / values[1]
            ratio = f"{gain:.1f}x faster" if gain >= 1 else f"{1 / gain:.1f}x slower"
            ratio = ratio if abs(gain - 1) >= 0.05 else "as fast"
        print(f"{what:<34}{cells}{ratio:>16}".rstrip())


def run(epochs: int, megabytes: int) -> None:
    """Run the demo and print what it found."""
    training, held_out = digits(held_out=False), digits(held_out=True)
    print(
        f"scikit-learn's digits: {len(training[1])} images to learn from, {len(held_out[1])} held "
        f"out.\nA parameter server and two trainers, {epochs} epochs, as three processes for each "
        "back end."
    )
    trained: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    echoed: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    reports: dict[str, dict[str, Any]] = {}
    accuracy: dict[str, float] = {}
    total = len(BACKENDS) * (epochs + ECHO_ROUNDS + 1)
    with groups() as both, tqdm(total=total, disable=not sys.stdout.isatty(), leave=False) as bar:
        for epoch in range(epochs):
            for backend, group in both.items():
                bar.set_description(f"{backend} trains")
                trained[backend].append(group.ask(Leader.train, epoch))
                bar.update()
        for backend, group in both.items():
            accuracy[backend] = group.ask(Leader.accuracy)
            reports[backend] = group.ask(Leader.report)  # before the echo, so that it is not in it
            check(backend, reports[backend], accuracy[backend])
        for turn in range(ECHO_ROUNDS + 1):
            for backend, group in both.items():
                bar.set_description(f"{backend} echoes {megabytes} MB")
                seconds = group.ask(Leader.echo, megabytes, turn == 0)
                if turn > 0:  # the first one allocates: neither back end's usual speed
                    echoed[backend].append(seconds)
                bar.update()
    print_transports(reports["UCX"])

    def metric(key: str, scale: float = 1) -> list[float | None]:
        values = [count(reports[backend], key) for backend in BACKENDS]
        return [None if value is None else value / scale for value in values]

    print_table(
        [
            ("accuracy on held-out images", [accuracy[b] for b in BACKENDS], ".3f", False),
            ("training, s", [sum(trained[b]) for b in BACKENDS], ".2f", True),
            ("  calls, all workers", metric("agent.calls_sent"), ",.0f", False),
            ("  sent, all workers, MB", metric("agent.bytes_sent", 1e6), ",.1f", False),
            ("  calls failed or timed out", failures(reports), ",.0f", False),
            (
                f"echo of {megabytes} MB, ms (median of {ECHO_ROUNDS})",
                [statistics.median(echoed[b]) * 1e3 for b in BACKENDS],
                ",.0f",
                True,
            ),
        ]
    )
    print("-: TENSORPIPE does not count it.")


def failures(reports: dict[str, dict[str, Any]]) -> list[float | None]:
    """Return the calls that failed or timed out, for each back end."""
    found: list[float | None] = []
    for backend in BACKENDS:
        failed = count(reports[backend], "agent.calls_failed")
        late = count(reports[backend], "agent.calls_timed_out")
        found.append(None if failed is None or late is None else failed + late)
    return found


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--echo-mb", type=int, default=400, help="default: %(default)s")
    given = parser.parse_args()
    if given.epochs < 1 or given.echo_mb < 1:
        parser.error("--epochs and --echo-mb must be 1 or more")
    # Six processes on a small machine: one compute thread each, as torchrun sets it.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    start = time.perf_counter()
    try:
        run(given.epochs, given.echo_mb)
    except DemoFailed as failure:
        print(f"\nThe demo FAILED: {failure}", file=sys.stderr)
        return 1
    print(f"Done in {time.perf_counter() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
