"""Packed sequences are followed by their lengths, where these are known, and by the longest where they are not."""

import pytest
import torch
from forecast_lab import forecast, measured_rise, rise, rises
from torch import nn

BEGIN = """
layer = {layer}(32, 64, num_layers=2, batch_first={first})
head = nn.Linear(64, 10)
lengths = {lengths}
x = torch.randn({shape}, 32)
"""
TRAINED = """
packed = rnn.pack_padded_sequence(x, lengths, batch_first={first}, enforce_sorted={order})
out, state = layer(packed)
padded, found = rnn.pad_packed_sequence(out, batch_first={first})
assert padded.shape[{steps}] == max(found) and found.tolist() == list(lengths)
head(padded).pow(2).sum().backward()
"""
SORTED, MIXED = [60, 40, 40, 25] * 4, [25, 60, 40, 40] * 4
CASES = {
    "sorted": ("nn.LSTM", sorted(SORTED, reverse=True), True, True),
    "mixed": ("nn.LSTM", MIXED, True, False),
    "steps_first": ("nn.GRU", MIXED, False, False),
    "as_a_tensor": ("nn.RNN", f"torch.tensor({MIXED})", True, False),
}


def source(layer, lengths, first, order):
    shape = "16, 60" if first else "60, 16"
    given = {"layer": layer, "lengths": lengths, "first": first, "order": order, "shape": shape, "steps": int(first)}
    return (BEGIN + TRAINED).format(**given)


def program():
    return {"torch": torch, "nn": nn, "rnn": nn.utils.rnn}


@pytest.fixture(scope="module")
def rises_of_cases():
    return rises(program(), {name: source(*case) for name, case in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_the_real_run(name, rises_of_cases):
    assert rises_of_cases[name] == pytest.approx(measured_rise(program(), source(*CASES[name])), rel=0.01)


def test_lengths_of_before_the_cell_are_known():
    begin, trained = BEGIN + "", TRAINED
    given = {"layer": "nn.LSTM", "lengths": f"torch.tensor({MIXED})", "first": True, "order": False, "shape": "16, 60"}
    ns = program()
    exec(begin.format(**given), ns)
    cell = trained.format(**given, steps=1)
    assert rise(ns, cell) == pytest.approx(measured_rise(ns, cell), rel=0.01)


def test_of_lengths_that_nobody_knows_each_is_the_longest():
    cell = """
lengths = (torch.randn(16, 60) > 0).sum(1)
packed = rnn.pack_padded_sequence(torch.randn(16, 60, 32), lengths, batch_first=True, enforce_sorted=False)
size = packed.data.shape[0]
assert size == 16 * 60
"""
    assert forecast(program(), cell).refused is None
