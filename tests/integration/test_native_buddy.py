"""A carve-out never refuses what fits: the papers' timeline, properties, hostile arguments."""

import ctypes
import hashlib
import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.buddy_pool import (
    SLICE_BYTES,
    BuddyPool,
    Fragmentation,
    HiddenError,
    NoRoomError,
    ScatteredError,
)
from compiler.contract.native_errors import NativeError
from compiler.contract.native_library import KernelLibrary
from tests.factories.checked_kernels import compared_in
from tests.factories.kernels import PORTABLE, library

MB = 1 << 20
POOL_MB = 1536
EXPERT_MB = 150


@pytest.fixture(scope="module")
def kernels() -> KernelLibrary:
    return KernelLibrary(library(PORTABLE))


class FirstFit:
    """What the papers draw: the lowest hole that is large enough, nothing is ever moved."""

    def __init__(self, size: int) -> None:
        self.size, self.held = size, list[tuple[int, int]]()

    @property
    def free(self) -> int:
        return self.size - sum(length for _, length in self.held)

    def put(self, length: int) -> int | None:
        at = 0
        for start, taken in [*sorted(self.held), (self.size, 0)]:
            if start - at >= length:
                self.held.append((at, length))
                return at
            at = max(at, start + taken)
        return None

    def drop(self, at: int) -> None:
        self.held = [item for item in self.held if item[0] != at]


def timeline(seed: int, loads: int = 1500) -> Iterator[int]:
    """Yield sizes in MB: experts of 150 MB among those of mixed widths, as a device loads them."""
    draw = random.Random(seed)
    for _ in range(loads):
        yield EXPERT_MB if draw.random() < 0.35 else draw.randint(6, 50)


def test_the_timeline_at_nine_tenths_never_fails_while_bytes_are_free(
    kernels: KernelLibrary,
) -> None:
    """The oldest experts go until enough bytes are free; then the request must succeed."""
    ours = BuddyPool(kernels, block_bytes=MB, blocks=POOL_MB, handles=1024)
    plain, plain_order, order = FirstFit(POOL_MB), list[int](), list[int]()
    forced = scattered = 0
    draw = random.Random(7)
    for size in timeline(3):
        while plain.free < size + POOL_MB // 10:
            plain.drop(plain_order.pop(draw.randrange(len(plain_order))))
        found = plain.put(size)
        while found is None:
            forced += 1
            plain.drop(plain_order.pop(0))
            found = plain.put(size)
        plain_order.append(found)
    draw = random.Random(7)
    for size in timeline(3):
        while ours.counts()["free_bytes"] < (size + POOL_MB // 10) * MB:
            ours.drop(order.pop(draw.randrange(len(order))))
        try:
            order.append(ours.put(size * MB))
        except ScatteredError:
            scattered += 1
            order.append(ours.make_room(size * MB))
    assert forced > 20
    assert scattered > 0
    assert ours.counts()["moves"] > 0
    assert ours.fragmentation().internal == 0.0


def test_the_drawn_pool_takes_eight_experts_and_two_more(kernels: KernelLibrary) -> None:
    pool = BuddyPool(kernels, block_bytes=MB, blocks=POOL_MB, handles=16)
    experts = [pool.make_room(EXPERT_MB * MB) for _ in range(8)]
    for handle in experts[::2]:
        pool.drop(handle)
    assert pool.counts()["free_bytes"] == (POOL_MB - 4 * EXPERT_MB) * MB
    assert not pool.fragmentation().internal
    for _ in range(6):
        pool.make_room(EXPERT_MB * MB)
    assert pool.counts()["free_bytes"] == 36 * MB
    with pytest.raises(NoRoomError):
        pool.put(EXPERT_MB * MB)
    assert pool.make_room(36 * MB) >= 0


def test_moves_change_no_value_and_come_in_slices(kernels: KernelLibrary) -> None:
    blocks, block = 256, 4096
    memory = ctypes.create_string_buffer(blocks * block)
    base = ctypes.addressof(memory)
    pool = BuddyPool(kernels, block_bytes=block, blocks=blocks, handles=64, base=base, keeps=memory)
    draw, digests = random.Random(5), dict[int, str]()
    for _ in range(60):
        data = draw.randbytes(draw.randint(1, 4) * block - draw.randint(0, 99))
        handle = pool.put(len(data))
        at, size = pool.place(handle)
        memory[at : at + size] = data
        digests[handle] = hashlib.sha256(data).hexdigest()
    for handle in list(digests)[::2]:
        pool.drop(handle)
        del digests[handle]
    before = pool.fragmentation()
    assert before.external > 0.3
    moved = 0
    while (slice_bytes := pool.step(3 * block, hide=False)) is not None:
        assert slice_bytes <= 3 * block
        moved += slice_bytes
        for handle, digest in digests.items():
            at, size = pool.place(handle)
            assert hashlib.sha256(memory[at : at + size]).hexdigest() == digest
    assert moved > 0
    assert pool.fragmentation().external < before.external


def test_a_pinned_allocation_stays_and_one_on_its_way_is_hidden(kernels: KernelLibrary) -> None:
    pool = BuddyPool(kernels, block_bytes=64, blocks=16, handles=8)
    first, large = pool.put(3 * 64), pool.put(10 * 64)
    assert pool.place(large)[0] == 3 * 64
    pool.drop(first)
    pool.pin(large)
    assert pool.step() is None
    with pytest.raises(NativeError):
        pool.drop(large)
    with pytest.raises(ScatteredError):
        pool.make_room(4 * 64)
    pool.pin(large, pinned=False)
    at = pool.place(large)[0]
    assert pool.step(64, hide=False) is None
    assert pool.step(64) == 64
    for call in (pool.place, pool.pin):
        with pytest.raises(HiddenError):
            call(large)
    with pytest.raises(HiddenError):
        pool.dump()
    while pool.step(64) is not None:
        pass
    assert pool.place(large)[0] < at
    assert pool.make_room(6 * 64) >= 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40 * 64), max_size=30), st.randoms(use_true_random=False))
def test_everything_freed_is_one_piece_again(sizes: list[int], order: random.Random) -> None:
    pool = BuddyPool(KernelLibrary(library(PORTABLE)), block_bytes=64, blocks=777, handles=64)
    held = []
    for size in sizes:
        try:
            held.append((pool.put(size), size))
        except (NoRoomError, ScatteredError):
            continue
    ranges = sorted((pool.place(handle)[0], size) for handle, size in held)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
    given_bytes = sum(-(-size // 64) * 64 for _, size in held)
    assert pool.counts()["given_bytes"] == given_bytes
    order.shuffle(held)
    for handle, _ in held:
        pool.drop(handle)
    assert pool.fragmentation() == Fragmentation(0.0, 0.0)
    assert pool.place(pool.put(777 * 64)) == (0, 777 * 64)


def test_random_sequences_keep_every_byte() -> None:
    assert compared_in("tests.factories.buddy_fuzz", 0, 40) == 40 * 250


def test_random_sequences_keep_within_their_memory() -> None:
    assert compared_in("tests.factories.buddy_fuzz", 100, 112, "sanitised") == 12 * 250


def test_a_restored_pool_allocates_as_the_dumped_one(kernels: KernelLibrary) -> None:
    def opened() -> BuddyPool:
        return BuddyPool(kernels, block_bytes=64, blocks=300, handles=50)

    pool, draw = opened(), random.Random(1)
    for _ in range(30):
        pool.put(draw.randint(1, 600))
    for handle in range(0, 30, 3):
        pool.drop(handle)
    other = opened()
    other.restore(pool.dump())
    for size in (1, 700, 64, 3000):
        assert other.put(size) == pool.put(size)
    assert other.dump() == pool.dump()


def test_a_dump_is_looked_at_before_it_is_believed(kernels: KernelLibrary) -> None:
    def opened() -> BuddyPool:
        return BuddyPool(kernels, block_bytes=64, blocks=32, handles=8)

    pool = opened()
    for size in (100, 64, 500):
        pool.put(size)
    dump, refused = pool.dump(), 0
    for at in range(0, len(dump), 4):
        for word in (0, 1, 2, 31, 32, 33, 1 << 31, 0xFFFFFFFF):
            other = opened()
            try:
                other.restore(dump[:at] + word.to_bytes(4, "little") + dump[at + 4 :])
            except NativeError:
                refused += 1
            counts = other.counts()
            assert counts["free_bytes"] + counts["given_bytes"] == 32 * 64
    assert refused > 80
    for cut in (0, 16, len(dump) - 4):
        with pytest.raises(NativeError):
            opened().restore(dump[:cut])
    with pytest.raises(NativeError):
        pool.restore(dump)


@pytest.mark.parametrize(
    ("block", "blocks", "handles"),
    [(63, 8, 8), (96, 8, 8), (64, 0, 8), (64, 8, 0), (64, (1 << 24) + 1, 8), (64, 8, 1 << 21)],
)
def test_a_pool_that_is_none_is_refused(
    kernels: KernelLibrary, block: int, blocks: int, handles: int
) -> None:
    with pytest.raises(NativeError):
        BuddyPool(kernels, block_bytes=block, blocks=blocks, handles=handles)


def test_arguments_that_make_no_sense_are_refused(kernels: KernelLibrary) -> None:
    pool = BuddyPool(kernels, block_bytes=64, blocks=8, handles=8)
    with pytest.raises(NativeError):
        pool.put(0)
    with pytest.raises(NoRoomError):
        pool.put((1 << 64) - 1)
    handle = pool.put(64)
    with pytest.raises(NativeError):
        pool.pin(handle, pinned=False)
    assert SLICE_BYTES > 0
