"""Each setting of the allocator on small samples with the numbers worked out by hand."""

import pytest

from oomdoctor.allocator.caching import CachingAllocator, OutOfSpace
from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.forecast.outcome import replay
from oomdoctor.model.sizes import KIB, MIB

EXPANDS = "expandable_segments:True"


def allocator_of(conf, capacity=None):
    return CachingAllocator(capacity, settings=AllocatorSettings.parse(conf))


def mapped(allocator):
    """Return the mapped ranges as (offset from the first, size), in MiB."""
    ranges = [(part["address"], part["total_size"]) for part in allocator.memory_snapshot()]
    return [((address - ranges[0][0]) / MIB, size / MIB) for address, size in ranges]


def test_an_expandable_segment_grows_page_by_page():
    allocator = allocator_of(EXPANDS)
    first, second = allocator.malloc(12 * MIB), allocator.malloc(12 * MIB)
    assert second.address == first.address + 12 * MIB
    assert (allocator.reserved, mapped(allocator)) == (40 * MIB, [(0, 40)])  # two pages of 20 MiB
    allocator.malloc(16 * MIB)  # the 16 MiB that are left
    assert allocator.reserved == 40 * MIB
    allocator.malloc(50 * MIB)
    assert (allocator.reserved, mapped(allocator)) == (100 * MIB, [(0, 100)])


def test_small_requests_have_a_segment_with_smaller_pages_and_each_stream_its_own():
    allocator = allocator_of(EXPANDS)
    for stream in (0, 7):
        allocator.malloc(KIB, stream)
        allocator.malloc(MIB, stream)
    assert [part["total_size"] for part in allocator.memory_snapshot()] == [2 * MIB, 2 * MIB]
    allocator.malloc(2 * MIB)
    assert allocator.reserved == 24 * MIB


def test_the_page_of_large_requests_is_the_large_segment():
    allocator = allocator_of(f"{EXPANDS},large_segment_size_mb:32")
    allocator.malloc(2 * MIB)
    assert allocator.reserved == 32 * MIB


def test_an_expandable_block_is_split_down_to_its_last_512_bytes():
    allocator = allocator_of(EXPANDS)
    block = allocator.malloc(20 * MIB - 512)
    assert block.size == 20 * MIB - 512
    assert [free.size for free in allocator.free_blocks()] == [512]


def test_what_fits_nowhere_without_gaps_fits_in_one_that_grows():
    """Two freed blocks on both sides of a live one: their pages are unmapped, and mapped again behind it."""
    requests = [30 * MIB, 30 * MIB, 30 * MIB]
    fixed, grows = CachingAllocator(100 * MIB), allocator_of(EXPANDS, 100 * MIB)
    for allocator in (fixed, grows):
        blocks = [allocator.malloc(nbytes) for nbytes in requests]
        allocator.free(blocks[0])
        allocator.free(blocks[2])
    assert (fixed.reserved, grows.reserved) == (90 * MIB, 100 * MIB)
    assert fixed.malloc(60 * MIB).size == 60 * MIB  # both free segments are given back whole
    block = grows.malloc(60 * MIB)
    assert (grows.retries, grows.reserved) == (1, 100 * MIB)
    # One page of the first 30 MiB could go, the other is shared with the live block; the rest is mapped behind it.
    assert mapped(grows) == [(0, 100)]
    assert block.size == 60 * MIB


def test_whole_free_pages_are_unmapped_and_what_lies_beside_them_stays():
    allocator = allocator_of(EXPANDS)
    before, middle, after = allocator.malloc(10 * MIB), allocator.malloc(60 * MIB), allocator.malloc(10 * MIB)
    assert mapped(allocator) == [(0, 80)]
    allocator.free(middle)
    allocator.empty_cache()
    assert mapped(allocator) == [(0, 20), (60, 20)]  # 10 to 70 MiB was free: pages 20 to 60 are whole
    assert [free.size for free in allocator.free_blocks()] == [10 * MIB, 10 * MIB]
    again = allocator.malloc(45 * MIB)  # the lowest hole with the free blocks around it
    assert again.address == before.address + 10 * MIB
    assert mapped(allocator) == [(0, 80)]
    for block in (before, again, after):
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.memory_snapshot()) == (0, [])


def test_pages_that_were_mapped_for_a_request_that_failed_stay_as_free_blocks():
    """A hole is filled, then the driver has no more: cuMemCreate fails for the second hole alone."""
    allocator = allocator_of(EXPANDS, 100 * MIB)
    parts = [allocator.malloc(20 * MIB) for _ in range(4)]
    allocator.free(parts[1])
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB
    allocator.free(parts[2])
    with pytest.raises(OutOfSpace) as refused:
        allocator.malloc(90 * MIB)
    assert refused.value.segment == 90 * MIB
    assert allocator.reserved <= 100 * MIB
    assert (allocator.allocated, allocator.failures) == (40 * MIB, 1)


def test_a_request_beyond_the_addresses_is_refused():
    allocator = allocator_of(EXPANDS, 100 * MIB)
    with pytest.raises(OutOfSpace):
        allocator.malloc(500 * MIB)
    assert (allocator.reserved, allocator.allocated) == (0, 0)


def test_expandable_segments_have_no_inactive_split():
    allocator = allocator_of(EXPANDS)
    blocks = [allocator.malloc(30 * MIB) for _ in range(3)]
    allocator.free(blocks[1])
    assert allocator.inactive_split == 0
    assert allocator.largest_free_block == 30 * MIB


def test_once_switched_off_expandable_blocks_serve_no_more():
    allocator = allocator_of(EXPANDS)
    freed = allocator.malloc(20 * MIB)
    allocator.free(freed)
    allocator.settings = AllocatorSettings()
    assert allocator.malloc(20 * MIB).address != freed.address
    allocator.settings = AllocatorSettings(expandable_segments=True)
    assert allocator.malloc(20 * MIB).address == freed.address


def test_blocks_of_the_split_limit_or_more_are_never_split():
    allocator = allocator_of("max_split_size_mb:40")
    large = allocator.malloc(60 * MIB)
    allocator.free(large)
    assert allocator.malloc(12 * MIB).address != large.address  # it would be a part of an oversize block
    assert allocator.malloc(41 * MIB).address == large.address  # within 20 MiB of its size
    assert large.size == 60 * MIB
    assert allocator.reserved == 72 * MIB


def test_an_oversize_block_serves_what_is_within_the_rounding_alone():
    allocator = allocator_of("max_split_size_mb:40,max_non_split_rounding_mb:24")
    large = allocator.malloc(80 * MIB)
    allocator.free(large)
    assert allocator.malloc(56 * MIB).address != large.address  # 24 MiB more is too much
    assert allocator.malloc(56 * MIB + 1).address == large.address


def test_just_enough_oversize_blocks_are_given_back_first():
    allocator = allocator_of("max_split_size_mb:40", 300 * MIB)
    kept = [allocator.malloc(nbytes * MIB) for nbytes in (30, 50, 60, 90)]
    for block in kept:
        allocator.free(block)
    assert allocator.reserved == 230 * MIB
    allocator.malloc(140 * MIB)  # 90 and 60 go, the largest first; 50 and 30 stay
    assert (allocator.reserved, allocator.retries) == (220 * MIB, 0)
    assert [free.size // MIB for free in allocator.free_blocks()] == [30, 50]


def test_the_smallest_oversize_block_that_is_enough_goes_alone():
    allocator = allocator_of("max_split_size_mb:40", 200 * MIB)
    for block in [allocator.malloc(nbytes * MIB) for nbytes in (60, 100)]:
        allocator.free(block)
    allocator.malloc(70 * MIB)
    assert [free.size // MIB for free in allocator.free_blocks()] == [60]
    assert (allocator.reserved, allocator.retries) == (130 * MIB, 0)


def test_a_fraction_limits_what_is_reserved_whatever_the_driver_has():
    allocator = allocator_of("per_process_memory_fraction:0.5", 100 * MIB)
    allocator.malloc(40 * MIB)
    with pytest.raises(OutOfSpace):
        allocator.malloc(12 * MIB)
    allocator.malloc(10 * MIB)
    assert allocator.reserved == allocator.limit_bytes == 50 * MIB
    allocator.set_per_process_memory_fraction(1.0)
    assert allocator.limit_bytes is None
    allocator.malloc(50 * MIB)
    assert allocator.reserved == 100 * MIB


def test_a_replay_runs_under_settings():
    events = [("alloc", number, 30 * MIB) for number in range(4)] + [("free", 1), ("alloc", 4, 35 * MIB)]

    def replayed(conf, capacity=None):
        return replay(events, CachingAllocator(capacity, settings=AllocatorSettings.parse(conf)))

    plain, grows = replayed(""), replayed("expandable_segments:True")
    assert (plain.peak_reserved, grows.peak_reserved) == (120 * MIB + 36 * MIB, 160 * MIB)
    assert replayed("roundup_power2_divisions:1") == plain
    assert replayed("per_process_memory_fraction:0.5", 200 * MIB).failed_at == 3
