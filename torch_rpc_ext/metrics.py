"""The agent's counters and histograms as Prometheus metrics.

In a worker, after init_rpc::

    from torch_rpc_ext import metrics

    with metrics.serve(port=9400):  # http://127.0.0.1:9400/metrics
        train()

or, where the program has a registry of its own, ``registry.register(metrics.Collector())``. The
agent always counts; its counters are read when Prometheus asks. TENSORPIPE's agent counts less:
threads and active calls.

Source: https://prometheus.io/docs/practices/naming/ for names and units.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

try:
    import prometheus_client as prometheus
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector as PrometheusCollector
except ImportError as problem:
    raise ImportError(
        "torch_rpc_ext.metrics needs prometheus_client: pip install 'torch-rpc-ext[metrics]'"
    ) from problem

from torch_rpc_ext import monitoring

__all__ = ["Collector", "Server", "serve", "text"]

_PREFIX = "torch_rpc_"


@dataclass(frozen=True)
class _Source:
    """Where a metric comes from.

    Attributes:
        key: in the agent's get_metrics(); of a histogram in get_histograms().
        name: of the metric, without prefix and ``_total``.
        help: one line.
        is_counter: the value only grows. False for a gauge, and for a histogram.
        scale: factor from the agent's unit to the metric's.
    """

    key: str
    name: str
    help: str
    is_counter: bool = False
    scale: float = 1.0


def _counter(key: str, name: str, help: str) -> _Source:
    return _Source(key, name, help, is_counter=True)


SOURCES = (
    _Source("agent.thread_pool_size", "request_threads", "Threads that may run requests at once."),
    _Source("agent.num_idle_threads", "idle_request_threads", "Of these, those that run none."),
    _Source("agent.threads", "threads", "Threads that there are, those that wait included."),
    _Source("agent.client_active_calls", "client_active_calls", "Own calls without an answer."),
    _Source("agent.server_active_calls", "server_active_calls", "Requests that run here."),
    _Source(
        "agent.server_active_async_calls",
        "server_active_async_calls",
        "Requests whose function has returned a future that is not done.",
    ),
    _Source("agent.queued_requests", "queued_requests", "Requests that wait for a thread."),
    _counter("agent.busy_polls_found", "busy_polls_found", "Waits that ended while polling."),
    _counter("agent.busy_polls_missed", "busy_polls_missed", "Waits in which polling was in vain."),
    _Source(
        "agent.busy_polls_missed_us",
        "busy_polls_missed_seconds",
        "Time of polling in vain.",
        is_counter=True,
        scale=1e-6,
    ),
    _Source(
        "agent.queued_frame_bytes",
        "queued_frame_bytes",
        "Memory of requests that no thread serves yet, without their large tensors.",
    ),
    _Source(
        "agent.held_call_bytes",
        "held_call_bytes",
        "Memory of requests whose functions wait to begin: for the `limit` of an `async def`, for "
        "a batch, or until the owners of RRefs among the arguments have answered.",
    ),
    _Source(
        "agent.receive_held_bytes",
        "receive_held_bytes",
        "Tensors of requests that are received, or on their way, and that no thread serves yet.",
    ),
    _Source(
        "agent.receive_waiting_requests",
        "receive_waiting_requests",
        "Requests whose tensors wait with their callers until there is room.",
    ),
    _Source("agent.receive_waiting_bytes", "receive_waiting_bytes", "The bytes of these tensors."),
    _Source(
        "agent.send_waiting_messages",
        "send_waiting_messages",
        "Own messages that wait until memory that others were lent comes back.",
    ),
    _Source("agent.send_waiting_bytes", "send_waiting_bytes", "The bytes of their tensors."),
    _Source("agent.pending_calls", "pending_calls", "Own calls that wait for a response."),
    _Source("agent.peers", "connections", "Connections to other workers."),
    _counter("agent.calls_sent", "calls_sent", "Calls that this worker has made."),
    _counter("agent.calls_held_back", "calls_held_back", "Of these, those that waited for room."),
    _counter("agent.calls_served", "calls_served", "Requests of others that it has answered."),
    _counter(
        "agent.calls_not_begun",
        "calls_not_begun",
        "Requests of others that it has not begun: their callers had given up, or too many waited.",
    ),
    _counter("agent.calls_failed", "calls_failed", "Own calls that ended with an error."),
    _counter("agent.calls_timed_out", "calls_timed_out", "Of these, those by time-out."),
    _counter("agent.bytes_sent", "sent_bytes", "Bytes sent, of messages and tensors."),
    _counter("agent.bytes_received", "received_bytes", "Bytes received."),
    _Source(
        "agent.average_latency_us",
        "call_latency_average_seconds",
        "From sending to the completed future, mean of all successful calls since the start.",
        scale=1e-6,
    ),
    _counter("agent.receive_cache_hits", "receive_cache_hits", "Receive buffers used again."),
    _counter("agent.receive_cache_misses", "receive_cache_misses", "Receive buffers made."),
    _Source(
        "agent.receive_cache_idle_bytes",
        "receive_cache_idle_bytes",
        "Memory that is kept for tensors to come.",
    ),
    _Source(
        "agent.receive_cache_used_bytes",
        "receive_cache_used_bytes",
        "Receive memory that tensors use.",
    ),
    _counter("agent.cuda_ipc_sent_bytes", "cuda_ipc_sent_bytes", "CUDA tensors left for peers."),
    _counter("agent.cuda_ipc_received_bytes", "cuda_ipc_received_bytes", "CUDA tensors copied."),
    _Source(
        "agent.cuda_ipc_held_messages",
        "cuda_ipc_held_messages",
        "Messages whose CUDA tensors are held until the receiver has copied them.",
    ),
    _Source(
        "agent.cuda_ipc_open_allocations",
        "cuda_ipc_open_allocations",
        "Allocations of other workers' CUDA memory that are mapped here.",
    ),
    _Source(
        "agent.gil_average_wait_time_us",
        "gil_wait_average_seconds",
        "Mean wait for the GIL since the start; there with rpc.enable_gil_profiling(True).",
        scale=1e-6,
    ),
)

HISTOGRAMS = (
    _Source(
        "agent.latency",
        "call_latency_seconds",
        "Own calls that succeeded, from sending to the completed future.",
        scale=1e-9,
    ),
    _Source(
        "agent.queue",
        "queue_seconds",
        "Requests, from being here with their tensors until a thread takes them.",
        scale=1e-9,
    ),
    _Source(
        "agent.execution",
        "execution_seconds",
        "Requests, from when a thread takes them until their answer is made.",
        scale=1e-9,
    ),
    _Source(
        "agent.gil_wait",
        "gil_wait_seconds",
        "Waits for the GIL; counted with rpc.enable_gil_profiling(True) only.",
        scale=1e-9,
    ),
    _Source("agent.message_bytes", "message_bytes", "Requests and answers sent, with tensors."),
)


class Collector(PrometheusCollector):
    """Reads the counters of this process's agent when Prometheus asks; no metrics without an agent.

    ::

        prometheus_client.REGISTRY.register(metrics.Collector())

    Thread Safety: any number of threads may collect at once.
    """

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, each with the label ``worker``."""
        try:
            state = monitoring.snapshot()
        except RuntimeError:
            if monitoring.is_initialized():
                raise
            return  # there is no agent, or it has ended meanwhile
        worker = state["worker"]
        for source in SOURCES:
            if source.key in state["counters"]:
                family = CounterMetricFamily if source.is_counter else GaugeMetricFamily
                metric = family(_PREFIX + source.name, source.help, labels=["worker"])
                metric.add_metric([worker], state["counters"][source.key] * source.scale)
                yield metric
        for histogram in HISTOGRAMS:
            if histogram.key in state["histograms"]:
                yield _histogram(histogram, worker, *state["histograms"][histogram.key])
        yield _gauge(
            "members", "Workers of the group.", ["worker"], {(worker,): len(state["members"])}
        )
        yield _gauge(
            "lost_peer",
            "1 for each worker that was reached once and cannot be now.",
            ["worker", "peer"],
            {(worker, peer): 1 for peer in state["lost"]},
        )
        yield _gauge(
            "path",
            "1 for each connection: the transports of control and of large tensors.",
            ["worker", "peer", "control", "bulk"],
            {(worker, p["worker"], p["control"], p["bulk"]): 1 for p in state["peers"]},
        )


def _gauge(
    name: str, help: str, labels: list[str], values: dict[tuple[str, ...], int]
) -> GaugeMetricFamily:
    metric = GaugeMetricFamily(_PREFIX + name, help, labels=labels)
    for label_values, value in values.items():
        metric.add_metric(list(label_values), value)
    return metric


def _histogram(
    source: _Source, worker: str, bounds: list[int], counts: list[int], total: int
) -> HistogramMetricFamily:
    names = [f"{bound * source.scale:.12g}" for bound in bounds] + ["+Inf"]
    metric = HistogramMetricFamily(_PREFIX + source.name, source.help, labels=["worker"])
    buckets = list(zip(names, itertools.accumulate(counts), strict=True))
    metric.add_metric([worker], buckets, total * source.scale)
    return metric


def text() -> str:
    """Return the metrics in Prometheus' text format; '' where this process has no agent."""
    return prometheus.generate_latest(_own_registry()).decode()


class Server:
    """An HTTP endpoint that is being served; made by serve(). A context manager.

    ::

        server = metrics.serve()  # makes a Server
        print(server.url)  # http://127.0.0.1:41503/metrics
        server.close()

    Owns: the listening socket and a thread, until close().

    Attributes:
        address: IP address that the server listens on.
        port: TCP port that the server listens on.
    """

    def __init__(self, server: Any, thread: Any) -> None:
        self._server, self._thread = server, thread
        self.address, self.port = str(server.server_address[0]), int(server.server_address[1])
        _watch_forks()
        _servers.add(self)

    @property
    def url(self) -> str:
        """The address for Prometheus."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving; the port is free when this returns. Idempotent.

        A forked child of the process that serves has the object, but neither the socket nor the
        thread: there this does nothing.
        """
        if self._thread.is_alive():
            self._server.shutdown()  # waits for the thread
        self._server.server_close()
        self._thread.join()
        _servers.discard(self)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# The servers that are not closed. A set keeps a server whose Server the program does not keep: the
# server still listens.
_servers: set[Server] = set()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_close_in_child)


def _close_in_child() -> None:
    """Close the listening sockets in a forked child, which would keep their ports taken."""
    for server in _servers:
        server._server.server_close()
    _servers.clear()


def serve(
    port: int = 0,
    *,
    address: str = "127.0.0.1",
    registry: prometheus.CollectorRegistry | None = None,
) -> Server:
    """Offer the metrics over HTTP, from a thread.

    Args:
        port: TCP port, an int; 0 for any free port (the result's `port` says which).
        address: IP address to listen on. By default only this host can connect; there is no
            authentication, so ``0.0.0.0`` shows the metrics to everybody who reaches the port.
        registry: what to offer; by default this worker's metrics and nothing else.

    Returns:
        The running server; close() it at the end.

    Raises:
        ValueError: no such port number.
        TypeError: `port` is no int.
        OSError: the port is taken, or the address is not of this host; the text says which.
    """
    wanted = "port must be an int from 0 to 65535, 0 for any free port"
    if not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"{wanted}, got {port!r}")
    if not 0 <= port <= 65535:
        raise ValueError(f"{wanted}, got {port!r}")
    try:
        server, thread = prometheus.start_http_server(port, address, registry or _own_registry())
    except OSError as error:
        raise OSError(
            error.errno,
            f"metrics cannot be served at {address}:{port}: {error.strerror or error}. Choose "
            "another port, or 0 for any that is free, and an address of this host",
        ) from error
    return Server(server, thread)


def _own_registry() -> prometheus.CollectorRegistry:
    registry = prometheus.CollectorRegistry()
    registry.register(Collector())
    return registry
