"""Loops whose steps are not alike: the one that needs most is seen, or it is said that it may not have been."""

import gc
from textwrap import dedent

import pytest
import torch
from forecast_lab import forecast, measured_rise, mlp, namespace, rises
from torch import nn

PROLOGUE = """
import random
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.nn.utils.rnn import pad_sequence
class Rows(Dataset):
    def __init__(self, lengths):
        self.lengths = lengths
    def __len__(self):
        return len(self.lengths)
    def __getitem__(self, index):
        return torch.arange(self.lengths[index]) % 100
class Stream(IterableDataset):
    def __iter__(self):
        for length in (10, 20, 300):
            yield torch.zeros(16, length, dtype=torch.long)
def padded(rows):
    return pad_sequence(rows, batch_first=True)
class Growing:
    def __iter__(self):
        return (list(range(n)) for n in (8, 16, 512, 32, 64, 128))
    def __len__(self):
        return 6
def train(tokens):
    adam.zero_grad()
    head(table(tokens)).logsumexp(-1).mean().backward()
    adam.step()
def step(x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

CELLS = {
    "the longest of a shuffled data set": """
        lengths = [10] * 99 + [400]
        random.Random(0).shuffle(lengths)
        for epoch in range(3):
            for tokens in DataLoader(Rows(lengths), batch_size=10, shuffle=True, collate_fn=padded):
                train(tokens)
    """,
    "rows in their order": """
        for tokens in DataLoader(Rows(range(1, 128)), batch_size=16, collate_fn=padded):
            train(tokens)
    """,
    "batches of a sampler that grow": """
        for x, y in DataLoader(loader.dataset, batch_sampler=Growing()):
            step(x, y)
    """,
    "a stream": """
        for tokens in DataLoader(Stream(), batch_size=None):
            train(tokens)
    """,
    "an evaluation of the longest": """
        lengths = [10] * 99 + [400]
        with torch.no_grad():
            for tokens in DataLoader(Rows(lengths), batch_size=10, collate_fn=padded):
                head(table(tokens))
    """,
    "a list sorted by length": """
        rows = [torch.zeros(n, dtype=torch.long) for n in range(5, 325)]
        for batch in [rows[i:i + 16] for i in range(0, 320, 16)]:
            train(padded(batch))
    """,
    "a length that grows with the step": """
        for i in range(200):
            train(torch.zeros(8, 16 + 8 * i, dtype=torch.long))
    """,
    "batches that are doubled": """
        size = 16
        while size <= 1024:
            step(data[:size], targets[:size])
            size *= 2
    """,
    "a loader for each size": """
        for epoch, size in enumerate((64, 128, 256, 512)):
            for x, y in DataLoader(loader.dataset, batch_size=size, shuffle=True):
                step(x, y)
    """,
    "models that are compared": """
        for name, width in {"small": 16, "middle": 64, "large": 2048}.items():
            net = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10))
            adam = torch.optim.Adam(net.parameters())
            for x, y in loader:
                adam.zero_grad()
                F.cross_entropy(net(x), y).backward()
                adam.step()
    """,
    "optimizers that are compared": """
        for name in ["SGD", "Adam", "Adagrad"]:
            net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
            chosen = getattr(torch.optim, name)(net.parameters(), lr=0.1)
            for x, y in loader:
                chosen.zero_grad()
                F.cross_entropy(net(x), y).backward()
                chosen.step()
    """,
    "batches that shrink": """
        for batch in [data[:n] for n in (512, 256, 128, 64, 32)]:
            step(batch, targets[:len(batch)])
    """,
    "batches from a generator": """
        def batches():
            for n in (4, 8, 400, 16, 2, 4):
                yield data[:n], targets[:n]
        for x, y in batches():
            step(x, y)
    """,
}


def _namespace():
    ns = namespace(mlp, "adamw") | {"data": torch.randn(1024, 256), "targets": torch.randint(0, 10, (1024,))}
    ns |= {"table": nn.Embedding(100, 64), "head": nn.Linear(64, 16)}
    ns["adam"] = torch.optim.Adam([*ns["table"].parameters(), *ns["head"].parameters()])
    exec(PROLOGUE, ns)
    return ns


@pytest.fixture(scope="module")
def rises_of_cells():
    return rises(_namespace(), {name: dedent(text) for name, text in CELLS.items()})


@pytest.mark.parametrize("name", CELLS)
def test_the_largest_step_is_seen(name, rises_of_cells):
    ns = _namespace()
    gc.collect()
    assert rises_of_cells[name] == pytest.approx(measured_rise(ns, dedent(CELLS[name])), rel=0.02)


COUNTED = """
for epoch in range(10):
    for x, y in loader:
        step(x, y)
    if (epoch + 1) % 5 == 0:
        out = model(torch.cat([data] * 8))
"""


def test_where_a_counter_decides_it_is_said_that_other_steps_may_need_more():
    unseen = "may be larger in steps that were not seen"
    assert unseen in forecast(_namespace(), COUNTED).basis
    assert unseen not in forecast(_namespace(), COUNTED.replace("(epoch + 1) % 5 == 0", "data is None")).basis
    assert unseen not in forecast(_namespace(), COUNTED.replace("range(10)", "range(2)")).basis


KNOWN = {
    "classes are counted by their highest": """
        classes = int(labels.max()) + 1
        table = nn.Embedding(classes, 256)
    """,
    "words are counted": """
        words = labels.unique()
        table = nn.Linear(64, len(words))
        head = torch.zeros(1 << 20)
    """,
    "one class is taken": """
        ones = rows[labels == 3]
        big = ones.repeat(64, 1)
    """,
    "rows are found": """
        where = (labels > 4000).nonzero().squeeze(1)
        big = rows[where].repeat(16, 1)
    """,
    "one hot": """
        hot = F.one_hot(labels[:1000])
        out = hot.float() @ torch.randn(hot.shape[1], 16)
    """,
    "classes are weighed": """
        weights = 1 / torch.bincount(labels).float()
        net = nn.Linear(64, len(weights))
        F.cross_entropy(net(rows[:500]), labels[:500], weight=weights).backward()
    """,
    "the longest": """
        most = labels[:2000].max().item()
        mask = torch.arange(most)[None, :] < labels[:500, None]
        x = torch.randn(500, most).masked_fill(mask, 0.0)
    """,
    "labels of the cell": """
        made = torch.randint(0, 3000, (20000,))
        table = nn.Embedding(int(made.max()) + 1, 256)
        some = rows[made[:10000] == 5].repeat(1000, 1)
    """,
    "views are counted once": """
        parts = labels.view(100, 100)
        whole = torch.zeros(1 << 18)
        a, b = parts[:50], parts.t()
        shifted = parts + 1
    """,
    "rows are counted out": """
        counts = torch.arange(1, 101)
        spread = rows[:100].repeat_interleave(counts, dim=0)
    """,
    "masks are counted": """
        mask = torch.zeros(10000, dtype=torch.bool)
        mask[:100] = True
        big = rows[mask].repeat(100, 1)
    """,
}


def labelled():
    torch.manual_seed(0)
    ns = _namespace()
    return ns | {"labels": torch.randint(0, 5000, (10000,)), "rows": torch.randn(10000, 64)}


@pytest.fixture(scope="module")
def rises_known():
    return rises(labelled(), {name: dedent(text) for name, text in KNOWN.items()})


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_that_values_decide_are_those_of_values_that_are_known(name, rises_known):
    ns = labelled()
    gc.collect()
    assert rises_known[name] == pytest.approx(measured_rise(ns, dedent(KNOWN[name])), rel=0.02)


MASKED = "h = data[torch.rand(1024) < 0.1]\nout = model(h)"


def test_what_nobody_knows_is_taken_for_the_most_and_it_says_so():
    bound = forecast(_namespace(), MASKED, budget=1)
    assert bound.at_most
    assert "at the most" in bound.basis
    assert bound.verdict == "borderline"
    certain = forecast(_namespace(), "out = model(data)", budget=1)
    assert not certain.at_most
    assert certain.verdict == "too large"


ROUTED = """
chosen = (data @ data[:4].T).topk(2, -1).indices
out = torch.zeros_like(data)
for k in range(4):
    rows, columns = torch.where(chosen == k)
    out.index_add_(0, rows, wide(data[rows]))
"""


def test_what_is_made_of_a_size_that_nobody_knows_is_as_uncertain():
    """The rows that are found are few bytes themselves; what the layers of an expert make of them are many."""
    ns = _namespace() | {"wide": nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))}
    assert forecast(ns, ROUTED, budget=1).at_most
    masked = "keep = torch.rand(1024) < 0.5\nsmall = targets[keep].float().mean()\nwide(data).sum().backward()"
    assert not forecast(ns, masked, budget=1).at_most


def test_steps_that_go_on_to_change_are_said_to():
    endless = "size = 1\nwhile True:\n    step(data[:16].repeat(size, 1), targets[:16].repeat(size))\n    size += 1"
    found = forecast(_namespace(), endless)
    assert found.at_least
    assert "change in size" in found.basis


def test_what_comes_after_an_error_is_said_not_to_be_seen():
    cell = "for i in range(100):\n    step(data[:16], targets[:16])\nassert i == 99\nbig = torch.ones(1 << 26)"
    found = forecast(_namespace(), cell)
    assert found.at_least
    assert "at line 3 with AssertionError" in found.basis


def test_a_check_in_a_long_loop_never_fails():
    checked = "for i in range(100):\n    p = torch.distributions.Categorical(logits=data[:4]).sample()\n"
    checked += "    assert not torch.isnan(model(data[:4])).any()\n"
    assert forecast(_namespace(), checked).refused is None


def test_of_what_nothing_bounds_the_forecast_says_that_it_may_be_more():
    for line in ("torch.bincount(made)", "torch.repeat_interleave(made)"):
        told = forecast(_namespace(), f"made = (torch.rand(200_000) * 9).long()\nout = {line}\n")
        assert "more where values make" in told.basis, line
        assert not told.at_most
