"""A parameter server and two trainers: the program that demo.py runs on both back ends.

The server holds a model (RemoteModule). The trainers, each with half of scikit-learn's digits,
compute losses through it; one distributed autograd graph spans the three processes, and a
DistributedOptimizer changes the parameters where they live. ``options_of`` is all that differs
between the back ends.
"""

from __future__ import annotations

import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed.rpc
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

# Upstream's functions have no types.
rpc: Any = torch.distributed.rpc

SERVER, LEADER, HELPER = WORKERS = ("server", "trainer0", "trainer1")
SEED = 20
HELD_OUT = 360  # of 1797 images
BATCH = 64  # images a step and trainer


class Net(nn.Module):
    """A small classifier of 8 x 8 images; lives on the server.

    Args:
        seed: of the initial weights.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [n, 10] float32, of images, [n, 64] float32."""
        logits: Tensor = self.layers(images)
        return logits


def digits(held_out: bool) -> tuple[Tensor, Tensor]:
    """Return images, [n, 64] float32 in 0 to 1, and labels, [n] int64."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    chosen = order[:HELD_OUT] if held_out else order[HELD_OUT:]
    images = torch.as_tensor(pixels, dtype=torch.float32) / 16
    return images[chosen], torch.as_tensor(labels)[chosen]


class Trainer:
    """One trainer's half of the data.

    Args:
        index: 0 or 1.
        net: the model on the server.
    """

    def __init__(self, index: int, net: Any) -> None:
        images, labels = digits(held_out=False)
        self.images, self.labels = images[index::2], labels[index::2]
        self.net = net
        self.steps = len(self.labels) // BATCH

    def loss(self, epoch: int, step: int) -> Tensor:
        """Return the loss of one batch, a scalar whose graph reaches into the server."""
        shuffle = torch.Generator().manual_seed(SEED + epoch)
        order = torch.randperm(len(self.labels), generator=shuffle)
        batch = order[step * BATCH : (step + 1) * BATCH]
        logits = self.net.forward(self.images[batch])
        return nn.functional.cross_entropy(logits, self.labels[batch])


class Leader:
    """The trainer that leads: the main program, as one would write it for either back end."""

    def __init__(self) -> None:
        # Imported where it is used: all of it works only beside a running agent.
        from torch.distributed.nn import RemoteModule
        from torch.distributed.optim import DistributedOptimizer

        remote_module: Any = RemoteModule
        self.net = remote_module(SERVER, Net, args=(SEED,))
        self.trainer = Trainer(0, self.net)
        self.helper = rpc.remote(HELPER, Trainer, args=(1, self.net))
        optimizer: Any = DistributedOptimizer
        self.optimizer = optimizer(
            torch.optim.SGD, self.net.remote_parameters(), lr=0.1, momentum=0.9
        )

    def train(self, epoch: int) -> float:
        """Train for an epoch; returns how long it took, s."""
        from torch.distributed import autograd as untyped_autograd

        autograd: Any = untyped_autograd
        start = time.perf_counter()
        for step in range(self.trainer.steps):
            with autograd.context() as context:
                theirs = self.helper.rpc_async().loss(epoch, step)
                ours = self.trainer.loss(epoch, step)
                autograd.backward(context, [(ours + theirs.wait()) / 2])
                self.optimizer.step(context)
        return time.perf_counter() - start

    def accuracy(self) -> float:
        """Return the share of held-out images that are classified right."""
        images, labels = digits(held_out=True)
        logits: Tensor = self.net.forward(images)
        return float((logits.argmax(1) == labels).float().mean())

    def echo(self, megabytes: int, check: bool) -> float:
        """Send a tensor to the server and back; returns how long it took, s."""
        if not hasattr(self, "payload"):
            self.payload = torch.arange(megabytes * 250_000, dtype=torch.float32)
        start = time.perf_counter()
        answer = rpc.rpc_sync(SERVER, same, args=(self.payload,))
        seconds = time.perf_counter() - start
        if check and not torch.equal(answer, self.payload):
            raise RuntimeError(f"the {megabytes} MB echo came back changed")
        return seconds

    def report(self) -> dict[str, Any]:
        """Return what each worker says about itself, by name."""
        return {name: rpc.rpc_sync(name, describe) for name in WORKERS}


def same(tensor: Tensor) -> Tensor:
    """The echo, on the server."""
    return tensor


def describe() -> dict[str, Any]:
    """Return this worker's agent class, counts, and paths to the others (UCX only)."""
    import torch_rpc_ext

    agent = rpc.api._get_current_rpc_agent()
    ours = torch_rpc_ext.info()["agent"]
    return {
        "agent": type(agent).__name__,
        "metrics": agent.get_metrics(),
        "interface": ours["interface"]["reason"] if ours else "",
        "peers": ours["peers"] if ours else [],
    }


def options_of(backend: str, init_method: str) -> dict[str, Any]:
    """Return init_rpc's arguments for a back end: all that a program changes to use UCX."""
    if backend == "TENSORPIPE":
        options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
        return {"backend": rpc.BackendType.TENSORPIPE, "rpc_backend_options": options}
    import torch_rpc_ext

    options = torch_rpc_ext.UcxRpcBackendOptions(init_method=init_method)
    return {"backend": rpc.BackendType.UCX, "rpc_backend_options": options}


def hush() -> None:
    """Drop two warnings that torch gives about its own code, whatever a program does.

    Init of TENSORPIPE (pytorch issue 149393), and DistributedOptimizer, which overrides filters:
    so it is done where warnings are shown.
    """
    show: Any = warnings.showwarning

    def show_others(message: Warning | str, *arguments: Any, **more: Any) -> None:
        text = str(message)
        if "You are using a Backend" not in text and "for functional optimizers" not in text:
            show(message, *arguments, **more)

    warnings.showwarning = show_others


def work(backend: str, rank: int, init_method: str, pipe: Connection) -> None:
    """One worker process. The leader does what it is told through the pipe; the others serve."""
    hush()
    rpc.init_rpc(
        WORKERS[rank], rank=rank, world_size=len(WORKERS), **options_of(backend, init_method)
    )
    if WORKERS[rank] == LEADER:
        lead(pipe)
    rpc.shutdown()


def lead(pipe: Connection) -> None:
    """Run what comes through the pipe, until it brings None."""
    leader: Leader | None = None
    while request := pipe.recv():
        name, arguments = request
        try:
            leader = leader or Leader()
            pipe.send((getattr(leader, name)(*arguments), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
