"""A3C, the communication by gRPC: bytes without pickle, over a Unix socket."""

import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import Any

import grpc
import torch
from torch import Tensor

from benchmarks.applications.a3c import model
from benchmarks.applications.interface import Figures
from benchmarks.applications.stubs import stubs

messages, services = stubs("a3c")
warnings.filterwarnings("ignore", message="The given buffer is not writable")
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def to_bytes(tensors: Iterable[Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


def to_tensors(parts: Iterable[bytes], shapes: Sequence[torch.Size]) -> list[Tensor]:
    flat = [torch.frombuffer(part, dtype=torch.float32) for part in parts]
    return [tensor.view(shape) for tensor, shape in zip(flat, shapes, strict=True)]


class Service(services.LearnerServicer):  # type: ignore[name-defined,misc]
    """What the first process offers."""

    def __init__(self, job: model.A3cJob) -> None:
        self.learner = model.Learner(job)
        self.reports: list[Figures] = []
        self.shapes = [parameter.shape for parameter in self.learner.parameters]
        self.left = threading.Semaphore(0)

    def Fetch(self, request: Any, context: Any) -> Any:
        return messages.Weights(tensors=to_bytes(self.learner.fetch()))

    def Update(self, request: Any, context: Any) -> Any:
        gradients = to_tensors(request.tensors, self.shapes)
        goes_on = self.learner.update(gradients, list(request.rewards))
        return messages.Verdict(goes_on=goes_on)

    def Leave(self, request: Any, context: Any) -> Any:
        figures = {"fetch": request.fetch, "update": request.update, "cpu": request.cpu}
        self.reports.append({key: list(values) for key, values in figures.items()})
        self.left.release()
        return messages.Empty()


def run(rank: int, job: model.A3cJob, backend: str) -> Figures | None:
    """Be process ``rank`` of a run; the first has the learner and returns the figures."""
    address = f"unix:{os.environ['MEETING']}"
    if rank == 0:
        service = Service(job)
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=16), options=OPTIONS)
        services.add_LearnerServicer_to_server(service, server)
        server.add_insecure_port(address)
        server.start()
        for _ in range(1, job.processes):
            service.left.acquire()
        server.stop(grace=10).wait()  # the last answers are still on their way
        return service.learner.figures(service.reports)
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        grpc.channel_ready_future(channel).result(60)
        learner, shapes = services.LearnerStub(channel), model.shapes(job)

        def fetch() -> list[Tensor]:
            return to_tensors(learner.Fetch(messages.Empty()).tensors, shapes)

        def update(gradients: list[Tensor], rewards: list[float]) -> bool:
            parts = to_bytes(gradients)
            request = messages.Gradients(tensors=parts, rewards=rewards)
            return bool(learner.Update(request).goes_on)

        report = model.play(fetch, update, job, rank)
        learner.Leave(messages.Report(**report))
    return None
