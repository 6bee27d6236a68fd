"""Each rule of the allocator on a small sample, with the numbers worked out by hand."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomdoctor.allocator.caching import CachingAllocator, OutOfSpace
from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.forecast.outcome import replay
from oomdoctor.model.sizes import KIB, MIB


def spans(allocator):
    return [(block.address, block.size) for block in allocator.free_blocks()]


@pytest.mark.parametrize(("segment", "least"), [(2, 1), (20, MIB + 1), (10, 8 * MIB + 1), (32, 30 * MIB + 1)])
def test_what_was_asked_for_at_least_where_a_segment_could_not_be_had(segment, least):
    assert AllocatorSettings().least_asked(segment * MIB) == least
    wider = AllocatorSettings(large_segment_size=32 * MIB)
    assert wider.least_asked(segment * MIB) == (MIB + 1 if segment == 32 else 18 * MIB + 1 if segment == 20 else least)


@pytest.mark.parametrize(("nbytes", "size"), [(1, 512), (512, 512), (513, 1024), (1000, 1024), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_to_512_bytes(nbytes, size):
    allocator = CachingAllocator()
    assert allocator.malloc(nbytes).size == size
    assert allocator.allocated == size


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_come_in_the_sizes_of_their_pool(size, segment):
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert allocator.reserved == segment


def test_nothing_needs_no_block():
    allocator = CachingAllocator(0)
    assert allocator.malloc(0) is None
    allocator.free(None)
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_small_and_large_requests_never_share_a_segment():
    allocator = CachingAllocator()
    allocator.malloc(2 * MIB)  # leaves 18 MiB free in a large segment
    allocator.malloc(4 * KIB)
    assert allocator.reserved == 20 * MIB + 2 * MIB


def test_streams_never_share_a_segment():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(KIB, stream=7))
    allocator.malloc(KIB)
    assert allocator.reserved == 4 * MIB
    allocator.malloc(KIB, stream=7)
    assert allocator.reserved == 4 * MIB


def test_a_small_block_is_split_down_to_its_last_512_bytes():
    allocator = CachingAllocator()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert [size for _, size in spans(allocator)] == [512]


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_remains():
    whole = CachingAllocator()
    for part in (10 * MIB - 512, 9 * MIB + 512):  # 20 MiB - 9.9995 MiB leaves 10.0005; 1 MiB of that remains
        block = whole.malloc(part)
    assert block.size == 10 * MIB + 512
    assert whole.allocated == 20 * MIB
    assert spans(whole) == []
    split = CachingAllocator()
    for part in (10 * MIB - 512, 9 * MIB):  # 1 MiB + 512 B remains
        split.malloc(part)
    assert [size for _, size in spans(split)] == [MIB + 512]


def test_the_smallest_block_that_fits_is_taken_and_of_equals_the_lowest():
    allocator = CachingAllocator()
    parts = [allocator.malloc(n * KIB) for n in (64, 1, 16, 1, 16, 1)]
    for index in (0, 4, 2):
        allocator.free(parts[index])
    lower, upper = sorted((parts[2].address, parts[4].address))
    assert allocator.malloc(16 * KIB).address == lower
    assert allocator.malloc(10 * KIB).address == upper
    assert allocator.malloc(17 * KIB).address == parts[0].address


def test_a_freed_block_joins_its_free_neighbours_on_both_sides():
    allocator = CachingAllocator()
    first, second, third = (allocator.malloc(4 * KIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)  # joins the free end of the segment
    assert [size for _, size in spans(allocator)] == [4 * KIB, 2 * MIB - 8 * KIB]
    assert allocator.inactive_split == 2 * MIB - 4 * KIB
    assert allocator.largest_free_block == 2 * MIB - 8 * KIB
    allocator.free(second)
    assert [size for _, size in spans(allocator)] == [2 * MIB]
    assert allocator.inactive_split == 0


def test_freed_memory_stays_reserved_until_the_cache_is_emptied():
    allocator = CachingAllocator()
    kept, freed = allocator.malloc(KIB), allocator.malloc(30 * MIB)
    allocator.free(freed)
    assert allocator.reserved == 32 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 2 * MIB  # the small segment is in use by one block
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved, spans(allocator)) == (0, [])


def test_free_segments_are_given_back_before_a_request_is_refused():
    allocator = CachingAllocator(40 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    assert allocator.malloc(36 * MIB).size == 36 * MIB  # a free block of 30 MiB is too small, and in the way
    assert (allocator.reserved, allocator.retries, allocator.failures) == (36 * MIB, 1, 0)


def test_a_refusal_takes_nothing_and_says_what_was_asked_for():
    allocator = CachingAllocator(40 * MIB)
    held = allocator.malloc(30 * MIB)
    with pytest.raises(OutOfSpace) as refused:
        allocator.malloc(5 * MIB)  # 5 MiB would fit, its segment of 20 MiB does not
    assert (refused.value.requested, refused.value.segment) == (5 * MIB, 20 * MIB)
    assert (allocator.allocated, allocator.reserved) == (30 * MIB, 30 * MIB)
    assert (allocator.retries, allocator.failures) == (1, 1)
    allocator.free(held)
    assert allocator.malloc(5 * MIB).size == 5 * MIB


def test_what_is_split_cannot_be_given_back_however_large():
    allocator = CachingAllocator(40 * MIB)
    blocks = [allocator.malloc(2 * MIB) for _ in range(20)]
    for block in blocks[:9] + blocks[10:19]:
        allocator.free(block)
    assert (allocator.allocated, allocator.inactive_split) == (4 * MIB, 36 * MIB)
    with pytest.raises(OutOfSpace):
        allocator.malloc(19 * MIB)
    assert allocator.largest_free_block == 18 * MIB


def test_peaks_are_high_water_marks_since_the_last_reset():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    assert (allocator.peak_allocated, allocator.peak_reserved) == (30 * MIB, 30 * MIB)
    allocator.empty_cache()
    allocator.reset_peak()
    allocator.malloc(KIB)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (KIB, 2 * MIB)


def test_it_takes_over_the_segments_of_a_real_allocator():
    snapshot = [
        {
            "address": 4096,
            "total_size": 2 * MIB,
            "segment_type": "small",
            "stream": 0,
            "blocks": [
                {"size": KIB, "state": "active_allocated"},
                {"size": 3 * KIB, "state": "inactive"},
                {"size": KIB, "state": "active_pending_free"},
                {"size": 2 * MIB - 5 * KIB, "state": "inactive"},
            ],
        },
        {
            "address": 1 << 30,
            "total_size": 20 * MIB,
            "segment_type": "large",
            "stream": 0,
            "segment_pool_id": (0, 1),
            "blocks": [{"size": 20 * MIB, "state": "inactive"}],
        },
    ]
    allocator = CachingAllocator()
    in_use = allocator.seed(snapshot)
    assert list(in_use) == [4096]
    assert (allocator.allocated, allocator.reserved, allocator.peak_reserved) == (KIB, 22 * MIB, 22 * MIB)
    assert allocator.malloc(2 * KIB).address == 4096 + KIB
    allocator.malloc(2 * MIB)  # the free block of the private pool serves nobody
    assert allocator.reserved == 42 * MIB
    allocator.free(in_use[4096])
    assert allocator.inactive_split == 2 * MIB - 2 * KIB + 18 * MIB


def test_replay_returns_peaks():
    events = [("alloc", "a", 30 * MIB), ("free", "a"), ("free", "never seen"), ("alloc", "b", 12 * MIB)]
    allocator = CachingAllocator()
    told = replay(events, allocator)
    assert (told.peak_allocated, told.peak_reserved, told.failed_at) == (30 * MIB, 30 * MIB, None)
    assert (allocator.allocated, allocator.retries) == (30 * MIB - 18 * MIB, 0)


def test_replay_ends_where_it_fails():
    events = [("alloc", 1, 30 * MIB), ("alloc", 2, 5 * MIB), ("free", 1)]
    allocator = CachingAllocator(40 * MIB)
    told = replay(events, allocator)
    assert (told.failed_at, told.peak_allocated) == (1, 30 * MIB)
    assert (allocator.allocated, allocator.retries) == (30 * MIB, 1)


def test_replay_goes_on_from_what_was_there():
    allocator = CachingAllocator(50 * MIB)
    model = allocator.malloc(30 * MIB)
    events = [("alloc", 1, 12 * MIB), ("free", "model"), ("alloc", 2, 30 * MIB)]
    told = replay(events, allocator, {"model": model})
    assert (told.peak_allocated, told.peak_reserved, told.failed_at) == (42 * MIB, 42 * MIB, None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MIB), st.integers(0, 1)), max_size=80),
    st.sampled_from([None, 64 * MIB]),
)
def test_blocks_never_overlap_and_every_byte_is_accounted_for(steps, capacity):
    allocator, live = CachingAllocator(capacity), []
    for grows, nbytes, stream in steps:
        if grows or not live:
            try:
                live.append(allocator.malloc(nbytes, stream))
            except OutOfSpace:
                assert capacity is not None
        else:
            allocator.free(live.pop(nbytes % len(live)))
        free = list(allocator.free_blocks())
        assert allocator.allocated == sum(block.size for block in live)
        assert allocator.reserved == allocator.allocated + sum(block.size for block in free)
        assert capacity is None or allocator.reserved <= capacity
        in_order = sorted([*live, *free], key=lambda block: block.address)
        for block, after in pairwise(in_order):
            assert block.address + block.size <= after.address
            if block.next is after:
                assert "inactive" not in (block.state, after.state) or block.state != after.state, (
                    "free neighbours are joined"
                )
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved, allocator.inactive_split) == (0, 0, 0)


def test_an_event_costs_microseconds():
    allocator = CachingAllocator()
    live = [allocator.malloc(KIB * (n % 700 + 1)) for n in range(2000)]
    for block in live[::2]:
        allocator.free(block)
    costs = []
    for _ in range(5):
        began = time.process_time()
        for n in range(1000):
            allocator.free(allocator.malloc(KIB * (n % 600 + 1)))
        costs.append((time.process_time() - began) / 2000)
    assert min(costs) < 5e-6
