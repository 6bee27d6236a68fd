"""The snapshot brings back the state at the start of a cell, bit for bit, or says what it cannot bring back."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from oomdoctor.errors import StateError
from oomdoctor.objects.leaves import state_digests
from oomdoctor.retry import Transaction
from oomdoctor.retry.namespace_state import NamespaceState
from oomdoctor.retry.tensor_copies import Watched

ROOM = 1 << 30


class Counter:
    """An object of the notebook's own class."""

    __module__ = "__main__"

    def __init__(self) -> None:
        self.seen = 0
        self.history: list[float] = []


SETUP = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.{optimizer}
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
scaler = torch.amp.GradScaler("cpu", enabled=True)
average = torch.optim.swa_utils.AveragedModel(model)
counter = Counter()
losses, config, seen = [1.0], {{"lr": 0.1, "nested": {{"deep": [1, 2]}}}}, {{1, 2}}
generator = torch.Generator().manual_seed(3)
numbers = np.random.default_rng(7)
x, y = torch.randn(16, 8), torch.randint(0, 2, (16,))

def step():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    average.update_parameters(model)
    counter.seen += 1
    counter.history.append(loss.item())
    losses.append(loss.item())
    return loss
"""

OPTIMIZERS = (
    "SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "AdamW(model.parameters(), lr=0.01)",
    "AdamW(model.parameters(), lr=0.01, fused=True)",
    "Adam(model.parameters(), lr=0.01, foreach=False)",
)

CELLS = {
    "before the first step": "model(x)\nraise MemoryError",
    "after the first step": "step()\nraise MemoryError",
    "third iteration": "for _ in range(3):\n    loss = step()\nraise MemoryError",
    "containers": "config['nested']['deep'].append(3); config['b'] = 1\nseen.add(9); losses.clear()\nraise MemoryError",
    "bindings": "del losses; config = 3; fresh = [1]; x = torch.zeros(3)\nraise MemoryError",
    "random": "torch.rand(3); random.random(); np.random.rand(); numbers.random(); torch.rand(2, generator=generator)\n"
    "raise MemoryError",
    "evaluation": "step(); model.eval(); model(x); model.requires_grad_(False)\nraise MemoryError",
    "hooks": "model.register_forward_hook(lambda *a: None); model.extra = 3; model.relu = nn.ReLU()\nraise MemoryError",
    "settings": "optimizer.step(); optimizer.param_groups[0]['lr'] = 7.0; scheduler.step()\nraise MemoryError",
    "loaded": "model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})",
}


def program(optimizer: str = OPTIMIZERS[1], *, warm: bool = False) -> dict[str, Any]:
    """A namespace after its setup cell, and after some training where ``warm``."""
    random.seed(0)
    np.random.seed(0)
    namespace: dict[str, Any] = {
        "torch": torch, "nn": nn, "np": np, "random": random, "Counter": Counter, "__name__": "__main__"
    }  # fmt: skip
    exec(SETUP.format(optimizer=optimizer), namespace)
    if warm:
        namespace["step"]()
    return namespace


def run(cell: str, namespace: dict[str, Any], transaction: Transaction) -> None:
    with transaction.armed(), suppress(MemoryError):
        exec(cell, namespace)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("cell", [name for name in CELLS if name != "loaded"])
def test_the_state_is_back_bit_for_bit(cell: str, optimizer: str, warm: bool) -> None:
    namespace = program(optimizer, warm=warm)
    before = state_digests(namespace)
    transaction = Transaction(namespace, CELLS[cell], lambda: ROOM)
    for _ in range(2):  # a second attempt may fail as well
        run(CELLS[cell], namespace, transaction)
        if cell != "before the first step" or warm:
            assert state_digests(namespace) != before
        assert transaction.losses() == ()
        transaction.restore()
        after = state_digests(namespace)
        assert {name for name in {**before, **after} if before.get(name) != after.get(name)} == set()


def test_a_retry_goes_on_as_a_first_run_would() -> None:
    namespace, twin = program(warm=True), program(warm=True)
    transaction = Transaction(namespace, CELLS["third iteration"], lambda: ROOM)
    run(CELLS["third iteration"], namespace, transaction)
    transaction.restore()
    for one in (namespace, twin):
        random.seed(1)
        torch.manual_seed(1)
        exec("for _ in range(4):\n    loss = step()", one)
    assert state_digests(namespace) == state_digests(twin)


def test_identity_is_kept() -> None:
    namespace = program()
    kept = {name: namespace[name] for name in ("model", "optimizer", "losses", "config", "counter", "x")}
    weight = namespace["model"][0].weight
    transaction = Transaction(namespace, CELLS["bindings"], lambda: ROOM)
    run("step(); " + CELLS["bindings"], namespace, transaction)
    transaction.restore()
    assert all(namespace[name] is value for name, value in kept.items())
    assert namespace["model"][0].weight is weight
    assert namespace["optimizer"].param_groups[0]["params"][0] is weight


def test_gradients_of_before_come_back() -> None:
    namespace = program(warm=True)
    before = [p.grad.clone() for p in namespace["model"].parameters()]
    cell = "optimizer.zero_grad()\nloss = model(x).sum()\nloss.backward()\nraise MemoryError"
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    assert transaction.losses() == ()
    transaction.restore()
    for parameter, gradient in zip(namespace["model"].parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("with torch.no_grad(): big.mul_(2)", "`big` was written in place"),
        (CELLS["loaded"], "was written in place and no copy was kept"),
        ("model.half()", "was written in place"),
        ("big = big * 2", "`big` was replaced or deleted"),
        ("for _ in batches: pass", "`batches` is an iterator"),
        ("numbers_file.read()", "`numbers_file` is an iterator, an open file"),
        ("holder['big'] = None", "`holder['big']` was replaced"),
        ("model[0] = nn.Linear(8, 64)", "`model[0]` was replaced"),
    ],
)
def test_what_cannot_be_brought_back_is_told(cell: str, told: str, tmp_path: Any) -> None:
    namespace = program()
    (tmp_path / "numbers").write_text("1")
    namespace["batches"] = iter([1, 2, 3])
    namespace["holder"] = {"big": torch.ones(1 << 16)}
    with (tmp_path / "numbers").open() as namespace["numbers_file"]:
        namespace["big"] = torch.ones(1 << 16)
        transaction = Transaction(namespace, cell, lambda: ROOM)
        run(cell, namespace, transaction)
        assert any(told in sentence for sentence in transaction.losses()), transaction.losses()


HIDDEN = {
    "closure": """
def make():
    hidden = nn.Linear(8, 2)
    stepper = torch.optim.SGD(hidden.parameters(), lr=0.1, momentum=0.9)
    def hidden_step():
        loss = hidden(x).sum()
        loss.backward()
        stepper.step()
        return hidden.weight
    return hidden_step
hidden_step = make()
hidden_step()
""",
    "plain holder": """
import types
holder = types.SimpleNamespace(model=nn.Linear(8, 2), count=0)
holder.optimizer = torch.optim.SGD(holder.model.parameters(), lr=0.1, momentum=0.9)
def hidden_step():
    holder.model(x).sum().backward()
    holder.optimizer.step()
    holder.count += 1
    return holder.model.weight
hidden_step()
""",
    "nonlocal counter": """
def make():
    count = 0
    def hidden_step():
        nonlocal count
        count += 1
        return torch.tensor(float(count))
    return hidden_step
hidden_step = make()
""",
    "numpy": """
table = np.zeros(8)
legacy = np.random.RandomState(3)
def hidden_step():
    table[0] += legacy.rand()
    return torch.tensor(table)
""",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_only_a_function_or_a_holder_leads_to_comes_back(name: str) -> None:
    namespace = program()
    exec(HIDDEN[name], namespace)
    cell = "hidden_step(); hidden_step()\nraise MemoryError"
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    assert transaction.losses() == ()
    transaction.restore()
    twin = program()
    exec(HIDDEN[name], twin)
    assert torch.equal(namespace["hidden_step"](), twin["hidden_step"]())


@pytest.mark.parametrize(
    ("setup", "cell", "told"),
    [
        ("it = iter(range(9))\ndef following(): return next(it)", "following()", "`it` is an iterator"),
        ("import itertools; sums = itertools.accumulate([1, 2])", "next(sums)", "`sums` is an iterator"),
        ("long = [torch.zeros(1)] * 30_000", "long.pop()", "`long` has more than"),
        ("class Odd(random.Random):\n    def getstate(self): 1 / 0\nodd = Odd()", "odd", "`odd` could not be"),
        ("w = torch.zeros(1 << 16); v = w\ndef bump(): w.add_(1)", "bump(); w = torch.ones(3)", "written in place"),
    ],
)
def test_what_else_cannot_be_brought_back_is_told(setup: str, cell: str, told: str) -> None:
    namespace = program()
    exec(setup, namespace)
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    assert any(told in sentence for sentence in transaction.losses()), transaction.losses()


def test_a_small_array_that_an_object_replaces_comes_back() -> None:
    """As of an environment of one's own and of a library's; what is large is let go of all the same."""
    namespace: dict[str, Any] = {"np": np, "mine": Counter(), "theirs": pytest.Config.__new__(pytest.Config)}
    for holder in (namespace["mine"], namespace["theirs"]):
        holder.state, holder.view = np.array([1.0, 2.0]), np.arange(8)[2:]
    namespace["mine"].large = np.zeros(1 << 21)
    before = [(holder.state, holder.view) for holder in (namespace["mine"], namespace["theirs"])]
    kept, large = [id(view) for _, view in before], weakref.ref(namespace["mine"].large)
    cell = "for one in (mine, theirs):\n    one.state[0] += 1\n    one.state, one.view = one.state + 1, one.view * 2\n"
    transaction = Transaction(namespace, f"{cell}mine.seen = np.zeros(3)", lambda: ROOM)
    del before
    run(f"{cell}mine.seen = np.zeros(3)", namespace, transaction)
    assert transaction.losses() == ()
    transaction.restore()
    mine, theirs = namespace["mine"], namespace["theirs"]
    assert [id(one) for one in (mine.view, theirs.view)] == kept
    assert mine.state.tolist() == theirs.state.tolist() == [1.0, 2.0]
    assert mine.view.tolist() == theirs.view.tolist() == [2, 3, 4, 5, 6, 7]
    again = Transaction(namespace, "mine.large = None", lambda: ROOM)
    run("mine.large = None", namespace, again)
    assert large() is None
    assert again.losses() == ("`mine.large` was replaced by the cell, and the old one is gone",)


@pytest.mark.parametrize("size", [100, 100_000])
def test_an_array_that_a_copy_stands_for_dies_with_its_last_reference_and_comes_back_as_one(size: int) -> None:
    namespace: dict[str, Any] = {"np": np, "cache": weakref.WeakValueDictionary()}
    namespace["b"] = namespace["cache"]["b"] = np.ones(size)
    cell = "del b\nassert 'b' not in cache"
    run(cell, namespace, Transaction(namespace, cell, lambda: ROOM))
    assert "b" not in namespace["cache"], "as without a look at it"
    cell = "c = d = None"
    namespace["c"] = namespace["d"] = np.arange(size)
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    assert transaction.losses() == ()
    transaction.restore()
    assert namespace["c"] is namespace["d"]
    assert namespace["c"].tolist() == list(range(size))


def test_for_good_nothing_of_ours_stays_in_the_namespace_and_what_is_gone_is_told() -> None:
    namespace = program()
    cell = "del model, optimizer, scheduler, average, step\nraise MemoryError"
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    gc.collect()
    missing = transaction.settle()
    assert any("`model` was replaced or deleted" in sentence for sentence in missing)
    assert "model" not in namespace
    assert not any("released" in repr(value) for value in namespace.values())


def test_what_the_cell_binds_before_it_reads_need_not_come_back() -> None:
    namespace = program()
    namespace["big"] = torch.ones(1 << 16)
    cell = "big = torch.zeros(1 << 16)\nbig.add_(1)\nraise MemoryError"
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    assert transaction.losses() == ()


def test_without_room_for_copies_it_says_so() -> None:
    namespace = program()
    transaction = Transaction(namespace, CELLS["after the first step"], lambda: 64)
    run(CELLS["after the first step"], namespace, transaction)
    assert any("not enough host memory" in sentence for sentence in transaction.losses())


def test_the_snapshot_keeps_nothing_heavy_alive() -> None:
    namespace = program(warm=True)
    namespace["outputs"] = [torch.ones(1 << 16)]
    namespace["pair"] = (torch.ones(1 << 16), 1)
    gone = [weakref.ref(value) for value in (namespace["model"], namespace["outputs"][0], namespace["pair"][0])]
    cell = "del model, optimizer, scheduler, scaler, average, step, outputs, pair"
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert transaction.losses() == ()


ITERATORS = {
    "an endless loader of an object": """
def cycle(loader):
    while True:
        yield from loader
class Trainer:
    def __init__(self):
        self.batches = cycle(loader)
trainer = Trainer()
seen = trainer.batches""",
    "the iterator of a loader": "seen = iter(loader)",
    "a class of the notebook's": """
class Batches:
    def __init__(self):
        self.at, self.loader = 0, iter(loader)
    def __iter__(self):
        return self
    def __next__(self):
        self.at += 1
        return self.at, next(self.loader)
seen = Batches()""",
    "a generator with arguments": """
def steps(first, *, by):
    while True:
        yield first
        first += by
seen = steps(1, by=2)""",
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_had_not_begun_begins_again(kind: str) -> None:
    if "iter(" in ITERATORS[kind] and torch.utils.data.BatchSampler.__iter__.__code__.co_cellvars:
        pytest.skip("what goes through a loader of this torch cannot be begun again")
    data = "loader = torch.utils.data.DataLoader(torch.arange(12.0), batch_size=4, shuffle=True)"
    cell = ("trainer; " if "trainer" in ITERATORS[kind] else "") + "taken = [str(next(seen)) for _ in range(2)]"
    namespace: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec(f"{data}{chr(10)}{ITERATORS[kind]}", namespace)
    transaction, found = Transaction(namespace, cell, lambda: 1 << 20), []
    for _ in range(3):
        run(cell, namespace, transaction)
        found.append(namespace["taken"])
        assert transaction.losses() == ()
        transaction.restore()
    assert found[0] == found[1] == found[2]
    if "trainer" in namespace:
        assert namespace["trainer"].batches is namespace["seen"]


@pytest.mark.parametrize(
    "setup",
    [
        "def count():\n    yield from range(9)\nseen = count(); next(seen)",
        "def count():\n    yield from range(9)\nseen = count(); other = enumerate(seen)",
        "def make(by):\n    def count():\n        yield from range(by)\n    return count()\nseen = make(9)",
        "seen = iter(torch.utils.data.DataLoader(torch.arange(12.0), shuffle=True)); next(seen)",
        "seen = iter([1, 2])",
        "seen = (n for n in range(9))",
        "def count(numbers):\n    yield from numbers\nseen = count(iter(range(9)))",
    ],
)
def test_an_iterator_that_cannot_begin_again_is_told(setup: str) -> None:
    namespace: dict[str, Any] = {"torch": torch}
    exec(setup, namespace)
    cell = "next(seen); list(seen)"
    transaction = Transaction(namespace, cell, lambda: 1 << 20)
    run(cell, namespace, transaction)
    assert "advanced" in " ".join(transaction.losses())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_each_forward_makes_anew_comes_back() -> None:
    namespace: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(
        "model = nn.utils.weight_norm(nn.Linear(300, 300)); x = torch.randn(4, 300); model(x).sum().backward()",
        namespace,
    )
    model, cell = namespace["model"], "optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()"
    namespace["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    before, losses = model.weight.detach().clone(), []
    transaction = Transaction(namespace, cell, lambda: 1 << 24)
    for _ in range(2):
        run(cell, namespace, transaction)
        losses.append(model(namespace["x"]).sum().item())
        assert transaction.losses() == ()
        transaction.restore()
        assert torch.equal(model.weight, before)
    assert losses[0] == losses[1]


class Dropped(nn.Module):
    """A recurrent layer whose weights each forward drops anew."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(200, 200)
        self.raw = nn.Parameter(self.rnn._parameters.pop("weight_hh_l0").detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rnn.weight_hh_l0 = nn.functional.dropout(self.raw, 0.5, self.training)
        self.rnn._flat_weights[1] = self.rnn.weight_hh_l0
        return torch.as_tensor(self.rnn(x)[0])


@pytest.mark.parametrize("begun", [False, True])
def test_weights_that_a_list_holds_as_well_come_back_as_one(begun: bool) -> None:
    namespace: dict[str, Any] = {"torch": torch, "model": Dropped(), "x": torch.randn(3, 2, 200)}
    model, cell = namespace["model"], "model(x).sum().backward()"
    if begun:
        exec(cell, namespace)
    before = model.rnn._flat_weights[1].detach().clone()
    transaction = Transaction(namespace, cell, lambda: 1 << 24)
    run(cell, namespace, transaction)
    assert transaction.losses() == ()
    transaction.restore()
    assert torch.equal(model.rnn._flat_weights[1], before)
    assert not begun or model.rnn._flat_weights[1] is model.rnn.weight_hh_l0


AVERAGED = """
for mean, new in zip(average.parameters(), model.parameters()):
    mean.data = mean.data * 0.9 + new.data * 0.1
"""


@pytest.mark.parametrize(
    "cell", [AVERAGED, "w.data = v", "w.data = v.data; w.data.add_(1); v.mul_(2)", "w.data = w.data[:2]"]
)
def test_memory_that_tensors_were_given_in_exchange_is_taken_from_them(cell: str) -> None:
    made = "model, average = nn.Linear(3, 2), nn.Linear(3, 2)\nw, v = nn.Parameter(torch.zeros(4)), torch.ones(4)"
    namespace: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(made, namespace)
    tensors = [namespace["w"], namespace["v"], *namespace["average"].parameters()]
    before, identities = [one.detach().clone() for one in tensors], [id(one) for one in tensors]
    transaction = Transaction(namespace, cell, lambda: 1 << 20)
    transaction.keep_all()
    for _ in range(2):
        run(cell, namespace, transaction)
        assert transaction.losses() == ()
        transaction.restore()
        found = [namespace["w"], namespace["v"], *namespace["average"].parameters()]
        assert all(map(torch.equal, found, before))
        assert [id(one) for one in found] == identities
    assert namespace["w"].data_ptr() != namespace["v"].data_ptr()


def test_memory_that_another_tensor_shares_is_told_when_it_was_exchanged() -> None:
    namespace: dict[str, Any] = {"torch": torch, "w": torch.zeros(4)}
    namespace["view"] = namespace["w"][:2]
    transaction = Transaction(namespace, "w.data = torch.ones(4)", lambda: 1 << 20)
    transaction.keep_all()
    run("w.data = torch.ones(4)", namespace, transaction)
    assert "given other memory" in " ".join(transaction.losses())


def test_a_graph_of_an_earlier_cell_stays_usable_after_a_restore() -> None:
    namespace = program()
    exec("output = model(x).sum()", namespace)
    cell = "step()\nraise MemoryError"
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    transaction.restore()
    exec("output.backward()", namespace)


def test_hooks_are_gone_when_the_cell_is_done() -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer

    namespace = program(warm=True)
    before = len(module._global_forward_pre_hooks), len(optimizer._global_optimizer_pre_hooks)
    transaction = Transaction(namespace, "step()", lambda: ROOM)
    run("step()", namespace, transaction)
    run("pass", namespace, transaction)
    assert (len(module._global_forward_pre_hooks), len(optimizer._global_optimizer_pre_hooks)) == before


def test_a_snapshot_that_fails_never_stops_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(NamespaceState, "__init__", broken)
    transaction = Transaction(program(), "pass", lambda: ROOM)
    assert "planted" in transaction.losses()[0]
    with pytest.raises(StateError, match="planted"):
        transaction.restore()


def test_a_sabotaged_restore_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from oomdoctor.retry.tensor_copies import TensorCopies

    namespace = program()
    before = state_digests(namespace)
    transaction = Transaction(namespace, CELLS["after the first step"], lambda: ROOM)
    run(CELLS["after the first step"], namespace, transaction)
    monkeypatch.setattr(TensorCopies, "pieces", lambda self: ())
    transaction.restore()
    assert state_digests(namespace) != before


class Answer(OrderedDict):  # as transformers' outputs are
    pass


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: tensor,
        lambda tensor: [tensor],
        lambda tensor: (tensor,),
        lambda tensor: {"key": [tensor]},
        lambda tensor: Answer(key=tensor),
        lambda tensor: Pair(tensor, 1),
        lambda tensor: deque([tensor]),
        lambda tensor: Namespace(held=tensor),
        lambda tensor: lambda: tensor,
        lambda tensor: partial(print, tensor),
    ],
    ids=["tensor", "list", "tuple", "dict", "output", "named", "deque", "object", "closure", "partial"],
)
def test_what_a_cell_lets_go_of_is_freed_at_once(make: Callable[[Any], Any]) -> None:
    tensor = torch.ones(1 << 16)
    watched = weakref.ref(tensor)
    namespace = {"it": make(tensor)}
    del tensor
    gc.disable()
    try:
        transaction = Transaction(namespace, "del it", lambda: 1 << 20)
        with transaction.armed():
            del namespace["it"]
        assert watched() is None
    finally:
        gc.enable()


def test_an_optimizer_that_a_cell_replaces_is_freed_with_its_state() -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    average = weakref.ref(optimizer.state[model.weight]["exp_avg"])
    namespace = {"model": model, "optimizer": optimizer, "groups": defaultdict(list, a=[torch.ones(1 << 16)])}
    del optimizer
    gc.collect()
    transaction = Transaction(namespace, "optimizer = torch.optim.SGD(model.parameters())", lambda: 1 << 30)
    with transaction.armed():
        namespace["optimizer"] = torch.optim.SGD(model.parameters())
        namespace["groups"] = namespace["groups"].copy()
        gc.collect()
        assert average() is None
    transaction.restore()
    assert namespace["groups"]["new"] == []


def test_a_snapshot_is_let_go_of_without_the_collector() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    gradient = weakref.ref(model.weight.grad)
    namespace = {"model": model, "optimizer": optimizer, "f": lambda: model}
    gc.collect()
    gc.disable()
    try:
        before = {id(tensor) for tensor in gc.get_objects() if type(tensor) is torch.Tensor}
        transaction = Transaction(namespace, "optimizer.step()", lambda: 1 << 20)
        with transaction.armed():
            optimizer.zero_grad(set_to_none=True)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert transaction.kept_bytes
        del transaction
        made = [tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor and id(tensor) not in before]
        state = [value for state in optimizer.state.values() for value in state.values()]
        assert all(any(tensor is one for one in (*state, model.weight.grad, model.bias.grad)) for tensor in made)
        assert gradient() is None
    finally:
        gc.enable()


def test_containers_of_other_kinds_come_back() -> None:
    tensor = torch.ones(1 << 16)
    answer, ring, named = Answer(key=tensor), deque([tensor], maxlen=4), Pair(tensor, 1)
    namespace: dict[str, Any] = {"answer": answer, "ring": ring, "named": named, "tensor": tensor}
    transaction = Transaction(namespace, "answer, ring, named", lambda: 1 << 20)
    namespace["answer"]["key"] = namespace["answer"]["more"] = 0
    namespace["ring"].append(1)
    namespace["named"] = None
    transaction.restore()
    assert namespace["answer"] is answer
    assert dict(answer) == {"key": tensor}
    assert list(ring) == [tensor]
    assert type(namespace["named"]) is Pair
    assert namespace["named"].first is tensor


@pytest.mark.parametrize("changed", [False, True])
def test_a_mapping_whose_keys_are_tuples_keeps_its_keys(changed: bool) -> None:
    tensor = torch.ones(1 << 16)
    namespace: dict[str, Any] = {"table": {(1, 2): "a", (3, "b"): tensor}}
    transaction = Transaction(namespace, "table", lambda: 1 << 20)
    if changed:
        namespace["table"].clear()
    transaction.restore()
    assert set(namespace["table"]) == {(1, 2), (3, "b")}


def test_what_the_last_restore_could_not_bring_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    weight.grad = torch.ones(100)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    transaction = Transaction({"weight": weight, "optimizer": optimizer}, "weight; optimizer.step()", lambda: ROOM)
    with transaction.armed():
        optimizer.step()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("oomdoctor.retry.tensor_copies._write", refuse)
    assert transaction.losses() == ()
    assert transaction.settle() == ("`weight` could not be brought back (RuntimeError: out of memory)",)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_that_the_cell_took_to_another_device_comes_back(steps: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.cuda.init()  # else the cell makes the device's random number generator, which stays
    namespace = program()
    before = state_digests(namespace)
    cell = f"model.cuda(); x = x.cuda(); y = y.cuda()\nfor _ in range({steps}): step()\nraise MemoryError"
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    assert namespace["model"][0].weight.is_cuda
    assert transaction.losses() == ()
    transaction.restore()
    assert not namespace["model"][0].weight.is_cuda
    after = state_digests(namespace)
    assert {name for name in {**before, **after} if before.get(name) != after.get(name)} == set()
    exec(cell.replace("raise MemoryError", "step()"), namespace)


@pytest.mark.parametrize("steps", ["", "step()\n"])
def test_what_moved_whole_is_not_lost(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one device, another place in memory stands for the other device."""
    monkeypatch.setattr(Watched, "has_moved", lambda watched, tensor: tensor.data_ptr() != watched.pointer)
    namespace = program(warm=True)
    before = state_digests(namespace)
    cell = f"for p in model.parameters(): p.data = p.data.clone()\n{steps}raise MemoryError"
    transaction = Transaction(namespace, cell, lambda: ROOM)
    run(cell, namespace, transaction)
    assert transaction.losses() == ()
    assert next(transaction._snapshot.changes(), None) is not None
    transaction.restore()
    after = state_digests(namespace)
    assert {name for name in {**before, **after} if before.get(name) != after.get(name)} == set()


def test_what_was_set_to_other_contents_is_no_move() -> None:
    weight = torch.nn.Parameter(torch.ones(100_000))
    transaction = Transaction({"weight": weight}, "weight", lambda: ROOM)
    weight.data = torch.zeros(100_000)
    assert any("`weight` was written in place" in sentence for sentence in transaction.losses())


def test_a_namespace_that_a_name_leads_to_is_the_same_after() -> None:
    namespace: dict[str, Any] = {"kept": [1]}
    namespace["all"] = namespace
    transaction = Transaction(namespace, "kept, all", lambda: ROOM)
    namespace["kept"].append(2)
    transaction.restore()
    assert namespace["all"] is namespace
    assert namespace["kept"] == [1]


class Asked(AssertionError):
    pass


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise Asked


@pytest.mark.parametrize("base", [dict, list, set, tuple, deque, OrderedDict])
def test_no_method_of_a_users_container_is_called(base: type) -> None:
    names = (
        "__len__",
        "__iter__",
        "__getitem__",
        "__contains__",
        "items",
        "keys",
        "values",
        "clear",
        "update",
        "extend",
    )
    made = base({1: torch.ones(2)} if issubclass(base, dict) else [1, "a"])
    cls = type("Own", (base,), {"__module__": "__main__"})
    own = cls(made)
    for name in names:
        setattr(cls, name, refuse)
    transaction = Transaction({"own": own}, "own", lambda: ROOM)
    (base.update if issubclass(base, (dict, set)) else getattr(base, "append", lambda *_: None))(own, {2: 3})
    assert transaction.losses() == ()
    transaction.restore()
    for name in names:
        delattr(cls, name)
    assert base(own) == made


LOOKING = """
import timeit
from oomdoctor.retry import Transaction

namespace = {f"n{at}": at if at % 4 else str(at) for at in range(7_500)}
namespace |= {f"l{at}": [1.0, 2.0, 3.0] * 4 for at in range(2_500)}

def fastest(work):
    return min(timeit.repeat(work, number=1, repeat=40))

copying = fastest(lambda: [value.copy() for value in namespace.values() if type(value) is list])
print(fastest(lambda: Transaction(namespace, "pass", lambda: 1 << 30)) / copying)
"""


def test_looking_costs_a_small_multiple_of_copying() -> None:
    """Ten thousand names, of which 2,500 are lists: a ratio within one process, because machines differ.

    The process is one of its own: the modules of other tests are the user's modules, and are looked at too.
    """
    done = subprocess.run([sys.executable, "-c", LOOKING], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 8
