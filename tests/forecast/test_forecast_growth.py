"""Loops in which every iteration keeps something: the iterations that a dry run leaves out count, to the last."""

import collections
import copy
import itertools

import numpy as np
import pytest
import torch
from forecast_lab import STEP, forecast, measured_rise, mlp, rise, rises
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from oomdoctor.forecast.growth import Cut, Growth

MIB = 1 << 20

EPOCHS = "for epoch in range(6):\n    {begin}\n    for x, y in loader:" + STEP.format(indent=" " * 8)

CELLS = {
    "graphs_in_a_list": "x, y = torch.randn(2, 128, 64)\nkept = []\nfor step in range(40):"
    + STEP.format(indent="    ")
    + "    kept.append(functional.mse_loss(model(torch.randn_like(x)), y))",
    "outputs_over_epochs": "kept = []\n" + EPOCHS.format(begin="model.train()") + " " * 8 + "kept.append(out.detach())",
    "outputs_of_one_epoch": EPOCHS.format(begin="kept = []") + " " * 8 + "kept.append(out.detach())",
    "one_of_each_epoch": "kept = []\n" + EPOCHS.format(begin="kept.append(torch.randn(60_000))"),
    "nothing": EPOCHS.format(begin="pass"),
    "evaluation_with_graphs": "out = torch.cat([model(x) for x, y in loader])\nwrong = out - data.tensors[1]",
    "up_to_a_length_that_is_not_reached": "kept = collections.deque(maxlen=500)\n"
    + EPOCHS.format(begin="pass")
    + " " * 8
    + "kept.append((epoch, out.detach(), x * 2))",
    "batches_that_do_not_come_again": "again = itertools.cycle(loader)\nfor step in range(8):\n    x, y = next(again)"
    + STEP.format(indent="    "),
    "batches_that_come_again_beside_others": "for (x, y), _ in zip(itertools.cycle(loader), range(10)):"
    + STEP.format(indent="    "),
    "numbered": "kept = []\nfor step, (x, y) in enumerate(loader):"
    + STEP.format(indent="    ")
    + "    kept.append(out.detach())",
    "by_twos": "kept = []\nfor (x, y), (z, _) in zip(loader, loader):"
    + STEP.format(indent="    ")
    + "    kept.append(z + out.detach())",
    "the_first_of_them": "kept = []\nfor x, y in itertools.islice(loader, 10):"
    + STEP.format(indent="    ")
    + "    kept.append(out.detach())",
    "copies_of_the_model": EPOCHS.format(begin="last.append(copy.deepcopy(model))"),
    "arrays_in_a_list": "kept = []\nfor x, y in loader:\n    kept.append(model(x).detach().cpu().numpy())",
    "arrays_of_labels": "kept = []\nfor x, y in loader:\n    kept.append(torch.arange(8192).add(1).numpy())",
    "evaluation_in_a_loop": "kept = []\nfor x, y in loader:\n    kept.append(model(x))\nout = torch.cat(kept)",
}


PILED = {
    "joined_in_a_function": """
def evaluate(loader):
    found = {"outputs": [], "targets": []}
    for x, y in loader:
        h = model(x)
        found["outputs"].append(h)
        found["targets"].append(y)
    return torch.cat(found["outputs"]) - torch.cat(found["targets"])
out = evaluate(fine)
""",
    "joined_by_an_object": """
class Meter:
    def __init__(self):
        self.outputs = []
    def update(self, out):
        self.outputs.append(out)
meter = Meter()
for x, y in fine:
    h = model(x)
    meter.update(h)
out = torch.cat(meter.outputs) + 1
""",
    "joined_of_a_comprehension": """
out = torch.cat([model(x) for x, y in fine]) + 1
""",
    "joined_arrays": """
kept = []
for x, y in fine:
    h = model(x)
    kept.append(h.numpy())
out = torch.tensor(np.concatenate(kept)) + 1
""",
    "numbers": """
kept = []
for x, y in fine:
    h = model(x)
    kept.extend(h.tolist())
out = torch.tensor(kept) + 1
""",
}


def piling():
    ns = program() | {"__name__": "__main__", "np": np}
    ns["fine"] = DataLoader(ns["data"], batch_size=2)
    ns["model"].requires_grad_(False)
    return ns


@pytest.fixture(scope="module")
def rises_piled():
    return rises(piling(), PILED)


@pytest.mark.parametrize("name", PILED)
def test_what_is_put_together_after_a_loop_is_all_that_the_loop_would_have_kept(name, rises_piled):
    assert rises_piled[name] == pytest.approx(measured_rise(piling(), PILED[name]), rel=0.05)


def test_a_list_that_a_loop_does_not_add_to_each_time_stays_as_long_as_it_is():
    cell = (
        "kept, last, fresh = [1, 2], [], []\nfor step in range(50):\n    x, y = batch"
        + STEP.format(indent="    ")
        + "    fresh = [step, step]\n    last[:] = [step]\nassert (len(kept), len(last), len(fresh)) == (2, 1, 2)"
    )
    assert "AssertionError" not in forecast(program(), cell).basis


def program():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    data = TensorDataset(torch.randn(1500, 64), torch.randn(1500, 64))
    return {
        "torch": torch,
        "collections": collections,
        "copy": copy,
        "itertools": itertools,
        "batch": (torch.randn(128, 64), torch.randn(128, 64)),
        "last": collections.deque(maxlen=9),
        "functional": functional,
        "model": model,
        "data": data,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loader": DataLoader(data, batch_size=128),
    }


@pytest.fixture(scope="module")
def rises_of_cells():
    return rises(program(), CELLS)


@pytest.mark.parametrize("name", CELLS)
def test_the_peak_is_that_of_all_iterations(name, rises_of_cells):
    assert rises_of_cells[name] == pytest.approx(measured_rise(program(), CELLS[name]), rel=0.05)


@pytest.mark.parametrize("kept", ["collections.deque(maxlen=500)", "last"])
def test_where_a_deque_may_be_full_before_the_end_less_may_be_needed(kept):
    body = STEP.format(indent="    ") + "    kept.append(out.detach())"
    cell = f"kept = {kept}\nfor step in range(9000):\n    x, y = batch{body}"
    found = forecast(program(), cell)
    assert "as if no deque and no cycle were ever full" in found.basis
    assert found.at_most
    assert found.peak > 500 * 128 * 64 * 4
    assert not forecast(program(), cell.replace("kept.append(", "print(")).at_most


SAMPLES = """
data = TensorDataset(torch.randn(200_000, 8))
for (x,) in DataLoader(data, batch_size=100_000):
    kept = torch.nn.functional.gelu(x).mean()
"""
LENGTHS = """
data = [torch.randn(64 * (step % 12 + 1), 64) for step in range(96)]
for x in DataLoader(data, batch_size=96, collate_fn=lambda rows: torch.nn.utils.rnn.pad_sequence(rows)):
    kept = torch.nn.functional.gelu(x).mean()
"""


@pytest.mark.parametrize("cell", [SAMPLES, LENGTHS], ids=["alike", "of_other_lengths"])
def test_the_samples_of_a_data_set_that_the_cell_makes_are_not_taken_one_by_one_where_they_are_alike(cell):
    """100,000 of them, a millisecond each, would take longer than the forecast may."""
    ns = program() | {"TensorDataset": TensorDataset, "DataLoader": DataLoader}
    assert rise(ns, cell) == pytest.approx(measured_rise(ns, cell), rel=0.05)


def counted(events, *cuts):
    growth, live, peak, sizes = Growth(events, cuts), 0, 0, {}
    for event in growth.events():
        if event[0] == "alloc":
            sizes[event[1]] = event[2]
            live += event[2]
        else:
            live -= sizes.pop(event[1])
        peak = max(peak, live)
    return growth, live, peak


def test_a_loop_within_a_loop_is_as_long_in_each_iteration_of_the_other():
    # Two iterations of the outer loop were followed: something of its own, and two iterations of the inner one.
    events = [("alloc", name, MIB) for name in range(1, 7)]
    growth, live, _ = counted(events, Cut(4, 5, 3, 2, 0), Cut(3, 6, 4, 2, 0))
    assert live == (6 + 3 + 4 * (3 + 3)) * MIB
    assert growth.over == 4


def test_what_an_inner_loop_keeps_goes_where_the_outer_one_lets_go_of_it():
    inner = [("alloc", 1, MIB), ("alloc", 2, MIB), ("free", 1), ("free", 2)]
    again = [("alloc", 3, MIB), ("alloc", 4, MIB), ("free", 3), ("free", 4)]
    _, live, peak = counted([*inner, *again], Cut(1, 2, 8, 2, 0), Cut(5, 6, 8, 2, 0), Cut(4, 8, 100, 2, 0))
    assert (live, peak) == (0, 10 * MIB)


def test_what_an_iteration_frees_of_one_of_another_size_is_not_kept():
    # Logits of a batch live until the next one's are there; batches differ in length, and one number is kept of each.
    first = [("alloc", 1, 5 * MIB), ("alloc", 2, 512)]
    second = [("alloc", 3, 4 * MIB), ("free", 1), ("alloc", 4, 512)]
    _, live, peak = counted([*first, *second], Cut(2, 5, 30, 2, 0))
    assert live == 4 * MIB + 32 * 512
    assert peak == 9 * MIB + 31 * 512


def test_what_many_iterations_keep_is_put_in_as_one_block():
    growth, live, _ = counted([("alloc", 1, 8), ("alloc", 2, 8)], Cut(1, 2, 10**9, 2, 0))
    assert live == 8 * (10**9 + 2)
    assert len(list(growth.events())) == 3


def test_what_the_first_iteration_makes_for_all_of_them_is_not_made_again():
    _, live, _ = counted([("alloc", 1, 4), ("alloc", 2, 8)], Cut(0, 2, 1, 1, 0))
    assert live == 12


def test_a_loop_of_unknown_length_tells_what_each_iteration_keeps():
    growth, *_ = counted([("alloc", 1, MIB), ("alloc", 2, 3 * MIB)], Cut(1, 2, None, 2, 0))
    assert growth.endless == 3 * MIB
    ended, *_ = counted([("alloc", 1, MIB), ("alloc", 2, MIB), ("free", 2)], Cut(1, 3, None, 2, 0))
    assert ended.endless == 0


def test_what_every_other_iteration_lets_go_of_is_not_piled_up():
    events = [("alloc", 1, MIB), ("alloc", 2, MIB), ("alloc", 3, MIB), ("free", 1), ("free", 2), ("alloc", 4, MIB)]
    assert counted(events, Cut(5, 6, None, 4, 2))[0].endless == 0
    piling = [event for event in events if event[0] == "alloc"]
    assert counted(piling, Cut(3, 4, None, 4, 2))[0].endless == MIB


def test_a_batch_that_enumerate_holds_a_step_longer_is_not_piled_up():
    model, loader = mlp()
    cell = "for step, (x, y) in tqdm(enumerate(loader)):\n    x, y = x * 2, torch.ones(len(x), 10)" + STEP.format(
        indent="    "
    )
    names = {"model": model, "loader": loader, "torch": torch, "functional": functional, "tqdm": tqdm}
    found = forecast(names | {"optimizer": torch.optim.SGD(model.parameters())}, cell)
    assert found.refused is None
    assert not found.at_least, found.basis
