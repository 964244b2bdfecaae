"""Federated learning, the communication by gRPC: bytes without pickle, over TCP."""

import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import Any

import grpc
import torch
from torch import Tensor

from benchmarks.applications.federated import model
from benchmarks.applications.stubs import stubs

messages, services = stubs("federated")
warnings.filterwarnings("ignore", message="The given buffer is not writable")
# A proxy of the environment is for the world outside.
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


def to_bytes(tensors: Iterable[Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


def to_tensors(parts: Iterable[bytes], shapes: Sequence[torch.Size]) -> list[Tensor]:
    flat = [torch.frombuffer(part, dtype=torch.float32) for part in parts]
    return [tensor.view(shape) for tensor, shape in zip(flat, shapes, strict=True)]


class Service(services.ServerServicer):  # type: ignore[name-defined,misc]
    """What the first process offers: clients wait there for the next round."""

    def __init__(self, job: model.FederatedJob, shapes: Sequence[torch.Size]) -> None:
        self.clients, self.shapes, self.changed = job.clients, shapes, threading.Condition()
        self.now = messages.Weights(step=-1)
        self.updates: dict[int, model.Update] = {}
        self.joined = 0

    def wait_for_clients(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.joined == self.clients)

    def begin(self, weights: messages.Weights) -> None:
        with self.changed:
            self.updates, self.now = {}, weights
            self.changed.notify_all()

    def ask(self, weights: model.Weights, step: int) -> dict[int, model.Update]:
        self.begin(messages.Weights(step=step, tensors=to_bytes(weights)))
        with self.changed:
            self.changed.wait_for(lambda: len(self.updates) == self.clients)
            return self.updates

    def Exchange(self, request: Any, context: Any) -> Any:
        with self.changed:
            if request.step < 0:
                self.joined += 1
            else:
                tensors = to_tensors(request.tensors, self.shapes)
                self.updates[request.client] = model.Update(tensors, request.count)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.now.step != request.step)
            return self.now


def run(rank: int, job: model.FederatedJob, backend: str) -> model.Figures | None:
    """Be process ``rank`` of a run; the first is the server and returns the figures."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if rank == 0:
        server = model.Server(job)
        service = Service(job, [weight.shape for weight in server.weights])
        pool = futures.ThreadPoolExecutor(max_workers=job.clients + 1)
        offered = grpc.server(pool, options=OPTIONS)
        services.add_ServerServicer_to_server(service, offered)
        offered.add_insecure_port(address)
        offered.start()
        service.wait_for_clients()
        figures = server.serve(service.ask)
        service.begin(messages.Weights(step=job.steps))
        offered.stop(grace=10).wait()  # the last answers are still on their way
        return figures
    client = model.Client(job, rank)
    shapes = [parameter.shape for parameter in client.parameters]
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        grpc.channel_ready_future(channel).result(120)
        server, now = services.ServerStub(channel), messages.Weights(step=-1)
        update = model.Update([], 0)
        while now.step < job.steps:
            request = messages.Update(client=rank, step=now.step, count=update.count)
            request.tensors.extend(to_bytes(update.tensors))
            now = server.Exchange(request)
            if now.step < job.steps:
                update = client.train(to_tensors(now.tensors, shapes), now.step)
    return None
