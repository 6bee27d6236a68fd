from __future__ import annotations

import copy
import textwrap
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from oomdoctor.fixes import _micro_writer
from oomdoctor.fixes.micro_batch import FIX, TOLERANCE, patch, propose
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.plan import Trial
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.model.unavailable import Refused
from oomdoctor.trial import compare

PARTS = Dose.of(parts=4)

SETUP = """
    import torch
    from torch import nn
    from torch.nn.utils import clip_grad_norm_
    import torch.nn.functional as F
    device = torch.device("cpu")
"""
SETUP_TEXT = textwrap.dedent(SETUP)


class Pairs(Dataset[Any]):
    """42 samples in dictionaries; a batch of 16 leaves an uneven last one of 10."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[at], "labels": self.y[at]}


class Named(Pairs):
    """The same with the name of each sample, which makes a list of texts of the batch."""

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"name": f"sample {at}", **super().__getitem__(at)}


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Acting(Keywords):
    def evaluate(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self(x, x)
        return out, out.softmax(1).log().mean()


def program(**other: Any) -> dict[str, Any]:
    """A namespace as a notebook would have it, the same each time."""
    torch.manual_seed(0)
    x, y = torch.randn(42, 8), torch.randint(0, 4, (42,))
    model = other.pop("model", None) or nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = {
        "X": x,
        "Y": y,
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "loader": DataLoader(TensorDataset(x, y), batch_size=16),
        "dicts": DataLoader(Pairs(x, y), batch_size=16),
        "named": DataLoader(Named(x, y), batch_size=16),
        "losses": [],
        "correct": 0,
    }
    return {**found, **other}


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def read(cells: Cells, namespace: dict[str, Any]) -> CodeFacts:
    modules = [(name, value) for name, value in namespace.items() if isinstance(value, nn.Module)]
    optimizers = [(name, value) for name, value in namespace.items() if isinstance(value, torch.optim.Optimizer)]
    return facts(cells, namespace, modules, optimizers)


def evidence(cells: Cells, namespace: dict[str, Any], **census: Any) -> Evidence:
    base = live.evidence(**census)
    return Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=read(cells, namespace))


def patched(*sources: str, dose: Dose = PARTS, **namespace: Any) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells, program(**namespace)), dose)


def run(sources: list[str], namespace: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    for source in sources:
        exec(compile(source, "<cell>", "exec"), namespace)
    return namespace


def after(patch: Patch, sources: tuple[str, ...]) -> list[str]:
    texts = [textwrap.dedent(source) for source in sources]
    for edit in patch.edits:
        texts[edit.cell - 1] = edit.after
    return texts


def distance(left: dict[str, Any], right: dict[str, Any]) -> float:
    return live.furthest(live.values(left["model"]), live.values(right["model"]))


def rows_seen(model: nn.Module) -> list[int]:
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(args[0] if args else kwargs["x"])), with_kwargs=True
    )
    return seen


ZERO_FIRST = """
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            logits = model(x)
            loss = criterion(logits, y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
"""
ZERO_BETWEEN = """
    for i, (inputs, labels) in enumerate(loader):
        inputs, labels = inputs.to(device), labels.to(device)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        losses.append(loss.item() * inputs.size(0))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        _, predicted = torch.max(outputs.data, 1)
        correct += (predicted == labels).sum().item()
"""
ZERO_LAST = """
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
"""
SUM = """
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().item())
"""
EXPRESSION = """
    for x, y in loader:
        optimizer.zero_grad()
        target = F.one_hot(y, 4).float()
        ((model(x) - target) ** 2).mean().backward()
        optimizer.step()
"""
TWO_TERMS = """
    for x, y in loader:
        model.zero_grad()
        out = model(x.view(x.size(0), -1))
        main = criterion(out, y)
        extra = out.pow(2).mean()
        loss = main + 0.1 * extra
        loss.backward()
        optimizer.step()
"""
UNPACKED = """
    for batch in loader:
        x, y = batch
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
"""
INDEXED = """
    for batch in loader:
        optimizer.zero_grad()
        loss = criterion(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
"""
DICT = """
    for step, batch in enumerate(dicts):
        batch = {key: value.to(device) for key, value in batch.items()}
        out = model(**batch)
        loss = criterion(out, batch["labels"])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""
SHARED_LINES = """
    for x, y in loader:
        # as in the paper
        optimizer.zero_grad(); out = model(x); loss = criterion(out, y)  # all of it
        loss.backward(); optimizer.step(); losses.append(loss.item())
"""
NAMED = """
    for batch in named:
        optimizer.zero_grad()
        out = model(batch["x"])
        loss = criterion(out, batch["labels"])
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), len(batch["name"]))[0])
"""
DICT_ITEMS = """
    for batch in dicts:
        optimizer.zero_grad()
        x = batch["x"].to(device)
        y = batch["labels"].to(device)
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
"""
NO_LOADER = """
    for i in range(0, len(X), 16):
        xb, yb = X[i:i + 16], Y[i:i + 16]
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
FETCHED = """
    batches = iter(loader)
    steps = 0
    while steps < 3:
        x, y = next(batches)
        steps += 1
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
"""
IGNORING = """
    padded = nn.CrossEntropyLoss(ignore_index=0)
    for x, y in loader:
        optimizer.zero_grad()
        loss = padded(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
SCALED = """
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            logits = model(x)
            loss = criterion(logits, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""

PENALTY = """
    step = 0
    log = []
    for x, y in loader:
        optimizer.zero_grad()
        l2 = sum(p.pow(2).sum() for p in model.parameters())
        loss = criterion(model(x), y) + 1e-2 * l2
        log.append((step, loss.item()))
        if torch.isnan(loss):
            print("not a number")
        step += 1
        loss.backward()
        optimizer.step()
    losses, correct = [value for _, value in log], sum(step for step, _ in log)
"""

DRAWN = """
    import numpy as np
    np.random.seed(0)
    scaler = None
    for batch in dicts:
        optimizer.zero_grad()
        x, y = batch["x"], batch["labels"]
        out = model(x)
        hits = (out.argmax(1) == y).sum().item()
        if np.random.random() < 0.5:
            x = None
        loss = criterion(out, y) * (2.0 if x is None else 1.0)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        optimizer.step()
        correct += hits
        losses.append(loss.item())
"""
"""A name is bound anew by chance after its use, one loss has two branches, and a number is counted."""

ADDED = """
    for x, y in loader:
        optimizer.zero_grad()
        out, entropy = model.evaluate(x)
        loss = criterion(out, y)
        loss = loss - 0.1 * entropy
        loss.backward()
        optimizer.step()
        losses.append(entropy.item())
"""
LOOPS = {
    "drawn": DRAWN,
    "penalty": PENALTY,
    "zero first": ZERO_FIRST,
    "zero between": ZERO_BETWEEN,
    "zero last": ZERO_LAST,
    "sum": SUM,
    "expression": EXPRESSION,
    "two terms": TWO_TERMS,
    "unpacked": UNPACKED,
    "indexed": INDEXED,
    "dict": DICT,
    "dict items": DICT_ITEMS,
    "named": NAMED,
    "shared lines": SHARED_LINES,
    "one line": "for x, y in loader: optimizer.zero_grad(); criterion(model(x), y).backward(); optimizer.step()\n",
    "no loader": NO_LOADER,
    "fetched": FETCHED,
    "ignoring": IGNORING,
    "scaled": SCALED,
    "added": ADDED,
}
KEYWORDS = {"dict": Keywords, "added": Acting}


def own_model(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": KEYWORDS[name]()} if name in KEYWORDS else {}


@pytest.mark.parametrize("parts", [2, 4, 16])
@pytest.mark.parametrize("name", LOOPS)
def test_patched_source_leaves_the_same_parameters(name: str, parts: int) -> None:
    sources = (SETUP, LOOPS[name])
    made = patched(*sources, dose=Dose.of(parts=parts), **own_model(name))
    assert isinstance(made, Patch), made
    plain, split = program(**own_model(name)), program(**own_model(name))
    rows = rows_seen(split["model"])
    run([textwrap.dedent(source) for source in sources], plain)
    run(after(made, sources), split)
    assert distance(plain, split) <= TOLERANCE
    assert split["correct"] == plain["correct"]
    assert split["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)
    assert max(rows) in (16 // parts, 16 // parts + 1)
    assert split["scheduler"].last_epoch == plain["scheduler"].last_epoch
    if "loss" in plain:
        assert split["loss"].item() == pytest.approx(plain["loss"].item(), rel=TOLERANCE)


SCORED = """
    import torch
    from torch import nn
    import torch.nn.functional as F

    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x, targets=None):
            out, loss = self.inner(x), None
            if targets is not None:
                loss = F.cross_entropy(out, targets.view(-1), ignore_index=0)
            return out, loss
"""
OF_MODEL = """
    for x, y in loader:
        out, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


def test_a_loss_that_a_model_of_the_cells_takes_is_weighted_as_its_forward_says() -> None:
    made_of = dict[str, Any]()
    exec(textwrap.dedent(SCORED), made_of)

    def begun() -> dict[str, Any]:
        torch.manual_seed(0)
        return program(model=made_of["Scored"]())

    made = patched(SCORED, OF_MODEL, model=made_of["Scored"]())
    assert isinstance(made, Patch), made
    assert "micro_y != 0" in made.diff()
    plain, split = begun(), begun()
    run([textwrap.dedent(OF_MODEL)], plain)
    run(after(made, (SCORED, OF_MODEL))[1:], split)
    assert distance(plain, split) <= TOLERANCE
    assert split["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)


def test_a_way_stands_for_itself_and_not_beside_the_one_before() -> None:
    assert FIX.without_way(PARTS | Dose.of(late=True, weigh="sum")) == PARTS


def test_what_a_mask_selects_behind_the_model_is_selected_of_each_part() -> None:
    selected = """
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        mask = y != 3
        y = y[mask]
        loss = F.cross_entropy(out[mask], y, ignore_index=0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    """
    made = patched(SETUP, selected, dose=PARTS | Dose.of(late=True))
    assert isinstance(made, Patch), made
    assert "(y[mask] != 0).sum()" in made.diff()
    plain, split = program(), program()
    run([SETUP_TEXT, textwrap.dedent(selected)], plain)
    run(after(made, (SETUP, selected)), split)
    assert distance(plain, split) <= TOLERANCE
    assert split["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)


ACCUMULATING = """
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / 3
        loss.backward()
        if (i + 1) % 3 == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
"""
OWN_LOSS = """
    def compute_loss(net, batch, weight=0.1):
        \"\"\"Return the loss and what came out.\"\"\"
        inputs, targets = batch
        out = net(inputs.to(device))
        return F.cross_entropy(out, targets) + weight * out.pow(2).mean(), out

    for batch in loader:
        optimizer.zero_grad()
        loss, out = compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
OWN_TRAINER = """
    class Trainer:
        def training_step(self, batch):
            inputs, targets = batch
            return criterion(model(inputs.to(device)), targets)

        def fit(self):
            for batch in loader:
                loss = self.training_step(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

    Trainer().fit()
"""
TERMS = """
    for x, y in loader:
        out = model(x)
        main = criterion(out, y)
        extra = 0.1 * out.pow(2).sum()
        loss = main * 1.0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [main.item(), extra.item()]
"""
POPPED = """
    for batch in dicts:
        optimizer.zero_grad()
        y = batch.pop("labels")
        x = batch.pop("x").to(device)
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
"""
FETCHED_AGAIN = """
    batches = iter(loader)
    for step in range(7):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
IN_A_CLASS = """
    class Trainer:
        def __init__(self, net, batches):
            self.model = net.to(device)
            self.criterion = nn.CrossEntropyLoss()
            self.batches = batches

        def fit(self):
            for x, y in self.batches:
                optimizer.zero_grad()
                loss = self.criterion(self.model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

    Trainer(model, loader).fit()
"""
A_STEP_A_CALL = """
    def train_step(net, inputs, targets, scale=1.0):
        out = net(inputs)
        loss = scale * criterion(out, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for x, y in loader:
        losses.append(train_step(model, x, y))
"""
CLOSURE = """
    for x, y in loader:
        def closure():
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss
        losses.append(optimizer.step(closure).item())
"""
SEVERAL = """
    head = nn.Linear(4, 4)
    judge = torch.optim.SGD(head.parameters(), lr=0.1)
    for x, y in loader:
        rows = x.size(0)
        real = torch.full((rows, 4), 0.5)
        judge.zero_grad()
        made = model(x)
        error = F.mse_loss(head(made.detach()), real)
        error.backward()
        judge.step()

        optimizer.zero_grad()
        real.fill_(1.0)
        loss = F.mse_loss(head(made), real)
        loss.backward()
        optimizer.step()
        losses += [error.item(), loss.item(), rows]
"""
IN_BRANCHES = """
    for phase in ["train", "val"]:
        for x, y in loader:
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                out = model(x)
                best = out.argmax(1)
                loss = criterion(out, y)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            losses.append(loss.item())
            correct += (best == y).sum().item()
"""
BY_HAND = """
    for step in range(3):
        chosen = torch.randint(len(X), (16,))
        loss = 0
        for layer in range(2):
            loss += criterion(model(X[chosen]), Y[chosen])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
        losses.append(loss.item())
"""
FOLLOWED = {
    "a step a call": A_STEP_A_CALL,
    "closure": CLOSURE,
    "several": SEVERAL,
    "in branches": IN_BRANCHES,
    "by hand": BY_HAND,
    "accumulating": ACCUMULATING,
    "own loss": OWN_LOSS,
    "own trainer": OWN_TRAINER,
    "terms": TERMS,
    "popped": POPPED,
    "fetched again": FETCHED_AGAIN,
    "in a class": IN_A_CLASS,
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_leaves_the_same_parameters(name: str) -> None:
    sources = (SETUP, FOLLOWED[name])
    made = patched(*sources)
    assert isinstance(made, Patch), made
    plain, split = program(), program()
    rows = rows_seen(split["model"])
    run([textwrap.dedent(source) for source in sources], plain)
    run(after(made, sources), split)
    assert distance(plain, split) <= TOLERANCE
    assert split["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)
    assert max(rows) in (4, 5) or name == "several"  # what a later backward pass goes through is made at once
    assert split["scheduler"].last_epoch == plain["scheduler"].last_epoch
    assert split["correct"] == plain["correct"]
    assert isinstance(patched(*after(made, sources)), Refused)


class Recurrent(nn.Module):
    """A layer that takes the batch in dimension 1 and gives its state on, as ``nn.LSTM`` does, and a flat output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 8, 2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        out, state = self.layer(x, state)
        return self.head(out).view(-1, 4), state


CARRIED = """
    def repackage(state):
        return tuple(part.detach() for part in state)

    state = (torch.zeros(2, 14, 8), torch.zeros(2, 14, 8))
    for i in range(0, 12, 4):
        data, target = S[i : i + 4], T[i : i + 4].view(-1)
        optimizer.zero_grad()
        state = repackage(state)
        out, state = model(data, state)
        loss = criterion(out, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


def test_a_state_is_carried_and_the_batch_may_be_in_another_dimension() -> None:
    def recurrent() -> dict[str, Any]:
        torch.manual_seed(0)
        return program(model=Recurrent(), S=torch.randn(12, 14, 8), T=torch.randint(0, 4, (12, 14)))

    cells = cells_of(SETUP, CARRIED)
    made = patch(cells, evidence(cells, recurrent()), PARTS)
    assert isinstance(made, Patch), made
    plain, split = recurrent(), recurrent()
    run([textwrap.dedent(source) for source in (SETUP, CARRIED)], plain)
    run(after(made, (SETUP, CARRIED)), split)
    assert distance(plain, split) <= TOLERANCE
    pairs = zip(plain["state"], split["state"], strict=True)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)
    assert split["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)


LATE = """
    for x, y in loader:
        weight = x.abs().sum(1)
        weight = weight / weight.sum()
        optimizer.zero_grad()
        loss = (weight * F.cross_entropy(model(x), y, reduction="none")).sum()
        loss.backward()
        optimizer.step()
"""


def test_what_depends_on_the_whole_batch_is_made_before_the_parts() -> None:
    for dose, same in ((PARTS, False), (PARTS | Dose.of(late=True), True)):
        made = patched(SETUP, LATE, dose=dose)
        assert isinstance(made, Patch), made
        assert tried(made, [SETUP_TEXT, textwrap.dedent(LATE)], program()).same is same


CONSTANTS = "PAD, BOS = 0, 1\nIGNORED = PAD\nclass Config:\n    pad = PAD\nconfig = Config()\n"
TOKENS = """
    for ids, labels in texts:
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        classes = logits.shape[-1]
        labels = labels[:, 1:].reshape(-1)
        loss = criterion(logits.reshape(-1, classes), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


def texts_of(**namespace: Any) -> dict[str, Any]:
    """Texts of 3 to 16 tokens that begin with a 1 and end in zeros, and a model that tells the next token."""
    torch.manual_seed(0)
    ids = torch.randint(2, 7, (40, 16))
    ids[:, 0] = 1
    ids[torch.arange(16) >= torch.randint(3, 17, (40, 1)).sort(0).values] = 0
    model = nn.Sequential(nn.Embedding(7, 8), nn.Tanh(), nn.Linear(8, 7))
    loader = DataLoader(TensorDataset(ids, ids), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return program(model=model, optimizer=optimizer, texts=loader, **namespace)


@pytest.mark.parametrize("name", ["PAD", "IGNORED", "Config.pad", "config.pad", "-3 + 3"])
@pytest.mark.parametrize("cell", [1, 2])
def test_a_constant_of_the_notebook_is_what_a_loss_passes_over(name: str, cell: int) -> None:
    sources = [textwrap.dedent(SETUP) + CONSTANTS, "losses = []\n", textwrap.dedent(TOKENS)]
    sources[cell] = f"criterion = nn.CrossEntropyLoss(ignore_index={name})\n" + sources[cell]
    plain = texts_of()
    run(sources, plain)
    cells = cells_of(*sources)
    made = patch(cells, evidence(cells, plain), PARTS)
    assert isinstance(made, Patch), made
    assert "(micro_labels[:, 1:] != 0).sum()" in made.edits[-1].after
    split = texts_of()
    rows = rows_seen(split["model"])
    run(after(made, tuple(sources)), split)
    assert max(rows) in (4, 5)
    assert distance(plain, split) <= TOLERANCE
    assert split["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)


OWN_LOSS = """
    for ids, labels in texts:
        optimizer.zero_grad()
        outputs = model(input_ids=ids, labels=labels)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


@pytest.mark.parametrize("taken", ["outputs.loss", "outputs['loss']", "outputs[0]"])
def test_labels_by_name_are_what_a_model_takes_its_loss_over(taken: str) -> None:
    config = GPT2Config(vocab_size=7, n_embd=8, n_layer=1, n_head=1, n_positions=16, bos_token_id=1, eos_token_id=1)
    sources = [textwrap.dedent(SETUP), "losses = []\n", textwrap.dedent(OWN_LOSS).replace("outputs.loss", taken)]
    plain = texts_of()
    ids = plain["texts"].dataset.tensors[0]
    plain |= {"model": GPT2LMHeadModel(config).eval(), "texts": [(ids, ids.masked_fill(ids == 0, -100))]}
    plain["optimizer"] = torch.optim.SGD(plain["model"].parameters(), lr=0.1)
    cells = cells_of(*sources)
    made = patch(cells, evidence(cells, plain), PARTS)
    assert isinstance(made, Patch), made
    assert "(micro_labels[:, 1:] != -100).sum()" in made.edits[-1].after
    split = copy.deepcopy(plain)
    run(sources, plain)
    run(after(made, tuple(sources)), split)
    assert distance(plain, split) <= TOLERANCE
    assert split["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)


def test_counting_other_targets_than_those_of_the_loss_is_off() -> None:
    sources = [textwrap.dedent(SETUP), "criterion = nn.CrossEntropyLoss(ignore_index=0)\n", textwrap.dedent(TOKENS)]
    plain, split = texts_of(), texts_of()
    run(sources, plain)
    cells = cells_of(*sources)
    made = patch(cells, evidence(cells, plain), PARTS)
    assert isinstance(made, Patch)
    run([text.replace("labels[:, 1:] != 0", "labels != 0") for text in after(made, tuple(sources))], split)
    assert distance(plain, split) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["PAD", "tokenizer.pad_token_id"])
def test_what_a_loss_of_a_function_passes_over_is_written_as_it_is_there(name: str) -> None:
    function = f"def train():\n    criterion = nn.CrossEntropyLoss(ignore_index={name})\n" + textwrap.indent(
        textwrap.dedent(TOKENS), "    "
    )
    cells = cells_of(SETUP, function, "train()")
    made = patch(cells, evidence(cells, texts_of()), PARTS)
    assert isinstance(made, Patch)
    assert f"!= {name})" in made.edits[-1].after


def test_a_loss_that_the_namespace_shows_needs_no_text() -> None:
    sources = [SETUP, "pads = {'pad': 0}\ncriterion = nn.CrossEntropyLoss(ignore_index=pads.get('pad'))", TOKENS]
    for cells in (cells_of(*sources), cells_of(sources[0], sources[1] + textwrap.dedent(TOKENS))):
        found = patch(cells, evidence(cells, texts_of(criterion=nn.CrossEntropyLoss(ignore_index=0))), PARTS)
        assert isinstance(found, Patch)
        assert "!= 0" in found.edits[-1].after


def test_without_the_weights_the_parameters_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_micro_writer.Writer, "_share", lambda self: "1 / 4")
    made = patched(SETUP, ZERO_FIRST)
    assert isinstance(made, Patch)
    plain = run([textwrap.dedent(s) for s in (SETUP, ZERO_FIRST)], program())
    split = run(after(made, (SETUP, ZERO_FIRST)), program())
    assert distance(plain, split) > 100 * TOLERANCE


def sgd() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


FUNCTION = """
    def train(net, batches, loss_fn, epochs=1):
        history = []
        for epoch in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                loss = loss_fn(net(x), y)
                loss.backward()
                optimizer.step()
                history.append(loss.item())
        return history
"""


def test_function_of_an_earlier_cell_is_replayed() -> None:
    call = "losses = train(model, loader, criterion, epochs=2)"
    made = patched(SETUP, FUNCTION, call)
    assert isinstance(made, Patch)
    (edit,) = made.edits
    assert edit.cell == 2
    assert edit.replay.startswith("def train(")
    plain = run([textwrap.dedent(s) for s in (SETUP, FUNCTION, call)], program())
    split = program()
    rows = rows_seen(split["model"])
    run([textwrap.dedent(s) for s in (SETUP, FUNCTION, edit.replay, call)], split)
    assert distance(plain, split) <= TOLERANCE
    assert split["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)
    assert max(rows) in (4, 5)


MAIN = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x)

    def main():
        net = Net().to(device)
        criterion = nn.CrossEntropyLoss(reduction="sum")
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in loader:
            loss = criterion(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        return net
"""


def test_main_that_builds_all_of_its_objects() -> None:
    sources = (SETUP, MAIN, "model = main()")
    cells = cells_of(*sources)
    namespace = {"loader": program()["loader"]}
    made = patch(cells, evidence(cells, namespace), PARTS)
    assert isinstance(made, Patch), made
    plain = run([textwrap.dedent(s) for s in sources], {"loader": program()["loader"]})
    split = run(after(made, sources), {"loader": program()["loader"]})
    assert distance(plain, split) <= TOLERANCE
    # The sum of the losses is not weighted: its one line stands as it was.
    assert "            loss.backward()\n" in made.edits[0].after
    assert "len(" not in made.edits[0].after


def test_patching_again_is_refused() -> None:
    made = patched(SETUP, ZERO_FIRST)
    assert isinstance(made, Patch)
    again = patched(*after(made, (SETUP, ZERO_FIRST)))
    assert isinstance(again, Refused)
    assert again.reason == "the batch is taken in parts already"


GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,14 +1,23 @@
 
 %matplotlib inline
 for i, (x, y) in enumerate(tqdm(loader)):
-    x = x.to(device)
     y = y.to(device)  # the answers
-    # forward
-    logits = model(x)
-    loss = criterion(logits, y)
 
     optimizer.zero_grad()
-    loss.backward()  # gradients
+    batch_loss = 0.0
+    logits_parts = []
+    # In 4 parts: the gradients of the whole batch, the activations of one part at a time.
+    for micro_x, micro_y in zip(x.chunk(4), y.chunk(4), strict=True):
+        micro_x = micro_x.to(device)
+        # forward
+        logits = model(micro_x)
+        loss = criterion(logits, micro_y)
+        loss = loss * (len(micro_x) / len(x))
+        loss.backward()  # gradients
+        batch_loss += loss.detach()
+        logits_parts.append(logits.detach())
+    loss = batch_loss
+    logits = torch.cat(logits_parts)
     optimizer.step()
     total += loss.item() * len(x)
     correct += (logits.argmax(1) == y).sum().item()
"""  # noqa: W293


def test_golden_diff() -> None:
    made = patched(
        SETUP,
        """
        %matplotlib inline
        for i, (x, y) in enumerate(tqdm(loader)):
            x = x.to(device)
            y = y.to(device)  # the answers
            # forward
            logits = model(x)
            loss = criterion(logits, y)

            optimizer.zero_grad()
            loss.backward()  # gradients
            optimizer.step()
            total += loss.item() * len(x)
            correct += (logits.argmax(1) == y).sum().item()
        """,
    )
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN


HEAD = "for x, y in loader:\n    optimizer.zero_grad()\n"
TAIL = "    loss.backward()\n    optimizer.step()\n"
REFUSED = {
    "beside the loss": (HEAD + "    state.last = model(x)\n    loss = criterion(model(x), y)\n" + TAIL),
    "arguments": (
        HEAD + "    loss = criterion(model(x), y)\n    loss.backward(retain_graph=True)\n    optimizer.step()\n"
    ),
    "bound anew before the backward pass": (
        HEAD + "    loss = criterion(model(x), y)\n    if rarely():\n        log(loss)\n    loss = loss / 2\n" + TAIL
    ),
    "how the step goes on": (HEAD + "    loss = criterion(model(x), y)\n    if loss > 9:\n        continue\n" + TAIL),
}

UNFIT = {
    "a function that reads the batch by its name": (
        "def measured(out):\n    return criterion(out, y)\n" + HEAD + "    loss = measured(model(x))\n" + TAIL
    ),
    "a mean of the batch in a function": (
        "def measured(out, y):\n    return criterion(out - out.mean(0), y)\n"
        + HEAD
        + "    loss = measured(model(x), y)\n"
        + TAIL
    ),
    "a side effect in a function": (
        "def measured(out, y):\n    losses.append(0.0)\n    return criterion(out, y)\n"
        + HEAD
        + "    loss = measured(model(x), y)\n"
        + TAIL
    ),
    "a target beside the batch": "real = torch.arange(16) // 4\n"
    + HEAD
    + "    loss = F.cross_entropy(model(x), real[: len(x)])\n"
    + TAIL,
    "all pairs": HEAD + "    z = model(x)\n    loss = criterion(z @ z.T, y)\n" + TAIL,
    "without the first row": HEAD + "    loss = criterion(model(x[1:]), y[1:])\n" + TAIL,
    "class weights": "w = nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0))\n"
    + HEAD
    + "    loss = w(model(x), y)\n"
    + TAIL,
    "twice the loss": HEAD + "    loss = criterion(model(x), y)\n    loss = loss * loss\n" + TAIL,
    "a mean that is squared": HEAD + "    loss = model(x).mean(0).pow(2).sum()\n" + TAIL,
    "a spread by a well-known name": "def mse_loss(a, b):\n    return a.std()\n"
    + (HEAD + "    loss = mse_loss(model(x), y)\n" + TAIL),
    "the classes that occur": HEAD + "    loss = model(x).pow(2).mean() * len(y.unique())\n" + TAIL,
    "a spread": HEAD + "    z = model(x)\n    loss = (z - z.mean()).pow(2).mean()\n" + TAIL,
    "a length that may be that of the batch": HEAD
    + "    loss = F.cross_entropy(model(x), y, reduction='sum') / y.shape[-1]\n"
    + TAIL,
    "normalised over the batch": "norm = nn.BatchNorm1d(4)\n"
    + HEAD
    + "    loss = criterion(norm(model(x)), y)\n"
    + TAIL,
}
"""What reading does not refuse, and the trial does."""


def tried(made: Patch, sources: list[str], namespace: dict[str, Any]) -> Trial:
    cells = Cells(history=(Cell(number=1, source=sources[-1]),))
    session: Any = Session(namespace=namespace, cells=cells, accelerator=None)
    run([SETUP_TEXT], namespace)
    attempt = Attempt(source=made.edits[-1].after, replays=())
    return compare(
        session, lambda: None, Attempt(source=sources[-1]), [attempt], effect=Effect.EQUIVALENT, parts=4, aim_s=0.0
    )


@pytest.mark.parametrize("name", UNFIT)
def test_what_reading_does_not_refuse_the_trial_does(name: str) -> None:
    made = patched(SETUP, UNFIT[name])
    assert isinstance(made, Patch), made
    trial = tried(made, [SETUP_TEXT, UNFIT[name]], program())
    assert trial.same is False, trial


def test_what_is_fit_the_trial_tells() -> None:
    loop = "def my_error(a, b):\n    return criterion(a, b) + 0.1 * a.abs().mean()\n" + HEAD
    loop += "    error = my_error(model(x), y)\n" + TAIL.replace("loss.", "error.")
    made = patched(SETUP, loop)
    assert isinstance(made, Patch), made
    trial = tried(made, [SETUP_TEXT, loop], program())
    assert trial.same is True, trial


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_of_source(reason: str) -> None:
    made = patched(SETUP, REFUSED[reason])
    assert isinstance(made, Refused), made.diff()
    assert any(part in made.reason for part in reason.split("|")), made.reason


def test_moved_batch_used_after_the_step_is_moved_once_before() -> None:
    made = patched(SETUP, ZERO_BETWEEN)
    assert isinstance(made, Patch)
    text = made.edits[0].after
    assert text.index("inputs, labels = inputs.to(device)") < text.index("for micro_inputs")


def test_batch_norm_is_refused_while_it_trains() -> None:
    def norm() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    refused = patched(SETUP, ZERO_FIRST, model=norm())
    assert refused == Refused("model[1] normalises over the batch in training mode")
    frozen = norm()
    frozen[1].eval()  # type: ignore[index]
    assert isinstance(patched(SETUP, ZERO_FIRST, model=frozen), Patch)
    assert isinstance(patched(SETUP, ZERO_FIRST, model=norm().eval()), Patch)


class LeavesTerm(nn.Module):
    """A model whose forward leaves a term of the loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kl = nn.Linear(8, 4), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.kl = out.square().mean()
        return out


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[0].register_forward_hook(lambda *_: None)
    return model


def test_what_a_forward_leaves_behind_and_hooks_are_told_before_the_try() -> None:
    leaves = LeavesTerm()
    assert not isinstance(propose_for(ZERO_FIRST, model=leaves), Refused)
    leaves(torch.randn(2, 8))
    why = "a forward leaves model.kl behind, which would be that of a part of the batch"
    assert propose_for(ZERO_FIRST, model=leaves) == Refused(why)
    assert patched(SETUP, ZERO_FIRST, model=leaves) == Refused(why)
    why = "model[0] has forward hooks, which would be called for each part of a batch"
    assert propose_for(ZERO_FIRST, model=hooked()) == Refused(why)
    whole = nn.Linear(8, 4)
    whole.register_forward_pre_hook(lambda *_: None)
    assert isinstance(propose_for(ZERO_FIRST, model=whole), Refused)
    with pytest.warns(FutureWarning, match="deprecated"):
        normed = nn.utils.weight_norm(nn.Linear(8, 4))
    assert not isinstance(propose_for(ZERO_FIRST, model=normed), Refused)


def propose_for(source: str, **namespace: Any) -> Any:
    cells = cells_of(SETUP, source)
    holdings = (Holding(bytes=8 << 20, device="cuda:0", role=Role.BATCH, path="x", shape=(6, 8)),)
    roles = ((Role.ACTIVATION, 64 << 20), (Role.BATCH, 8 << 20))
    found = evidence(cells, program(**namespace), roles=roles, holdings=holdings)
    return propose(live.INCIDENT, found)


def test_proposals_are_the_mildest_first_and_no_more_parts_than_samples() -> None:
    proposals = propose_for(ZERO_FIRST)
    assert [one.dose.number("parts") for one in proposals] == [2, 4]
    assert [one.saves for one in proposals] == [(73 << 20) // 2, (73 << 20) * 3 // 4]
    assert {one.effect for one in proposals} == {FIX.effect} == {Effect.EQUIVALENT}
    assert all("estimate" in one.basis and one.caveat is None for one in proposals)


NOISY = HEAD + "    noise = torch.randn(len(x), 8)\n    loss = criterion(model(x + noise), y)\n" + TAIL
TEXTS = "for batch in dicts:\n    optimizer.zero_grad()\n    loss = criterion(model(batch['x']), batch['labels'])\n"


@pytest.mark.parametrize("source", [ZERO_FIRST, NOISY, TEXTS + TAIL], ids=["dropout", "noise", "dictionaries"])
def test_random_numbers_are_drawn_as_for_the_whole_batch(source: str) -> None:
    source = textwrap.dedent(source)
    made_of = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4)
    assert propose_for(source, model=nn.Sequential(*made_of))[0].effect is Effect.EQUIVALENT
    made = patched(SETUP, source, model=nn.Sequential(*made_of))
    assert isinstance(made, Patch), made
    assert "from oomdoctor import batch_parts" in made.edits[-1].after
    trial = tried(made, [SETUP_TEXT, source], program(model=nn.Sequential(*made_of)))
    assert trial.same is True, trial
    assert "batch_parts" not in patched(SETUP, ZERO_FIRST, model=nn.Sequential(*made_of).eval()).edits[-1].after


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("print(1)", "no backward pass"),
    ],
)
def test_proposals_refused(source: str, reason: str) -> None:
    refused = propose_for(source)
    assert isinstance(refused, Refused)
    assert reason in refused.reason


def test_proposal_refused_for_one_sample_and_for_nothing_to_save() -> None:
    cells = cells_of(SETUP, ZERO_FIRST)
    one = (Holding(bytes=8, device="cuda:0", role=Role.BATCH, path="x", shape=(1, 8)),)
    refused = propose(live.INCIDENT, evidence(cells, program(), holdings=one))
    assert refused == Refused("the batch has one sample: there is nothing to split")


def test_a_mean_and_a_sum_in_one_loss_are_not_taken_apart_where_one_counts_only_later_on() -> None:
    """A trial of two steps sees nothing of a term whose coefficient is still 0."""
    cell = """
        for step, (x, y) in enumerate(loader):
            beta = 0.0 if step < 4 else 1e-3
            optimizer.zero_grad()
            out = model(x)
            penalty = out.pow(2).sum()
            loss = criterion(out, y) + beta * penalty
            loss.backward()
            optimizer.step()
    """
    for way in ({}, {"late": True}, {"weigh": "sum"}):
        refused = patched(SETUP, cell, dose=Dose.of(parts=2, **way))
        assert isinstance(refused, Refused), refused
        assert "adds a mean over the samples and a sum over them" in refused.reason
