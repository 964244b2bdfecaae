"""Counters of the agent as Prometheus metrics: names, labels, and the HTTP endpoint."""

from __future__ import annotations

import socket
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


def parse(text: str) -> dict[tuple[str, str], float]:
    """(name, peer or '') -> value; fails where a sample does not name worker0."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["worker"] == "worker0", sample
            values[sample.name, sample.labels.get("peer", "")] = sample.value
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
    # Seconds, not microseconds.
    assert 0 < values["torch_rpc_call_latency_average_seconds", ""] < 5
    assert values["torch_rpc_path", "worker1"] == 1


@needs_ucx("has other counters")
@workers(1)
def test_no_counter_is_forgotten() -> None:
    from torch_rpc_ext import metrics

    rpc.enable_gil_profiling(True)
    counted = set(rpc.api._get_current_rpc_agent().get_metrics())
    rpc.enable_gil_profiling(False)
    assert counted == {source.key for source in metrics.SOURCES}


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
    metrics.serve(server.port).close()  # free again


@workers(1)
def test_wrong_places_are_named() -> None:
    from torch_rpc_ext import metrics

    with pytest.raises(ValueError, match="70000"):
        metrics.serve(70_000)
    with pytest.raises(OSError, match="192.0.2.1"):
        metrics.serve(address="192.0.2.1")


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
