"""csrc/cuda on a GPU: the driver itself, memory of another process, launches from
C++."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import native
from tests.support.kernel_inputs import random_bits, start_random
from torch_rpc_ext import kernels as python_kernels
from torch_rpc_ext.kernels import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PEER = 1
FLOATS = 1_000_000


@pytest.fixture
def driver() -> Any:
    torch.cuda.init()
    start_random()
    return native.cuda.load()


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def test_devices_are_torchs(driver: Any) -> None:
    assert len(driver.devices) == torch.cuda.device_count()
    for index, device in enumerate(driver.devices):
        assert (device.major, device.minor) == torch.cuda.get_device_capability(index)
        uuid = torch.cuda.get_device_properties(index).uuid
        assert device.uuid == bytes(uuid.bytes)


def test_a_copy_on_torchs_stream(driver: Any) -> None:
    source = torch.rand(FLOATS, device="cuda")
    target = torch.empty_like(source)
    torch.cuda._sleep(100_000_000)
    source.add_(1)
    native.cuda.copy(driver, 0, target.data_ptr(), source.data_ptr(), source.nbytes, stream())
    assert torch.equal(target, source)


def test_expandable_segments_cannot_be_exported(driver: Any) -> None:
    exporter = native.cuda.MemoryExporter(driver)
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        torch.cuda.empty_cache()
        tensor = torch.empty(100_000_000, device="cuda")
        with pytest.raises(ValueError, match="unsupported: .* expandable segments"):
            exporter.export(0, tensor.data_ptr(), tensor.nbytes)
        del tensor
    finally:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def in_another_process(receiver: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of this module in a fresh process; returns its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(receiver, arguments)


def test_memory_in_another_process(driver: Any) -> None:
    exporter = native.cuda.MemoryExporter(driver)
    tensor = torch.zeros(FLOATS, device="cuda")[3:]
    exported = exporter.export(0, tensor.data_ptr(), tensor.nbytes)
    trial = native.cuda.Trial(driver, 0, 1234567)
    ways = in_another_process(attempt, native.cuda.identify(driver), trial.exported)
    assert ways == ("", "", "the handle maps other memory")
    tensor.fill_(7)
    torch.cuda.synchronize()
    assert in_another_process(receive, exported) == (7.0, 7.0)


def attempt(peer: bytes, exported: bytes) -> tuple[str, str, str]:
    cuda = native.cuda
    driver = cuda.load()
    importer = cuda.MemoryImporter(driver)
    tries = [cuda.attempt(driver, importer, PEER, 0, exported, nonce) for nonce in (1234567, 0)]
    return cuda.why_no_ipc(cuda.identify(driver), peer, 0), tries[0], tries[1]


def receive(exported: bytes) -> tuple[float, float]:
    """Copy what is exported; returns the least and the greatest element."""
    torch.cuda.init()
    cuda = native.cuda
    driver, offset = cuda.load(), cuda.describe_export(exported)["offset"]
    mapping = cuda.MemoryImporter(driver).open(PEER, 0, exported)
    target = torch.empty(FLOATS - 3, device="cuda")
    cuda.copy(driver, 0, target.data_ptr(), mapping.address + offset, target.nbytes, stream())
    least, greatest = target.min().item(), target.max().item()
    mapping.release()
    return least, greatest


def test_memory_that_is_freed_while_another_process_has_it_open(driver: Any) -> None:
    """The peer's mapping stays good to read; the next tensor there has another buffer id."""
    exporter = native.cuda.MemoryExporter(driver)
    with a_peer() as peer:
        tensor = torch.full((FLOATS,), 5.0, device="cuda")
        torch.cuda.synchronize()
        old = exporter.export(0, tensor.data_ptr(), tensor.nbytes)
        assert peer.ask(("open", old)) == 5.0
        del tensor
        torch.cuda.empty_cache()  # gives it back to the driver
        assert peer.ask(("read", None)) == 5.0
        tensor = torch.full((FLOATS,), 6.0, device="cuda")
        torch.cuda.synchronize()
        new = exporter.export(0, tensor.data_ptr(), tensor.nbytes)
        describe = native.cuda.describe_export
        assert describe(new)["buffer_id"] != describe(old)["buffer_id"]
        assert peer.ask(("open", new)) == 6.0


class a_peer:  # noqa: N801
    """Another process that serves() until the block ends."""

    def __enter__(self) -> a_peer:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        return self

    def ask(self, request: tuple[str, Any]) -> Any:
        """Returns its answer."""
        self.pipe.send(request)
        assert self.pipe.poll(120), f"no answer to {request[0]}"
        return self.pipe.recv()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()


def serve(pipe: Any) -> None:
    torch.cuda.init()
    cuda = native.cuda
    driver = cuda.load()
    importer = cuda.MemoryImporter(driver)
    held: dict[str, Any] = {}
    while True:
        what, exported = pipe.recv()
        if what == "open":
            if "mapping" in held:
                held.pop("mapping").release()
            held["mapping"] = importer.open(PEER, 0, exported)
            held["offset"] = cuda.describe_export(exported)["offset"]
        target = torch.zeros(FLOATS, device="cuda")
        source = held["mapping"].address + held["offset"]
        cuda.copy(driver, 0, target.data_ptr(), source, target.nbytes, stream())
        least, greatest = target.min().item(), target.max().item()
        pipe.send(least if least == greatest else (least, greatest))


def test_gather_strided_cast_and_checksum_from_cpp(driver: Any) -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    kernels = native.cuda.Kernels(driver)
    tensors = [random_bits((size,), torch.uint8).cuda() for size in (1, 0, 4096, 3_000_001)]
    offsets, end = python_kernels.block_offsets(len(tensor) for tensor in tensors)
    block = torch.zeros(end, dtype=torch.uint8, device="cuda")
    expected = block.clone()
    runs = [
        (tensor.data_ptr(), block.data_ptr() + offset, len(tensor))
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    kernels.segments(0, stream(), runs)
    reference.gather(tensors, expected, offsets, None)
    assert torch.equal(block, expected)

    source = torch.rand(500, 700, device="cuda")
    target = torch.empty(700, 500, dtype=torch.bfloat16, device="cuda")
    kernels.strided(
        0,
        stream(),
        (source.data_ptr(), 4, [700, 500], [4, 2800]),
        (target.data_ptr(), 2, [700, 500], [1000, 2]),
        "float32_to_bfloat16",
    )
    assert torch.equal(target, source.t().bfloat16())

    result = torch.empty((), dtype=torch.int64, device="cuda")
    kernels.checksum(0, stream(), source.data_ptr(), source.nbytes, result.data_ptr())
    assert int(result) == int(reference.checksum(source.cpu()))
