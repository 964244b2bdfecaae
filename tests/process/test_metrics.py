"""Counters of the agent as Prometheus metrics: names, labels, and the HTTP endpoint."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group, workers
from tests.support import script
from tests.support.backend import needs_ucx


def parse(text: str, worker: str = "worker0") -> dict[tuple[str, str], float]:
    """Parse samples: (name, peer, or bound of a bucket, or '') -> value. Fails if a sample names
    another worker."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["worker"] == worker, sample
            label = sample.labels.get("peer", sample.labels.get("le", ""))
            values[sample.name, label] = sample.value
    return values


@workers(2)
def test_upstreams_counters_are_there_on_every_back_end() -> None:
    from torch_rpc_ext import metrics

    values = parse(metrics.text())
    assert values["torch_rpc_request_threads", ""] >= 1
    assert values["torch_rpc_members", ""] == 2


@needs_ucx("counts no calls and no bytes")
@workers(2)
def test_counters_follow_the_calls() -> None:
    from torch_rpc_ext import metrics

    before = parse(metrics.text())
    for _ in range(5):
        rpc.rpc_sync("worker1", f.identity, args=(torch.ones(250_000),))
    with pytest.raises(ValueError):
        rpc.rpc_sync("worker1", f.raise_value_error)
    values = parse(metrics.text())

    def grown(name: str) -> float:
        return values[name, ""] - before[name, ""]

    assert grown("torch_rpc_calls_sent_total") == 6
    assert 5e6 < grown("torch_rpc_sent_bytes_total") < 6e6
    # In seconds, not microseconds.
    assert 0 < values["torch_rpc_call_latency_average_seconds", ""] < 5
    assert values["torch_rpc_path", "worker1"] == 1


class Histogram:
    """How much the buckets of a histogram of worker1 have grown between two readings."""

    def __init__(self, before: str, after: str, name: str) -> None:
        old, new = parse(before, "worker1"), parse(after, "worker1")
        grown = {key: value - old[key] for key, value in new.items() if key in old}
        self.count = grown[f"torch_rpc_{name}_count", ""]
        self.sum = grown[f"torch_rpc_{name}_sum", ""]
        self.buckets = {
            float(bound): value
            for (metric, bound), value in grown.items()
            if metric == f"torch_rpc_{name}_bucket"
        }
        # Prometheus wants cumulative buckets.
        ordered = [self.buckets[bound] for bound in sorted(self.buckets)]
        assert ordered == sorted(ordered) and ordered[-1] == self.count, self.buckets

    def above(self, value: float) -> float:
        """How many samples came to buckets that lie entirely above the value."""
        return self.count - min(count for bound, count in self.buckets.items() if bound >= value)


def text_there() -> str:
    from torch_rpc_ext import metrics

    return metrics.text()


PAUSE = 0.4
PAUSES: list[tuple[float, Any]] = []  # when the call was made, and its future


def begin_pauses() -> None:
    for _ in range(3):
        made = time.monotonic()
        PAUSES.append((made, rpc.rpc_async("worker1", sleep_when_told, args=(PAUSE,))))


def end_pauses() -> float:
    """Return the sum of the seconds that the three pauses and one more call took, as their caller
    saw them."""
    took = 0.0
    for made, future in PAUSES:
        future.wait()
        took += time.monotonic() - made
    made = time.monotonic()
    rpc.rpc_sync("worker1", f.identity, args=(torch.ones(250_000),))
    return took + time.monotonic() - made


TOLD = threading.Event()


def sleep_when_told(seconds: float) -> None:
    assert TOLD.wait(30)
    time.sleep(seconds)


def tell_when_queued(requests: int) -> None:
    """Signal when so many requests are queued: from then on they wait, however slowly the caller
    made its calls."""
    deadline = time.monotonic() + 30
    while int(rpc.api._get_current_rpc_agent().get_metrics()["agent.queued_requests"]) < requests:
        assert time.monotonic() < deadline, "the requests do not arrive"
    TOLD.set()


@needs_ucx("keeps no histograms")
def test_histograms_tell_queue_from_execution() -> None:
    with Group(2, options={"num_worker_threads": 1}) as group:
        before = group[1].run(text_there)
        group[0].run(begin_pauses)
        group[1].run(tell_when_queued, 2)
        took = group[0].run(end_pauses)
        after = group[1].run(text_there)
    queue, execution = (Histogram(before, after, f"{n}_seconds") for n in ("queue", "execution"))
    # More than these come to be above on a busy machine.
    assert execution.count == 4 and execution.above(PAUSE / 2) >= 3, execution.buckets
    assert 3 * PAUSE <= execution.sum < 100 * PAUSE
    # One of the three calls found the only thread free.
    assert queue.count == 4 and queue.above(PAUSE / 2) >= 2, queue.buckets
    assert 3 * PAUSE * 0.9 <= queue.sum < 100 * PAUSE
    # No second of a call counts as both.
    assert queue.sum + execution.sum <= took, (queue.sum, execution.sum, took)
    sizes = Histogram(before, after, "message_bytes")
    assert sizes.above(500_000) == 1 and 1e6 < sizes.sum < 1.1e6, sizes.buckets


@needs_ucx("keeps no histograms")
@workers(2)
def test_histograms_of_latency_and_of_waits_for_the_gil() -> None:
    before = rpc.rpc_sync("worker1", text_there)
    assert rpc.rpc_sync("worker1", f.nested, args=(4, 2)) == 4  # worker1 makes two of these calls
    with_gil = rpc.rpc_sync("worker1", profile_gil, args=(True,))
    rpc.rpc_sync("worker1", f.identity, args=(1,))
    after = rpc.rpc_sync("worker1", profile_gil, args=(False,))
    latency = Histogram(before, after, "call_latency_seconds")
    assert latency.count == 2 and 0 < latency.sum < 10, latency.buckets
    assert Histogram(before, with_gil, "gil_wait_seconds").count == 0
    assert Histogram(before, after, "gil_wait_seconds").count > 0


def profile_gil(on: bool) -> str:
    rpc.enable_gil_profiling(on)
    return text_there()


@needs_ucx("has other counters")
@workers(1)
def test_no_counter_is_forgotten() -> None:
    from torch_rpc_ext import metrics

    rpc.enable_gil_profiling(True)
    counted = set(rpc.api._get_current_rpc_agent().get_metrics())
    rpc.enable_gil_profiling(False)
    assert counted == {source.key for source in metrics.SOURCES}
    kept = set(rpc.api._get_current_rpc_agent().get_histograms())
    assert kept == {source.key for source in metrics.HISTOGRAMS}


@needs_ucx("does not say whom it has lost")
def test_a_lost_worker_shows() -> None:
    with Group(2) as group:
        group.run(f.nested, 2, 2)
        group[1].kill()
        assert group.run(lost_after_a_call) == {("torch_rpc_lost_peer", "worker1"): 1.0}
        group.close(gently=False)


def lost_after_a_call() -> dict[Any, float]:
    from torch_rpc_ext import metrics

    with pytest.raises(RuntimeError):
        rpc.rpc_sync("worker1", f.nothing, timeout=20)
    return {key: v for key, v in parse(metrics.text()).items() if key[0] == "torch_rpc_lost_peer"}


@workers(1)
def test_the_endpoint_serves_this_host_only_and_ends() -> None:
    from torch_rpc_ext import metrics

    with metrics.serve() as server:
        assert server.address == "127.0.0.1"
        with urllib.request.urlopen(server.url, timeout=20) as answer:
            assert parse(answer.read().decode())["torch_rpc_members", ""] == 1
        with pytest.raises(OSError, match=f"127.0.0.1:{server.port}: .*in use.*another port"):
            metrics.serve(server.port)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=5):
        pass
    metrics.serve(server.port).close()  # the port is free again


@workers(1)
def test_wrong_places_are_named() -> None:
    from torch_rpc_ext import metrics

    with pytest.raises(ValueError, match="70000"):
        metrics.serve(70_000)
    for port in ("9400", 9400.5, True, None):
        with pytest.raises(TypeError, match=f"an int from 0 to 65535.*, got {port!r}$"):
            metrics.serve(port)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="192.0.2.1"):
        metrics.serve(address="192.0.2.1")


@workers(1)
def test_a_group_that_ends_during_a_scrape() -> None:
    from torch_rpc_ext import metrics, monitoring

    snapshot = monitoring.snapshot

    def snapshot_after_shutdown() -> dict[str, Any]:
        rpc.shutdown()
        return snapshot()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitoring, "snapshot", snapshot_after_shutdown)
        assert metrics.text() == ""


def test_without_a_group_there_is_nothing() -> None:
    ended = script.python("from torch_rpc_ext import metrics; print(repr(metrics.text()))")
    assert ended.out.strip() == "''", ended


def test_the_missing_package_is_named() -> None:
    ended = script.python(
        """
        import sys
        sys.modules["prometheus_client"] = None
        import torch_rpc_ext.metrics
        """
    )
    assert "pip install 'torch-rpc-ext[metrics]'" in ended.err, ended


FORK = """
    import os, urllib.request
    from torch_rpc_ext import metrics

    with metrics.serve() as server:
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            with urllib.request.urlopen(server.url, timeout=30) as answer:
                assert answer.status == 200
    if not child:
        server.close()
        os._exit(0)
"""


def test_a_forked_child_leaves_the_block_and_the_parent_serves_on() -> None:
    ended = script.python(FORK, timeout=100)
    assert ended.code == 0, ended


HOLD = """
    import os, socket
    from torch_rpc_ext import metrics

    server = metrics.serve()
    there, go_on = os.pipe(), os.pipe()
    if not os.fork():
        os.write(there[1], b".")
        os.close(go_on[1])
        os.read(go_on[0], 1)  # until the parent has ended
        os._exit(0)
    os.read(there[0], 1)
    server.close()
    socket.create_server((server.address, server.port)).close()
"""


def test_a_forked_child_does_not_hold_the_port() -> None:
    ended = script.python(HOLD, timeout=100)
    assert ended.code == 0, ended


ABANDON = """
    import os, socket
    from torch_rpc_ext import metrics

    there, go_on = os.pipe(), os.pipe()
    serving = os.fork()
    if not serving:
        port = metrics.serve().port  # nobody keeps the Server
        if not os.fork():
            os.write(there[1], str(port).encode())
            os.close(go_on[1])
            os.read(go_on[0], 1)  # until the first process has ended
        os._exit(0)
    port = int(os.read(there[0], 9))
    os.waitpid(serving, 0)
    socket.create_server(("127.0.0.1", port)).close()
"""


def test_a_forked_child_does_not_hold_the_port_of_a_server_that_nobody_keeps() -> None:
    ended = script.python(ABANDON, timeout=100)
    assert ended.code == 0, ended


def test_a_closed_server_is_forgotten() -> None:
    code = "from torch_rpc_ext import metrics; metrics.serve().close(); print(metrics._servers)"
    ended = script.python(code, timeout=100)
    assert ended.out.strip() == "set()", ended
