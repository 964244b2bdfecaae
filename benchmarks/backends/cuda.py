"""Back ends for tensors on one GPU: both agents with device maps, and the copies alone."""

from __future__ import annotations

from typing import Any, ClassVar

from benchmarks.backends.interface import CUDA, MODELS, Backend, Pending, Place
from benchmarks.backends.torch_rpc import TensorPipe, TorchRpc, Ucx
from benchmarks.functions import FUNCTIONS
from tests.support.gpu import why_no_gpu

_DEVICE = 0  # all workers use this GPU: the targets are for two processes on one GPU


def device_maps(place: Place) -> dict[str, dict[int, int]]:
    """Return the device maps of a worker: all workers use the same GPU."""
    others = (rank for rank in range(place.size) if rank != place.rank)
    return {f"worker{rank}": {_DEVICE: _DEVICE} for rank in others}


class _OnGpu(TorchRpc):
    """The code that both agents share."""

    gpu = True
    offers = frozenset({CUDA, MODELS})

    @classmethod
    def why_not(cls) -> str:
        return why_no_gpu() or super().why_not()

    def start(self, place: Place) -> None:
        self.maps = device_maps(place)
        super().start(place)

    def options(self, init_method: str) -> dict[str, Any]:
        arguments = super().options(init_method)
        options = arguments["rpc_backend_options"]
        for worker, device_map in self.maps.items():
            options.set_device_map(worker, device_map)
        return arguments


class CudaUcx(_OnGpu, Ucx):
    """Ours, with device maps."""

    name = "ucx-cuda"


class CudaTensorPipe(_OnGpu, TensorPipe):
    """Upstream's, with device maps."""

    name = "tensorpipe-cuda"


class Copies(Backend):
    """A limit that no RPC on one GPU can beat: one process copies each tensor there and back on the
    caller's stream, and runs the function in between."""

    name = "copies"
    gpu = True
    functions: ClassVar[frozenset[str]] = frozenset(FUNCTIONS)
    offers = frozenset({CUDA})

    @classmethod
    def why_not(cls) -> str:
        return why_no_gpu()

    def start(self, place: Place) -> None: ...

    def stop(self) -> None: ...

    def call(self, to: int, function: str, *arguments: Any) -> Any:
        return _copied(FUNCTIONS[function](*map(_copied, arguments)))

    def call_async(self, to: int, function: str, *arguments: Any) -> Pending:
        raise NotImplementedError("the copies are asynchronous anyway: use call()")


def _copied(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_copied(one) for one in value] if isinstance(value, list) else value
