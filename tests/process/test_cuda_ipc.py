"""CUDA IPC between real processes, on a driver without a GPU.

The `sender` has device memory; the `receiver` opens it. Each is a process of its own, and keeps in
HELD what it holds between two steps of a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.process.group import Group, Worker
from tests.support import libcuda, native
from tests.support.libcuda import FakeCuda

SIZE = 1 << 20
PEER = 7  # the number by which the receiver knows the sender
INVALID_VALUE, ALREADY_MAPPED = 1, 208

HELD: dict[str, Any] = {}


@pytest.fixture
def processes() -> Iterator[tuple[Worker, Worker]]:
    with pair() as group:
        yield group[0], group[1]


def pair(sender: str = "ab", receiver: str = "ab", **fake: object) -> Group:
    """Start a sender and a receiver with these devices."""
    env = [libcuda.environment(uuids=uuids, **fake) for uuids in (sender, receiver)]
    group = Group(2, init=False, env=env)
    group.run_all(begin)
    return group


def begin() -> None:
    cuda = native.cuda
    HELD.update(fake=FakeCuda(), driver=cuda.load())
    HELD["exporter"] = cuda.MemoryExporter(HELD["driver"])
    HELD["importer"] = cuda.MemoryImporter(HELD["driver"], max_open=3)


def send(value: int, device: int = 0, size: int = SIZE, offset: int = 0) -> bytes:
    """Allocate device memory full of ``value``; return its export, from ``offset`` on."""
    address = HELD["fake"].allocate(size, device)
    libcuda.write(address, bytes([value]) * size)
    HELD["address"] = address
    return export(offset, device, size)


def export(offset: int = 0, device: int = 0, size: int = SIZE) -> bytes:
    exported: bytes = HELD["exporter"].export(device, HELD["address"] + offset, size - offset)
    return exported


def free() -> None:
    HELD["fake"].free(HELD["address"])


def receive(exported: bytes, device: int = 0, keep: bool = False) -> tuple[int, int]:
    """Open an export; return its first byte and the address at which it is mapped."""
    run = native.cuda.describe_export(exported)
    mapping = HELD["importer"].open(PEER, device, exported)
    if keep:
        HELD["mapping"] = mapping
    return libcuda.read(mapping.address + run["offset"], 1)[0], mapping.address


def stats() -> dict[str, int]:
    found: dict[str, int] = HELD["importer"].stats()
    return found


def calls(name: str) -> list[str]:
    found: list[str] = HELD["fake"].calls(name)
    return found


def test_memory_is_seen_by_another_process(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    exported = sender.run(send, 5, offset=4096)
    assert receiver.run(receive, exported)[0] == 5
    run = native.cuda.describe_export(exported)
    assert (run["offset"], run["bytes"], run["size"]) == (4096, SIZE - 4096, SIZE)


def test_an_allocation_is_exported_and_opened_once(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    places = [receiver.run(receive, sender.run(send, 5))[1]]
    for offset in (0, 512, 4096):
        places.append(receiver.run(receive, sender.run(export, offset))[1])
    assert len(set(places)) == 1
    assert len(sender.run(calls, "cuIpcGetMemHandle")) == 1
    assert len(receiver.run(calls, "cuIpcOpenMemHandle")) == 1
    assert receiver.run(stats) == {"hits": 3, "opened": 1, "stale": 0, "open": 1}


def test_a_stale_handle_is_not_used(processes: tuple[Worker, Worker]) -> None:
    """The handle is stale after the allocator has returned memory to the driver and got the same
    address again."""
    sender, receiver = processes
    old = sender.run(send, 5)
    assert receiver.run(receive, old)[0] == 5
    sender.run(free)
    new = sender.run(send, 6)
    describe = native.cuda.describe_export
    assert describe(new)["base"] == describe(old)["base"]
    assert describe(new)["buffer_id"] != describe(old)["buffer_id"]
    assert receiver.run(receive, new)[0] == 6
    assert receiver.run(stats) == {"hits": 0, "opened": 2, "stale": 1, "open": 1}
    assert len(receiver.run(calls, "cuIpcCloseMemHandle")) == 1


def test_what_is_in_use_is_closed_later(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    receiver.run(receive, sender.run(send, 5), keep=True)
    receiver.run(forget)
    assert receiver.run(stats)["open"] == 0
    assert receiver.run(calls, "cuIpcCloseMemHandle") == []
    assert receiver.run(still_there) == 5
    receiver.run(release)
    assert len(receiver.run(calls, "cuIpcCloseMemHandle")) == 1


def forget() -> None:
    HELD["importer"].forget(PEER)


def still_there() -> int:
    return libcuda.read(HELD["mapping"].address, 1)[0]


def release() -> None:
    HELD["mapping"].release()


def test_all_memory_of_a_peer_that_goes_is_closed(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    exported = [sender.run(send, value) for value in (1, 2, 3)]
    for one in exported:
        receiver.run(receive, one)
    assert receiver.run(stats)["open"] == 3
    receiver.run(forget)
    assert receiver.run(stats)["open"] == 0
    assert len(receiver.run(calls, "cuIpcCloseMemHandle")) == 3
    assert receiver.run(receive, exported[0])[0] == 1


def test_the_oldest_makes_room_and_idle_ones_are_closed(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    exported = [sender.run(send, value) for value in range(4)]
    for one in exported:
        receiver.run(receive, one)
    assert receiver.run(stats) == {"hits": 0, "opened": 4, "stale": 0, "open": 3}
    receiver.run(receive, exported[1])
    assert receiver.run(stats)["hits"] == 1  # exported[0] was closed to make room
    assert receiver.run(trim, 60.0) == 0
    assert receiver.run(trim, 0.0) == 3


def trim(seconds: float) -> int:
    closed: int = HELD["importer"].trim(seconds)
    return closed


def test_memory_that_cannot_be_exported_says_why(processes: tuple[Worker, Worker]) -> None:
    sender, _ = processes
    with pytest.raises(ValueError, match="unsupported: .* expandable segments"):
        sender.run(send_unexportable)
    with pytest.raises(ValueError, match="not in one allocation"):
        sender.run(send_too_much)
    # The driver is asked once for an allocation, and its refusal is remembered; for another
    # allocation it is asked again.
    with pytest.raises(ValueError, match="unsupported: .* cuIpcGetMemHandle: CUDA_ERROR_INVALID"):
        sender.run(send_refused, INVALID_VALUE)
    with pytest.raises(ValueError, match="unsupported: .* cuIpcGetMemHandle: CUDA_ERROR_INVALID"):
        sender.run(export)
    assert len(sender.run(calls, "cuIpcGetMemHandle")) == 1
    sender.run(send, 5)


def send_unexportable() -> None:
    HELD["fake"].exportable(False)
    try:
        send(5)
    finally:
        HELD["fake"].exportable(True)


def send_too_much() -> None:
    HELD["exporter"].export(0, HELD["fake"].allocate(SIZE), SIZE + 1)


def send_refused(error: int) -> None:
    HELD["fake"].fail("cuIpcGetMemHandle", error)
    send(5)


def test_a_handle_that_cannot_be_opened(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    exported = sender.run(send, 5)
    with pytest.raises(ValueError, match="unsupported: .*OpenMemHandle: CUDA_ERROR_ALREADY_MAPPED"):
        receiver.run(receive_refused, exported, ALREADY_MAPPED)
    with pytest.raises(ValueError, match="CUDA_ERROR_INVALID_CONTEXT"):
        sender.run(receive, exported)  # a process cannot open its own export
    assert receiver.run(receive, exported)[0] == 5  # the worker lives on


def receive_refused(exported: bytes, error: int) -> None:
    HELD["fake"].fail("cuIpcOpenMemHandle", error)
    receive(exported)


def test_a_peers_bytes_are_checked(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    exported = sender.run(send, 5)
    with pytest.raises(ValueError, match="invalid: a memory handle is cut off"):
        receiver.run(receive, exported[:-1])
    beyond = exported[:64] + change(exported[64:], 3, SIZE)  # the offset
    with pytest.raises(ValueError, match="invalid: a memory handle names"):
        receiver.run(receive, beyond)
    larger = exported[:64] + change(exported[64:], 1, 2 * SIZE)  # the allocation's size
    with pytest.raises(ValueError, match="invalid: a memory handle claims 2097152 bytes, and maps"):
        receiver.run(receive, larger)
    assert receiver.run(stats)["open"] == 0


def change(numbers: bytes, index: int, value: int) -> bytes:
    return numbers[: 8 * index] + value.to_bytes(8, "little") + numbers[8 * index + 8 :]


@pytest.mark.parametrize(
    ("sender", "receiver", "why"),
    [
        ("ab", "ba", ""),  # CUDA_VISIBLE_DEVICES in another order
        ("a", "b", "the peer's cuda:0 cannot be seen here (CUDA_VISIBLE_DEVICES)"),
        ("A", "A", "the peer's cuda:0 is a MIG slice"),
    ],
)
def test_devices_of_a_pair(sender: str, receiver: str, why: str) -> None:
    with pair(sender, receiver) as group:
        assert group[1].run(why_not, group[0].run(identify), 0) == why
        if not why:
            exported = group[0].run(send, 5)
            assert group[1].run(receive, exported, device=1)[0] == 5


def identify() -> bytes:
    identity: bytes = native.cuda.identify(HELD["driver"])
    return identity


def why_not(peer: bytes, device: int) -> str:
    found: str = native.cuda.why_no_ipc(identify(), peer, device)
    return found


def test_places_of_a_pair(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    identity = sender.run(identify)
    for index, why in enumerate(("another host", "another pid namespace", "another ipc namespace")):
        assert receiver.run(why_not, change(identity, index, 0), 0).startswith(why)
    assert receiver.run(why_not, identity, 2) == "the peer has no cuda:2"
    assert sender.run(why_not, identity, 0) == "the same process"
    with pytest.raises(ValueError, match="invalid: a worker's list of GPUs is cut off"):
        receiver.run(why_not, identity[:-1], 0)
    with pytest.raises(ValueError, match="invalid: a worker tells of 4294967295 GPUs"):
        receiver.run(why_not, identity[:28] + b"\xff" * 4 + identity[32:], 0)


def test_a_trial_reads_what_only_the_peer_can_know(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    exported = sender.run(offer, 0x1234567890)
    assert receiver.run(attempt, exported, 0x1234567890) == ""
    assert receiver.run(attempt, exported, 1) == "the handle maps other memory"
    assert "default" not in "".join(receiver.run(calls, "cuStreamSynchronize"))
    assert "CUDA_ERROR_ALREADY_MAPPED" in receiver.run(attempt_refused, exported, 1)
    sender.kill()
    receiver.run(forget)
    assert "CUDA_ERROR_INVALID_VALUE" in receiver.run(attempt, exported, 1)


def offer(nonce: int) -> bytes:
    HELD["trial"] = native.cuda.Trial(HELD["driver"], 0, nonce)
    exported: bytes = HELD["trial"].exported
    return exported


def attempt(exported: bytes, nonce: int) -> str:
    found: str = native.cuda.attempt(HELD["driver"], HELD["importer"], PEER, 0, exported, nonce)
    return found


def attempt_refused(exported: bytes, nonce: int) -> str:
    HELD["importer"].forget(PEER)
    HELD["fake"].fail("cuIpcOpenMemHandle", ALREADY_MAPPED)
    return attempt(exported, nonce)


def test_a_sender_that_dies_is_no_harm(processes: tuple[Worker, Worker]) -> None:
    sender, receiver = processes
    receiver.run(receive, sender.run(send, 5), keep=True)
    sender.kill()
    assert receiver.run(still_there) == 5
    receiver.run(release)
    receiver.run(forget)
    assert receiver.run(stats)["open"] == 0
