"""The back ends that can be compared, by name."""

from __future__ import annotations

from benchmarks.backends.cuda import Copies, CudaTensorPipe, CudaUcx
from benchmarks.backends.grpc import Grpc
from benchmarks.backends.interface import Backend
from benchmarks.backends.limit import Limit
from benchmarks.backends.ray import Ray
from benchmarks.backends.torch_rpc import TensorPipe, Ucx

#: In the order of their turns. UCX and TENSORPIPE, which are compared most, follow each other.
BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend
    for backend in (Ucx, TensorPipe, Grpc, Ray, Limit, CudaUcx, CudaTensorPipe, Copies)
}

#: What is measured, and what it is measured against.
SUBJECT, BASELINE = Ucx.name, TensorPipe.name
GPU_SUBJECT, GPU_BASELINE = CudaUcx.name, CudaTensorPipe.name
