"""The state of an allocator, written and read in the form of ``torch.cuda.memory_snapshot()``."""

from itertools import count

import pytest
from allocator_programs import CAPACITIES, COMBINATIONS, STEPS, Program, check_invariants, fast, few
from hypothesis import given

from oomdoctor.allocator.caching import CachingAllocator
from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.model.sizes import KIB, MIB

EXPANDS = AllocatorSettings(expandable_segments=True)


def record(address, *blocks, kind="large", expandable=False, **others):
    """Return a record as torch writes it: blocks as (size, state)."""
    parts = [{"size": size, "requested_size": size, "state": state} for size, state in blocks]
    size = sum(size for size, _ in blocks)
    told = {"address": address, "total_size": size, "stream": 0, "segment_type": kind, "is_expandable": expandable}
    return {**told, "blocks": parts, **others}


def test_the_record_of_a_segment():
    allocator = CachingAllocator()
    allocator.malloc(1000)
    freed = allocator.malloc(3 * KIB)
    allocator.malloc(513)
    allocator.free(freed)
    (told,) = allocator.memory_snapshot()
    blocks = [(block["size"], block["requested_size"], block["state"]) for block in told.pop("blocks")]
    assert told == {
        "device": 0,
        "address": 1 << 40,
        "total_size": 2 * MIB,
        "allocated_size": 2 * KIB,
        "active_size": 2 * KIB,
        "requested_size": 1513,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
    }
    assert blocks == [
        (KIB, 1000, "active_allocated"),
        (3 * KIB, 0, "inactive"),
        (KIB, 513, "active_allocated"),
        (2 * MIB - 5 * KIB, 0, "inactive"),
    ]


@pytest.mark.parametrize("conf", COMBINATIONS)
@few(8)
@given(steps=STEPS, capacity=CAPACITIES)
def test_what_was_written_is_read_again(conf, steps, capacity):
    program = Program(fast(conf, capacity))
    for step in steps:
        program.step(*step)
    told = program.allocator.memory_snapshot()
    taken_over = CachingAllocator(capacity, settings=program.allocator.settings)
    live = taken_over.seed(told)
    assert taken_over.memory_snapshot() == told
    assert (taken_over.allocated, taken_over.reserved) == (program.allocator.allocated, program.allocator.reserved)
    check_invariants(taken_over, live.values())
    for block in live.values():
        taken_over.free(block)
    taken_over.empty_cache()
    assert (taken_over.allocated, taken_over.reserved, taken_over.memory_snapshot()) == (0, 0, [])


@pytest.mark.parametrize("conf", [conf for conf in COMBINATIONS if "expand" not in conf])
@few(8)
@given(steps=STEPS, capacity=CAPACITIES)
def test_it_goes_on_as_the_one_that_was_written(conf, steps, capacity):
    """The unused addresses of expandable segments are not written."""
    half = len(steps) // 2
    program = Program(fast(conf, capacity))
    for step in steps[:half]:
        program.step(*step)
    other = Program(CachingAllocator(capacity, settings=program.allocator.settings, addresses=count(1 << 60, 1 << 44)))
    live = other.allocator.seed(program.allocator.memory_snapshot())
    other.live = [live[block.address] for block in program.live]
    for step in steps[half:]:
        seen, expected = other.step(*step), program.step(*step)
        assert seen == expected or (seen[0] >= 1 << 60 and seen[1] == expected[1])
        assert other.allocator.reserved == program.allocator.reserved


def test_the_ranges_of_an_expandable_segment_are_one_segment_again():
    base = 0x7F00_0020_0000
    allocator = CachingAllocator(1000 * MIB, settings=EXPANDS)
    used, free = "active_allocated", "inactive"
    live = allocator.seed(
        [
            record(base, (12 * MIB, used), (8 * MIB, free), expandable=True),
            record(base + 60 * MIB, (5 * MIB, free), (15 * MIB, used), expandable=True),
            record(0x7E00_0000_0000, (MIB, used), (MIB, free), kind="small", expandable=True),
        ]
    )
    assert sorted(live) == [0x7E00_0000_0000, base, base + 65 * MIB]
    assert (allocator.allocated, allocator.reserved) == (28 * MIB, 42 * MIB)
    assert allocator.malloc(40 * MIB).address == base + 12 * MIB  # 8 free, and 40 unmapped behind it
    assert allocator.reserved == 82 * MIB
    assert allocator.malloc(30 * MIB).address == base + 80 * MIB  # at the end
    assert allocator.malloc(MIB + 512).address == base + 52 * MIB  # what is left between
    for block in live.values():
        allocator.free(block)
    assert [part["total_size"] for part in allocator.memory_snapshot()] == [2 * MIB, 120 * MIB]


def test_an_expandable_segment_ends_where_another_begins():
    base = 1 << 46
    allocator = CachingAllocator(1000 * MIB, settings=EXPANDS)
    allocator.seed(
        [
            record(base, (20 * MIB, "active_allocated"), expandable=True),
            record(base + 50 * MIB, (20 * MIB, "active_allocated")),
        ]
    )
    assert allocator.malloc(20 * MIB).address == base + 20 * MIB
    beyond = allocator.malloc(20 * MIB)  # 10 MiB of addresses are left before the next segment: not a page
    assert beyond.address > base + 70 * MIB


def test_ranges_too_far_apart_or_on_other_pages_are_segments_of_their_own():
    base = 1 << 46
    allocator = CachingAllocator(100 * MIB, settings=EXPANDS)  # 112.5 MiB of addresses: six pages
    free = (20 * MIB, "inactive")
    allocator.seed(
        [
            record(base, free, expandable=True),
            record(base + 30 * MIB, free, expandable=True),  # half a page off
            record(base + (1 << 40), free, expandable=True),
        ]
    )
    assert allocator.reserved == 60 * MIB
    assert len({id(block.segment) for block in allocator.free_blocks()}) == 3
    allocator.empty_cache()
    assert (allocator.reserved, allocator.memory_snapshot()) == (0, [])


def test_expandable_segments_of_the_parent_serve_no_request_where_they_are_switched_off_now():
    allocator = CachingAllocator()
    allocator.seed([record(1 << 46, (20 * MIB, "inactive"), expandable=True), record(1 << 47, (30 * MIB, "inactive"))])
    assert allocator.malloc(20 * MIB).address == 1 << 47
    allocator.empty_cache()
    assert allocator.reserved == 30 * MIB


def test_private_pools_serve_nobody_and_get_their_blocks_back():
    allocator = CachingAllocator()
    live = allocator.seed(
        [record(1 << 46, (12 * MIB, "active_allocated"), (8 * MIB, "inactive"), segment_pool_id=(0, 1))]
    )
    assert allocator.malloc(8 * MIB).address != (1 << 46) + 12 * MIB
    allocator.free(live[1 << 46])
    assert allocator.malloc(20 * MIB).address != 1 << 46
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB
    assert allocator.memory_snapshot()[0]["segment_pool_id"] == (0, 1)


@pytest.mark.parametrize("state", ["active_pending_free", "active_awaiting_free"])
def test_blocks_that_waited_for_a_stream_are_free(state):
    allocator = CachingAllocator(40 * MIB)
    assert allocator.seed([record(1 << 46, (30 * MIB, state))]) == {}
    assert (allocator.allocated, allocator.reserved) == (0, 30 * MIB)
    allocator.malloc(36 * MIB)
    assert (allocator.reserved, allocator.retries) == (36 * MIB, 1)


def test_new_segments_lie_beyond_those_that_were_taken_over():
    allocator = CachingAllocator()
    allocator.seed([record(1 << 46, (30 * MIB, "active_allocated"))])
    addresses = [allocator.malloc(30 * MIB).address for _ in range(3)]
    assert min(addresses) > (1 << 46) + 30 * MIB
    assert len(set(addresses)) == 3
