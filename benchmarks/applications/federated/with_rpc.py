"""Federated learning, the communication by torch.distributed.rpc, on UCX or TENSORPIPE."""

import contextlib
import threading
import time

import torch.distributed.rpc as rpc

from benchmarks.applications.federated import model

CLIENT: list[model.Client] = []  # this process's
LEAVES = threading.Event()
PATIENCE = 120.0  # s that a round waits for a client that has died


def run(rank: int, job: model.FederatedJob, backend: str) -> model.Figures | None:
    """Be process ``rank`` of a run; the first is the server and returns the figures."""
    if rank > 0:
        CLIENT.append(model.Client(job, rank))
    rpc.init_rpc(f"worker{rank}", rpc.BackendType[backend], rank, job.processes)
    clients = Clients(job)
    figures = model.Server(job).serve(clients.ask) if rank == 0 else None
    if job.leaves is None:
        rpc.shutdown()
        return figures
    # All would wait for the one that has left: everybody leaves by itself.
    if rank == 0:
        clients.let_go(clients.present)
    else:
        LEAVES.wait()
    rpc.shutdown(graceful=False)
    return figures


class Clients:
    """What the server knows of the clients."""

    def __init__(self, job: model.FederatedJob) -> None:
        self.present = set(range(1, job.processes))

    def ask(self, weights: model.Weights, step: int) -> dict[int, model.Update]:
        given, updates = (weights, step), {}
        calls = [
            (client, rpc.rpc_async(client, train, given, timeout=0)) for client in self.present
        ]
        end = time.monotonic() + PATIENCE
        while calls:
            client, call = calls.pop()
            try:
                updates[client] = call.wait() if call else rpc.rpc_sync(client, train, given)
            except RuntimeError:
                # It has died, and may come back within the round; the others are waited for first.
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
                calls.insert(0, (client, None))
        self.let_go({client for client, update in updates.items() if update.leaves})
        return updates

    def let_go(self, clients: set[int]) -> None:
        self.present = self.present - clients
        for client in clients:
            with contextlib.suppress(RuntimeError):  # it may be gone before it has answered
                rpc.rpc_sync(client, leave)


def train(weights: model.Weights, step: int) -> model.Update:
    return CLIENT[0].train(weights, step)


def leave() -> None:
    LEAVES.set()
