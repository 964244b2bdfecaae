"""``python -m torch_rpc_ext ping``: latency, bandwidth and path to the workers of a group."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch_rpc_ext._base import option_checks
from torch_rpc_ext._base.printable import printable
from torch_rpc_ext._calls import failures
from torch_rpc_ext.cli import common, guest

__all__ = ["Ping", "main", "ping"]

_EXAMPLES = """examples:
  MASTER_ADDR=host0 MASTER_PORT=29500 python -m torch_rpc_ext ping
      all workers of the dynamic group (world_size=None) whose store is at host0:29500
  python -m torch_rpc_ext ping worker1 worker2 --init-method tcp://host0:29500 --json
      two workers, for a script

"""


@dataclass(frozen=True)
class Ping:
    """What one worker answered.

    Attributes:
        worker: name of the worker.
        error: why the worker did not answer; None where it did. With an error, the other values
            are None.
        latency_p50_us: median round trip of an empty Python function, us.
        latency_p99_us: 99th percentile, us.
        bandwidth_gb_s: bandwidth of a large tensor sent to the worker, 1e9 bytes/s; a median.
        control: transport of small messages; None where the back end does not say.
        bulk: transport of large tensors; None likewise.
        why: why a faster transport is not used; '' where there is nothing to say.
    """

    worker: str
    error: str | None = None
    latency_p50_us: float | None = None
    latency_p99_us: float | None = None
    bandwidth_gb_s: float | None = None
    control: str | None = None
    bulk: str | None = None
    why: str = ""


def main(arguments: list[str]) -> int:
    """Join a group and ping its workers.

    Args:
        arguments: of the command.

    Returns:
        The exit status, see common.EXIT_STATUSES.
    """
    parser = common.parser(
        "ping",
        "Measure latency and bandwidth from here to workers of a dynamic group "
        "(world_size=None), and say which transports are used. While it runs, the group has "
        "one more member.",
        _EXAMPLES + common.EXIT_STATUSES,
    )
    common.add_workers(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--count", type=common.count, default=100, metavar="N", help="calls (default %(default)s)"
    )
    parser.add_argument(
        "--megabytes",
        type=common.positive,
        default=64.0,
        metavar="MB",
        help="size of the tensor, 1e6 bytes (default %(default)g)",
    )
    common.add_seconds(parser, "--timeout", 10.0, "of each call")
    guest.add_arguments(parser)
    given = parser.parse_args(arguments)
    with guest.joined(given):
        results = ping(
            given.workers or guest.other_workers(),
            calls=given.count,
            tensor_bytes=int(given.megabytes * 1e6),
            timeout=given.timeout,
        )
    if given.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _show(results)
    return common.OK if all(result.error is None for result in results) else common.UNWELL


def ping(
    workers: Iterable[str] | None = None,
    *,
    calls: int = 100,
    tensor_bytes: int = 64_000_000,
    timeout: float = 10.0,
) -> list[Ping]:
    """Measure from this worker to others, one after the other. Works on TENSORPIPE too.

    ::

        for result in ping(["worker1"]):  # each a Ping
            print(result.worker, result.latency_p50_us, result.bandwidth_gb_s)

    Args:
        workers: names; None for all others of the group.
        calls: empty calls for the latency.
        tensor_bytes: size of the tensor for the bandwidth, bytes.
        timeout: of each call, s.

    Returns:
        One Ping for each worker, in their order; for a worker that does not answer, with an error.

    Raises:
        ValueError: a worker is not in the group, and the text names the workers that are; or
            `calls` is less than 1, or `tensor_bytes` less than 0.
    """
    from torch_rpc_ext import monitoring

    option_checks.positive_int("calls", calls)
    option_checks.byte_count("tensor_bytes", tensor_bytes)
    members = monitoring.member_names()
    chosen = list(workers) if workers is not None else monitoring.other_names()
    unknown = [name for name in chosen if name not in members]
    if unknown:
        raise ValueError(
            f"{', '.join(map(repr, unknown))}: no such worker in this group; there are "
            f"{', '.join(members)}"
        )
    return [_ping(name, calls, tensor_bytes, timeout) for name in chosen]


def _ping(worker: str, calls: int, tensor_bytes: int, timeout: float) -> Ping:
    import numpy
    import torch
    from torch.distributed import rpc as _untyped_rpc

    from torch_rpc_ext import monitoring

    rpc: Any = _untyped_rpc  # upstream's functions have no types

    def seconds(function: Any, *arguments: Any) -> float:
        begin = time.perf_counter()
        rpc.rpc_sync(worker, function, args=arguments, timeout=timeout)
        return time.perf_counter() - begin

    tensor = torch.zeros(tensor_bytes, dtype=torch.uint8)
    try:
        seconds(monitoring._nothing)  # opens the connection
        latencies = [seconds(monitoring._nothing) for _ in range(calls)]
        seconds(monitoring._take, tensor)  # makes the receive buffer
        transfer = numpy.median([seconds(monitoring._take, tensor) for _ in range(5)])
    except Exception as problem:  # noqa: BLE001  a worker of another release, say, lacks _take()
        return Ping(worker, error=failures.brief(problem))
    p50, p99 = numpy.percentile(latencies, [50, 99]) * 1e6
    paths = {peer["worker"]: peer for peer in monitoring.snapshot()["peers"]}
    path = paths.get(worker, {})
    return Ping(
        worker,
        latency_p50_us=round(float(p50), 1),
        latency_p99_us=round(float(p99), 1),
        bandwidth_gb_s=round(tensor_bytes / float(transfer) / 1e9, 3),
        control=path.get("control"),
        bulk=path.get("bulk"),
        why=path.get("why", ""),
    )


def _show(results: Sequence[Ping]) -> None:
    width = max([len(result.worker) for result in results], default=0)
    for result in results:
        label = f"{result.worker:<{width}}"
        if result.error is not None:
            print(printable(f"{label}  no answer: {result.error}"), file=sys.stderr)
            continue
        line = (
            f"{label}  p50 {result.latency_p50_us:.0f} us  p99 {result.latency_p99_us:.0f} us  "
            f"{result.bandwidth_gb_s:.2f} GB/s  control over {result.control}, bulk over "
            f"{result.bulk}" + (f" ({result.why})" if result.why else "")
        )
        print(printable(line))
