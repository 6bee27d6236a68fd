"""The model against what real GPUs did: recorded traces, replayed to the same addresses."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from allocator_traces import TRACES, read, run

NAMES = ["a1", "a2", "a3", "a4", "b1", "c1", "c2", "c3", "d1", "d2", "d3", "d4"]

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the recorded traces are not at {TRACES}")


@pytest.mark.parametrize("name", NAMES)
def test_every_allocation_lands_where_it_did(name):
    told = run(read(TRACES / f"{name}.json.gz"))
    assert told.identical == told.allocations
    assert told.taken == told.segments
    assert told.reserved == told.expected
