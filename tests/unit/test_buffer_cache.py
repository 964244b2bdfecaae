"""The cache of receive buffers."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import native

MIB = 1 << 20

pytestmark = pytest.mark.timeout(60)


def cache_of(mib: int) -> native.memory.BufferCache:
    return native.memory.BufferCache(max_idle_bytes=mib * MIB)


@settings(deadline=None)
@given(st.integers(0, 1 << 50))
def test_size_class_wastes_at_most_an_eighth(size: int) -> None:
    size_class = native.memory.size_class(size)
    assert size_class >= max(size, MIB)
    assert size_class - max(size, MIB) <= max(size, MIB) // 8
    assert size_class % 4096 == 0
    assert native.memory.size_class(size_class) == size_class


def test_block_is_aligned_and_writable() -> None:
    cache = cache_of(64)
    for size in (1, MIB, 3 * MIB + 5, 40 * MIB):
        block = cache.acquire(size)
        assert block.size == size and block.capacity >= size
        assert block.address % (2 * MIB) == 0
        ctypes.memset(block.address, 0x5A, block.capacity)
        end = block.address + block.capacity - 1
        assert ctypes.c_uint8.from_address(end).value == 0x5A


def test_reuse() -> None:
    cache = cache_of(64)
    first = cache.acquire(5 * MIB)
    address = first.address
    first.release()
    assert cache.stats()["idle_blocks"] == 1
    second = cache.acquire(5 * MIB - 100)
    assert second.address == address and second.size == 5 * MIB - 100
    assert cache.stats() == {
        "hits": 1, "misses": 1, "idle_bytes": 0, "idle_blocks": 0,
        "used_bytes": second.capacity, "used_blocks": 1,
    }  # fmt: skip
    third = cache.acquire(5 * MIB)
    assert third.address != address
    assert cache.acquire(10 * MIB).address != address


def test_release_twice_and_use_after_release() -> None:
    cache = cache_of(64)
    block = cache.acquire(MIB)
    block.release()
    block.release()
    assert cache.stats()["idle_blocks"] == 1
    with pytest.raises(ValueError, match="released"):
        _ = block.address


def test_garbage_collection_releases() -> None:
    cache = cache_of(64)
    block = cache.acquire(MIB)
    del block
    gc.collect()
    assert cache.stats()["idle_blocks"] == 1


def test_cap_drops_the_oldest() -> None:
    cache = cache_of(10)
    blocks = [cache.acquire(4 * MIB) for _ in range(3)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        block.release()
    assert cache.stats()["idle_bytes"] == 8 * MIB
    assert cache.acquire(4 * MIB).address == addresses[2]


def test_block_above_the_cap_is_not_kept() -> None:
    cache = cache_of(10)
    kept = cache.acquire(4 * MIB)
    kept.release()
    cache.acquire(11 * MIB).release()
    assert cache.stats()["idle_bytes"] == 4 * MIB
    none = cache_of(0)
    none.acquire(MIB).release()
    assert none.stats()["idle_blocks"] == 0


def test_trim_by_age() -> None:
    cache = cache_of(64)
    cache.acquire(4 * MIB).release()
    assert cache.trim(3600) == 0
    assert cache.trim(0) == 4 * MIB
    assert cache.stats()["idle_bytes"] == 0


def test_release_after_close_and_after_the_cache_is_gone() -> None:
    cache = cache_of(64)
    idle, used, late = (cache.acquire(2 * MIB) for _ in range(3))
    idle.release()
    cache.close()
    assert cache.stats()["idle_bytes"] == 0
    used.release()
    assert cache.stats()["idle_bytes"] == 0
    assert cache.stats()["used_blocks"] == 1
    cache.acquire(MIB).release()
    del cache
    gc.collect()
    ctypes.memset(late.address, 1, late.size)
    late.release()


def test_unmaps_what_it_drops() -> None:
    def maps() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    cache = cache_of(0)
    cache.acquire(MIB).release()
    before = maps()
    for size in range(1, 200):
        cache.acquire(size * 100_000).release()
    assert maps() <= before + 5


def test_too_much_memory_is_an_error() -> None:
    cache = cache_of(64)
    for size in (1 << 50, (1 << 63) - 1, (1 << 64) - 1):
        with pytest.raises(ValueError, match=rf"{size} bytes .* \d+ bytes of"):
            cache.acquire(size)
    assert cache.stats()["used_blocks"] == 0


def test_threads() -> None:
    cache = cache_of(32)
    failures: list[str] = []

    def work(seed: int) -> None:
        for i in range(200):
            block = cache.acquire((1 + (seed * 7 + i) % 5) * MIB)
            mark = ctypes.c_uint64.from_address(block.address)
            mark.value = seed * 1000 + i
            if mark.value != seed * 1000 + i:
                failures.append("a block was given out twice")
            block.release()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    stats = cache.stats()
    assert stats["used_bytes"] == 0 and stats["idle_bytes"] <= 32 * MIB
    assert stats["hits"] + stats["misses"] == 800


def test_shared_blocks_come_after_share_and_are_reused() -> None:
    cache = cache_of(64)
    private = cache.acquire(5 * MIB)
    assert private.region == (0, -1)
    private.release()
    cache.share(5 * MIB)
    assert cache.stats()["idle_blocks"] == 0  # a private one would only lie there
    first = cache.acquire(5 * MIB)
    region, fd = first.region
    assert region != 0 and Path(f"/proc/self/fd/{fd}").readlink().name.startswith("memfd")
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(fd, 1)  # who has mapped it would be killed
    assert cache.acquire(3 * MIB).region == (0, -1)  # another size
    first.release()
    assert cache.acquire(5 * MIB).region == (region, fd)


def test_a_discarded_block_is_not_handed_out_again() -> None:
    cache = cache_of(64)
    cache.share(MIB)
    block = cache.acquire(MIB)
    region, fd = block.region
    block.discard()
    block.release()
    assert cache.stats()["idle_blocks"] == 0 and cache.stats()["used_blocks"] == 0
    assert not os.path.lexists(f"/proc/self/fd/{fd}")
    assert cache.acquire(MIB).region[0] != region


def test_shared_blocks_are_limited_and_private_ones_serve_instead() -> None:
    cache = cache_of(0)
    cache.share(MIB)
    blocks = [cache.acquire(MIB) for _ in range(140)]
    shared = sum(block.region[0] != 0 for block in blocks)
    assert 0 < shared < 140
    for block in blocks:
        block.release()
    assert cache.acquire(MIB).region[0] != 0


def test_private_blocks_are_reused_where_no_more_can_be_shared() -> None:
    cache = cache_of(4096)
    cache.share(MIB)
    blocks = [cache.acquire(MIB) for _ in range(140)]
    private = [block for block in blocks if block.region[0] == 0]
    addresses = {block.address for block in private}
    for block in private:
        block.release()
    again = [cache.acquire(MIB) for _ in private]
    assert {block.address for block in again} == addresses
