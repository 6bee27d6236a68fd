"""Random programs for the allocator under every combination of its settings, and what must hold at any time."""

from itertools import count, pairwise, product

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from naive_allocator import NaiveAllocator, NoRoom

from oomdoctor.allocator.caching import CachingAllocator, OutOfSpace
from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.model.sizes import KIB, MIB

LIST = "[2:4,8:0,16:2,>:8]"
COMBINATIONS = [
    ",".join(filter(None, chosen))
    for chosen in product(
        ("", "expandable_segments:True"),
        ("", "max_split_size_mb:24", "max_split_size_mb:36,large_segment_size_mb:12"),
        ("", "roundup_power2_divisions:4", f"roundup_power2_divisions:{LIST}"),
        ("", "per_process_memory_fraction:0.7"),
    )
]

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(200 * KIB, MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(12 * MIB, 70 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB, 20 * MIB, 24 * MIB, 36 * MIB, 40 * MIB]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), SIZES, st.sampled_from([0, 0, 0, 7])),
        st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    min_size=8,
    max_size=60,
)
CAPACITIES = st.sampled_from([None, 64 * MIB, 130 * MIB, 200 * MIB])


def few(examples):
    """Return hypothesis's settings for a test that runs under each combination."""
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
    )


DIVISIONS_OF_LIST = [4, 4, 0, 0, 2] + [8] * 11
"""Of sizes below 2, 4, 8, 16 and 32 MiB, and of more: 4 MiB is named by nobody, and has none."""


def naive(conf, capacity):
    """Return the plain model with the settings as this test reads them."""
    options = dict(pair.split(":", 1) for pair in conf.replace(LIST, "LIST").split(",") if pair)
    divisions = options.pop("roundup_power2_divisions", "0")
    expands = options.pop("expandable_segments", "False") == "True"
    numbers = {name: float(value) if "." in value else int(value) for name, value in options.items()}
    numbers["expandable_segments"] = expands
    numbers["roundup_power2_divisions"] = DIVISIONS_OF_LIST if divisions == "LIST" else [int(divisions)] * 16
    return NaiveAllocator(capacity, numbers, count(1 << 44, 1 << 44))


def fast(conf, capacity):
    return CachingAllocator(capacity, settings=AllocatorSettings.parse(conf), addresses=count(1 << 44, 1 << 44))


class Program:
    """One random program, run step by step on an allocator."""

    def __init__(self, allocator):
        self.allocator, self.live = allocator, []

    def step(self, action, what, stream):
        """Run one step and return what can be seen of it."""
        if action == "alloc":
            try:
                block = self.allocator.malloc(what, stream)
            except (OutOfSpace, NoRoom):
                return "refused"
            self.live.append(block)
            return block.address, block.size
        if action == "free":
            if self.live:
                self.allocator.free(self.live.pop(what % len(self.live)))
        else:
            self.allocator.empty_cache()
        return None


def blocks_of(snapshot):
    return [(block["address"], block["size"], block["state"]) for part in snapshot for block in part["blocks"]]


def cells_of(model):
    cells = (cell for place in model.ranges for cell in place.cells if cell.state != "unmapped")
    return sorted((cell.address, cell.size, cell.state) for cell in cells)


def check_invariants(allocator, live):
    snapshot = allocator.memory_snapshot()
    blocks = blocks_of(snapshot)
    for (address, size, state), (following, _, after) in pairwise(blocks):
        assert address + size <= following, "blocks do not overlap"
        if address + size == following and state == after == "inactive":
            assert any(part["address"] == following for part in snapshot), "free neighbours are joined"
    assert allocator.reserved == sum(size for _, size, _ in blocks)
    assert allocator.allocated == sum(size for _, size, state in blocks if state == "active_allocated")
    assert sorted(block.address for block in live) == [
        address for address, _, state in blocks if state == "active_allocated"
    ]
    assert allocator.allocated <= allocator.reserved <= (allocator.capacity_bytes or allocator.reserved)
    assert sorted((block.address, block.size) for block in allocator.free_blocks()) == [
        (address, size) for address, size, state in blocks if state == "inactive"
    ]
    assert 0 <= allocator.inactive_split <= allocator.reserved - allocator.allocated
    assert allocator.peak_allocated <= allocator.peak_reserved
    for part in snapshot:
        assert part["total_size"] == sum(block["size"] for block in part["blocks"])
        assert part["requested_size"] <= part["active_size"]
