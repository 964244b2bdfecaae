"""The back ends that can be compared, by name."""

from __future__ import annotations

from benchmarks.backends.interface import Backend
from benchmarks.backends.torch_rpc import TensorPipe, Ucx

BACKENDS: dict[str, type[Backend]] = {backend.name: backend for backend in (Ucx, TensorPipe)}

#: What is measured, and what it is measured against.
SUBJECT, BASELINE = Ucx.name, TensorPipe.name
