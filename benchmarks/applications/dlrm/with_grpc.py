"""DLRM, the communication by gRPC: bytes without pickle, over a Unix socket."""

import os
import threading
import warnings
from concurrent import futures
from typing import Any

import grpc
import torch
from torch import Tensor

from benchmarks.applications.dlrm import flights, model
from benchmarks.applications.interface import Figures
from benchmarks.applications.stubs import stubs

messages, services = stubs("dlrm")
warnings.filterwarnings("ignore", message="The given buffer is not writable")
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
NAMES = len(flights.NAMES)


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def to_rows(data: bytes) -> Tensor:
    return torch.frombuffer(data, dtype=torch.int64).view(-1, NAMES)


def to_vectors(data: bytes, width: int) -> Tensor:
    return torch.frombuffer(data, dtype=torch.float32).view(-1, NAMES, width)


class Service(services.TablesServicer):  # type: ignore[name-defined,misc]
    """What the first process offers."""

    def __init__(self, job: model.DlrmJob) -> None:
        self.tables, self.job = model.Tables(job), job
        self.reports: list[Figures] = []
        self.left = threading.Semaphore(0)

    def LookUp(self, request: Any, context: Any) -> Any:
        vectors = self.tables.look_up(to_rows(request.rows))
        return messages.Vectors(vectors=to_bytes(vectors))

    def Update(self, request: Any, context: Any) -> Any:
        gradients = to_vectors(request.gradients, self.job.width)
        self.tables.update(to_rows(request.rows), gradients)
        return messages.Empty()

    def Leave(self, request: Any, context: Any) -> Any:
        fields = [field.name for field in messages.Report.DESCRIPTOR.fields]
        self.reports.append({name: list(getattr(request, name)) for name in fields})
        self.left.release()
        return messages.Empty()


def run(rank: int, job: model.DlrmJob, backend: str) -> Figures | None:
    """Be process ``rank`` of a run; the first has the tables and returns the figures."""
    address = f"unix:{os.environ['MEETING']}"
    if rank == 0:
        service = Service(job)
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=16), options=OPTIONS)
        services.add_TablesServicer_to_server(service, server)
        server.add_insecure_port(address)
        server.start()
        for _ in range(1, job.processes):
            service.left.acquire()
        server.stop(grace=10).wait()  # the last answers are still on their way
        return service.tables.figures(service.reports)
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        grpc.channel_ready_future(channel).result(60)
        tables = services.TablesStub(channel)

        def look_up(rows: Tensor) -> Tensor:
            return to_vectors(tables.LookUp(messages.Rows(rows=to_bytes(rows))).vectors, job.width)

        def update(rows: Tensor, gradients: Tensor) -> None:
            parts = {"rows": to_bytes(rows), "gradients": to_bytes(gradients)}
            tables.Update(messages.Gradients(**parts))

        tables.Leave(messages.Report(**model.train(look_up, update, job, rank)))
    return None
