"""The fast model against a plain one on random programs, under every combination of the settings."""

import pytest
from allocator_programs import (
    CAPACITIES,
    COMBINATIONS,
    STEPS,
    Program,
    blocks_of,
    cells_of,
    check_invariants,
    fast,
    few,
    naive,
)
from hypothesis import given


@pytest.mark.parametrize("conf", COMBINATIONS)
@few(12)
@given(steps=STEPS, capacity=CAPACITIES)
def test_it_does_what_the_rules_say(conf, steps, capacity):
    program, plain = Program(fast(conf, capacity)), Program(naive(conf, capacity))
    for step in steps:
        assert program.step(*step) == plain.step(*step)
        assert program.allocator.reserved == plain.allocator.reserved
        check_invariants(program.allocator, program.live)
    assert blocks_of(program.allocator.memory_snapshot()) == cells_of(plain.allocator)
    assert program.allocator.retries == plain.allocator.retries
    again = Program(fast(conf, capacity))
    for step in steps:
        again.step(*step)
    assert again.allocator.memory_snapshot() == program.allocator.memory_snapshot(), "the same each time"
    while program.live:
        program.allocator.free(program.live.pop())
    assert program.allocator.allocated == 0
    program.allocator.empty_cache()
    assert (program.allocator.reserved, program.allocator.memory_snapshot()) == (0, [])
    assert not any(segment.head.state != "unmapped" for segment in program.allocator._segments.values())
