from __future__ import annotations

import textwrap
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch.utils.data import DataLoader

from oomdoctor.fixes import catalogue, get
from oomdoctor.model.case import Case, State
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.plan import Candidate, Forecast, Plan
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused
from oomdoctor.pipeline import admitted
from oomdoctor.testing import assert_heals

FIX = get("smaller_batch")

IMPORTS = """
    import torch
    from torch import nn
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset
"""
DATA = """
    torch.manual_seed(0)
    X, Y = torch.randn(96, 8), torch.randint(0, 4, (96,))
    train_set = TensorDataset(X, Y)
    losses = []
"""
MODEL = """
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
"""
LOADER = """
    batch_size = 32  # what the paper used
    train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
    n_batches = len(train_loader)
"""
LOOP = """
    for i, (x, y) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
SLICES = """
    for i in range(0, len(X), 32):
        xb, yb = X[i:i + 32], Y[i:i + 32]
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
"""
DRAWN = """
    bs = 32

    def get_batch():
        at = torch.randint(len(X), (bs,))
        return X[at], Y[at]
"""
STEPS = """
    for step in range(3):
        x, y = get_batch()
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
HELPER = """
    def get_loaders(data, bs=32):
        train = DataLoader(data, batch_size=bs, shuffle=True)
        return train, DataLoader(data, batch_size=bs * 2)
"""
FIT = """
    def fit(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
"""
PARSER = """
    import argparse
    parser = argparse.ArgumentParser(description="an example")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="samples in a batch")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args([])
"""
KEYWORDS = """
    train_kwargs = {"batch_size": args.batch_size}
    if args.lr > 0:
        train_kwargs.update({"shuffle": True})
    train_loader = DataLoader(train_set, **train_kwargs)
"""
OWN_DATA_SET = """
    class Pairs(torch.utils.data.Dataset):
        def __init__(self, x, y, seed):
            self.x, self.y = x + torch.randn(len(x), 1), y
        def __len__(self):
            return len(self.x)
        def __getitem__(self, at):
            return self.x[at], self.y[at]
"""
DATACLASS = """
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Config:
        lr: float = 0.1
        batch_size: int = 32

    cfg = Config()
"""
FIT_DATA = """
    def fit(model, data, epochs=1, batch_size=32):
        for x, y in DataLoader(data, batch_size=batch_size):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
"""
MADE_UP = """
    for step in range(3):
        x = torch.randn(BATCH, width)
        y = torch.randint(0, 4, (BATCH,))
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
TRAINER = """
    class Trainer:
        def __init__(self, model, data, batch_size=32):
            self.model, self.criterion = model, nn.CrossEntropyLoss()
            self.loader = DataLoader(data, batch_size=batch_size, shuffle=True)
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_epoch(self):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(x), y)
                loss.backward()
                self.optimizer.step()
"""


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def run(sources: list[str], namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    namespace = {} if namespace is None else namespace
    for source in sources:
        exec(compile(textwrap.dedent(source), "<cell>", "exec"), namespace)
    return namespace


def evidence(cells: Cells, namespace: dict[str, Any], *holdings: Holding) -> Evidence:
    kinds = (nn.Module, torch.optim.Optimizer, DataLoader)
    found = [[(name, value) for name, value in namespace.items() if isinstance(value, kind)] for kind in kinds]
    base = live.evidence(holdings=holdings)
    return Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=facts(cells, namespace, *found))


def rows(namespace: dict[str, Any]) -> list[int]:
    """Samples in each batch that the model is given from now on."""
    seen: list[int] = []
    namespace["model"].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


def patched(*sources: str, size: int = 16) -> Patch | Refused:
    cells = cells_of(*sources)
    namespace = run([cell.source for cell in cells.history[:-1]])
    return FIX.patch(cells, evidence(cells, namespace), Dose.of(batch_size=size))


def changed(made: Patch, sources: tuple[str, ...]) -> list[str]:
    texts = [textwrap.dedent(source) for source in sources]
    for edit in made.edits:
        texts[edit.cell - 1] = edit.after
    return texts


NOTEBOOKS = {
    "named in another cell": (IMPORTS, DATA, MODEL, LOADER, LOOP),
    "literal in another cell": (IMPORTS, DATA, MODEL, "train_loader = DataLoader(train_set, 32, shuffle=True)", LOOP),
    "in the failing cell": (IMPORTS, DATA, MODEL, LOADER + LOOP),
    "slices": (IMPORTS, DATA, MODEL, SLICES),
    "named slices": (IMPORTS, DATA, MODEL, "batch_size = 32", SLICES.replace("32", "batch_size")),
    "drawn": (IMPORTS, DATA, MODEL, DRAWN, STEPS),
    "default of a helper": (IMPORTS, DATA, MODEL, HELPER, "train_loader, test_loader = get_loaders(train_set)", LOOP),
    "argument of a helper": (IMPORTS, DATA, MODEL, HELPER, "train_loader, _ = get_loaders(train_set, bs=32)", LOOP),
    "function": (IMPORTS, DATA, MODEL, LOADER, FIT, "fit(model, train_loader, optimizer)"),
    "dictionary": (
        *(IMPORTS, DATA, MODEL, "config = {'lr': 0.1, 'batch_size': 32}"),
        *("train_loader = DataLoader(train_set, batch_size=config['batch_size'])", LOOP),
    ),
    "class": (
        *(IMPORTS, DATA, MODEL, "class Config:\n    lr = 0.1\n    batch_size: int = 32\n\ncfg = Config()"),
        *("train_loader = DataLoader(train_set, batch_size=cfg.batch_size)", LOOP),
    ),
    "settings": (
        *(IMPORTS, DATA, MODEL, "settings = dict(batch_size=32, shuffle=True)"),
        *("train_loader = DataLoader(train_set, **settings)", LOOP),
    ),
    "loaders by name": (
        *(IMPORTS, DATA, MODEL, "loaders = {name: DataLoader(train_set, batch_size=32) for name in ('train', 'val')}"),
        LOOP.replace("train_loader", "loaders['train']"),
    ),
    "command line": (
        *(IMPORTS, PARSER, DATA, MODEL.replace("lr=0.1", "lr=args.lr")),
        *("train_loader = DataLoader(train_set, batch_size=args.batch_size)", LOOP),
    ),
    "keywords of the command line": (IMPORTS, PARSER, DATA, MODEL, KEYWORDS, LOOP),
    "data set in the call": (
        *(IMPORTS, DATA, MODEL, OWN_DATA_SET),
        *("train_loader = DataLoader(Pairs(X, Y, seed=3), batch_size=32, shuffle=True)", LOOP),
    ),
    "dictionary that sets the learning rate too": (
        *(IMPORTS, DATA, "config = {'lr': 0.1, 'batch_size': 32}", MODEL.replace("lr=0.1", "lr=config['lr']")),
        *("train_loader = DataLoader(train_set, batch_size=config['batch_size'])", LOOP),
    ),
    "nested dictionary": (
        *(
            IMPORTS,
            DATA,
            "config = {'data': {'batch_size': 32}, 'lr': 0.1}",
            MODEL.replace("lr=0.1", "lr=config['lr']"),
        ),
        *("train_loader = DataLoader(train_set, batch_size=config['data']['batch_size'])", LOOP),
    ),
    "looked up": (
        *(IMPORTS, DATA, "config = dict(batch_size=32, lr=0.1)", MODEL),
        *("train_loader = DataLoader(train_set, batch_size=config.get('batch_size', 8))", LOOP),
    ),
    "set item by item": (
        *(IMPORTS, DATA, "config = {}\nconfig['lr'] = 0.1\nconfig['batch_size'] = 32", MODEL),
        *("train_loader = DataLoader(train_set, batch_size=config['batch_size'])", LOOP),
    ),
    "namespace": (
        *(IMPORTS, "from types import SimpleNamespace\ncfg = SimpleNamespace(lr=0.1, batch_size=32)", DATA),
        *(
            MODEL.replace("lr=0.1", "lr=cfg.lr"),
            "train_loader = DataLoader(train_set, batch_size=cfg.batch_size)",
            LOOP,
        ),
    ),
    "dataclass": (
        *(IMPORTS, DATACLASS, DATA, MODEL.replace("lr=0.1", "lr=cfg.lr")),
        *("train_loader = DataLoader(train_set, batch_size=cfg.batch_size)", LOOP),
    ),
    "settings passed to a function": (
        *(IMPORTS, DATACLASS, DATA, MODEL.replace("lr=0.1", "lr=cfg.lr")),
        "def make_loader(settings, data):\n    return DataLoader(data, batch_size=settings.batch_size)",
        *("train_loader = make_loader(cfg, train_set)", LOOP),
    ),
    "arguments passed to main": (
        *(IMPORTS, DATA, MODEL, PARSER),
        "def main(opt):\n    train_loader = DataLoader(train_set, batch_size=opt.batch_size)\n"
        + textwrap.indent(textwrap.dedent(LOOP), "    "),
        "main(args)",
    ),
    "another name of the settings": (
        *(IMPORTS, DATA, MODEL, "config = {'batch_size': 32}\nc = config"),
        *("train_loader = DataLoader(train_set, batch_size=c['batch_size'])", LOOP),
    ),
    "settings made of others of their name": (
        *("from types import SimpleNamespace\n" + textwrap.dedent(IMPORTS), DATA, MODEL),
        "config = {'train': {'batch_size': 32}}\nconfig = SimpleNamespace(**config['train'])",
        *("train_loader = DataLoader(train_set, batch_size=config.batch_size)", LOOP),
    ),
    "conditional": (
        *(IMPORTS, DATA, MODEL, "batch_size = 64 if torch.cuda.is_available() else 32"),
        *("train_loader = DataLoader(train_set, batch_size=batch_size)", LOOP),
    ),
    "branches": (
        *(IMPORTS, DATA, MODEL, "batch_size = 32\nif torch.cuda.is_available():\n    batch_size = 64"),
        *("train_loader = DataLoader(train_set, batch_size=batch_size)", LOOP),
    ),
    "default of the training function": (IMPORTS, DATA, MODEL, FIT_DATA, "fit(model, train_set)"),
    "made up": (IMPORTS, DATA, MODEL, "BATCH, width = 32, 8", MADE_UP),
    "class that is made in the failing cell": (
        IMPORTS,
        DATA,
        MODEL,
        TRAINER,
        "Trainer(model, train_set).train_epoch()",
    ),
    "magics": (IMPORTS, DATA, MODEL, LOADER, "%%time\n" + textwrap.dedent(LOOP)),
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_retry_leaves_what_a_fresh_kernel_leaves(name: str) -> None:
    """The changed cells from the start, and the replays with the failing cell alone, give the same bits."""
    sources = NOTEBOOKS[name]
    made = patched(*sources)
    assert isinstance(made, Patch), made
    plain = changed(made, sources)
    plain[-1] = plain[-1].replace("%%time\n", "")
    fresh = run(plain[:-1])
    fresh_rows = rows(fresh)
    torch.manual_seed(1)
    run(plain[-1:], fresh)

    retried = run(list(sources[:-1]))
    retried_rows = rows(retried)
    failing = len(sources)
    torch.manual_seed(1)
    run([edit.replay for edit in made.edits if edit.cell != failing], retried)
    run(plain[-1:], retried)
    assert set(fresh_rows) == {16}
    assert retried_rows == fresh_rows
    assert live.same(live.values(fresh["model"]), live.values(retried["model"]))
    assert fresh.get("n_batches") == retried.get("n_batches")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_changing_it_again_is_refused(name: str) -> None:
    sources = NOTEBOOKS[name]
    made = patched(*sources)
    assert isinstance(made, Patch)
    texts = changed(made, sources)
    assert "magics" in name or isinstance(patched(*texts), Refused)


GOLDEN = """\
--- In[4]
+++ In[4] fixed
@@ -1,4 +1,4 @@
\x20
-batch_size = 32  # what the paper used
+batch_size = 16  # what the paper used
 train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
 n_batches = len(train_loader)
"""


def test_golden_diff_and_what_runs_again() -> None:
    made = patched(*NOTEBOOKS["named in another cell"])
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    (edit,) = made.edits
    assert edit.replay.splitlines() == [
        "batch_size = 16",
        "train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)",
        "n_batches = len(train_loader)",
    ]
    assert edit.anew == ("batch_size", "train_loader", "n_batches")


def test_both_train_with_less_memory() -> None:
    peaks = []
    for size in (32, 8):
        namespace = run([IMPORTS, DATA, MODEL, LOADER.replace("32", str(size))])
        with live.Peak() as seen:
            run([LOOP], namespace)
        peaks.append(seen.peak)
    assert peaks[1] < 0.6 * peaks[0]


ONE_CYCLE = """
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=1, steps_per_epoch=len(train_loader))
"""
REFUSALS = {
    "a schedule over the steps": (
        (IMPORTS, DATA, MODEL, LOADER, ONE_CYCLE, LOOP + "        scheduler.step()\n"),
        "line 2 of cell 5 made something of it that the failing cell needs",
    ),
    "a schedule over steps that are written down": (
        (
            *(IMPORTS, DATA, MODEL, LOADER),
            "steps = 3\n" + textwrap.dedent(ONE_CYCLE).replace("epochs=1, steps_per_epoch=len(train_loader)", "steps"),
            LOOP + "        scheduler.step()\n",
        ),
        "`OneCycleLR(..., steps)` is a schedule over so many steps",
    ),
    "noise of the batch's size": (
        (IMPORTS, DATA, MODEL, LOADER, "noise = torch.randn(batch_size, 8)", LOOP.replace("(x)", "(x + noise)")),
        "line 1 of cell 5 made something",
    ),
    "a learning rate made of it": (
        (IMPORTS, DATA, LOADER, MODEL.replace("lr=0.1", "lr=0.1 * batch_size / 32"), LOOP),
        "line 3 of cell 4 made something",
    ),
    "a computed size": (
        (IMPORTS, DATA, MODEL, "train_loader = DataLoader(train_set, batch_size=len(X) // 3)", LOOP),
        "`len(X) // 3`, is not set by a number",
    ),
    "a sampler of batches": (
        (
            *(IMPORTS, DATA, MODEL),
            "train_loader = DataLoader(train_set, batch_sampler=[[0, 1], [2, 3]])",
            LOOP,
        ),
        "a sampler of batches",
    ),
    "a helper that draws": (
        (
            *(IMPORTS, DATA, MODEL),
            (
                "def make(bs):\n    a, b = torch.utils.data.random_split(train_set, [64, 32])\n"
                "    return DataLoader(a, batch_size=bs)\n"
            ),
            "train_loader = make(32)",
            LOOP,
        ),
        "does more than to make an object",
    ),
    "a class of their own": (
        (
            *(IMPORTS, DATA, MODEL),
            (
                "class DataLoader:\n    def __init__(self, data, batch_size):\n        self.all = [(X, Y)]\n"
                "    def __iter__(self):\n        return iter(self.all)\n"
            ),
            "train_loader = DataLoader(train_set, batch_size=32)",
            LOOP,
        ),
        "is a class of the cells' own",
    ),
    "the full batch": (
        (
            *(IMPORTS, DATA, MODEL),
            (
                "for epoch in range(2):\n    loss = criterion(model(X), Y)\n    optimizer.zero_grad()\n"
                "    loss.backward()\n    optimizer.step()\n"
            ),
        ),
        "was not found in the cells",
    ),
    "given on the command line": (
        (
            *(IMPORTS, PARSER.replace("[])", "['--batch-size', '32'])"), DATA, MODEL),
            *("train_loader = DataLoader(train_set, batch_size=args.batch_size)", LOOP),
        ),
        "`args.batch_size`, is not set by a number",
    ),
    "set in a way that is not read": (
        (
            *(IMPORTS, "config = {'batch_size': 32}\nfor key in config:\n    config['batch_size'] = 32", DATA, MODEL),
            *("train_loader = DataLoader(train_set, batch_size=config['batch_size'])", LOOP),
        ),
        "`config['batch_size']`, is not set by a number",
    ),
    "settings that are handed on": (
        (
            *(
                IMPORTS,
                "config = {'lr': 0.1, 'batch_size': 32}",
                DATA,
                "def settings(config):\n    return {'lr': config['lr']}\n"
                + textwrap.dedent(MODEL).replace("lr=0.1", "**settings(config)"),
            ),
            *("train_loader = DataLoader(train_set, batch_size=config['batch_size'])", LOOP),
        ),
        "line 5 of cell 4 made something",
    ),
    "keywords that are added to in a loop": (
        (
            *(IMPORTS, PARSER, DATA, MODEL),
            KEYWORDS.replace("if args.lr > 0", "for _ in range(2)"),
            LOOP,
        ),
        "line 3 of cell 5 made something",
    ),
    "a trainer that is there": (
        (IMPORTS, DATA, MODEL, TRAINER, "trainer = Trainer(model, train_set)", "trainer.train_epoch()"),
        "line 1 of cell 5 made something",
    ),
    "no training": ((IMPORTS, DATA, MODEL, LOADER, "model(X)"), "no training loop"),
    "rebound": (
        (IMPORTS, DATA, MODEL, DRAWN, STEPS.replace("loss =", "bs = len(x)\n        loss =")),
        "`bs` is bound anew in the loop",
    ),
    "pieces of texts": (
        (
            *(IMPORTS, DATA, MODEL, "bptt = 4\nT = X.view(2, 48, 8)\n"),
            SLICES.replace("len(X), 32", "T.size(1), bptt")
            .replace("X[i:i + 32]", "T[:, i:i + bptt]")
            .replace("Y[i:i + 32]", "Y"),
        ),
        "the loop cuts `T` along a later dimension: how many samples a batch has was decided where `T` was made",
    ),
    "small enough": (
        (IMPORTS, DATA, MODEL, LOADER.replace("32", "16"), LOOP),
        "the cells set batches of 16 samples, which are not larger than 16",
    ),
    "not a divisor": (
        (IMPORTS, DATA, MODEL, LOADER.replace("32", "24"), LOOP),
        "a batch of 24 does not divide into batches of 16",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    sources, reason = REFUSALS[name]
    made = patched(*sources)
    assert isinstance(made, Refused), made.diff()
    assert reason in made.reason


def test_one_sample_cannot_be_normalised() -> None:
    model = MODEL.replace("nn.ReLU()", "nn.BatchNorm1d(16)")
    made = patched(IMPORTS, DATA, model, LOADER, LOOP, size=1)
    assert isinstance(made, Refused)
    assert "model[1] normalises over the batch" in made.reason


def batch(*shape: int) -> Holding:
    return Holding(bytes=1 << 20, device="cuda:0", role=Role.BATCH, path="x", shape=shape)


def proposals(*holdings: Holding, loader: str = "train_loader") -> Any:
    sources = (IMPORTS, DATA, MODEL, LOADER, FIT if loader == "loader" else "", LOOP.replace("train_loader", loader))
    cells = cells_of(*sources)
    namespace = run(list(sources[:-1]))
    return FIX.propose(live.INCIDENT, evidence(cells, namespace, *holdings))


def test_proposals_divide_the_batch_of_the_loader() -> None:
    made = proposals(batch(7, 32))
    assert [proposal.dose["batch_size"] for proposal in made] == [16, 8, 4, 2, 1]
    assert all(proposal.effect is Effect.CHANGES_RESULT for proposal in made)
    assert made[0].caveat == (
        "batches of 16 instead of 32, and the same samples take 2 times as many steps: different results; "
        "consider a lower learning rate"
    )
    scales = (64 << 20) + (1 << 20)
    assert [proposal.saves for proposal in made[:2]] == [scales // 2, scales * 3 // 4]
    assert "65.0 MiB" in made[0].basis
    assert FIX.apply is None


FIXED = "the loop takes as many steps as before, so it sees 1/4 of the samples"
EITHER = "the same samples take 4 times as many steps"


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ((DATA, MODEL, DRAWN, STEPS), FIXED),
        ((DATA, MODEL, DRAWN, STEPS.replace("range(3)", "range(len(X) // bs)")), EITHER),
        ((DATA, MODEL, DRAWN, "    done = 0\n" + STEPS.replace("for step in range(3)", "while done < 1")), EITHER),
        ((DATA, MODEL, SLICES), EITHER),
        ((DATA, MODEL, LOADER, LOOP), EITHER),
        ((DATA, MODEL, LOADER, FIT, "    fit(model, train_loader, optimizer)\n"), EITHER),
    ],
    ids=["so many steps", "steps of a name", "while", "slices", "loader", "loader of a function"],
)
def test_the_number_of_steps_is_told_as_the_loop_has_it(sources: tuple[str, ...], told: str) -> None:
    cells = cells_of(IMPORTS, *sources)
    made = FIX.propose(live.INCIDENT, evidence(cells, run([IMPORTS, *sources[:-1]]), batch(32, 8)))
    assert not isinstance(made, Refused)
    quarter = made[1]
    assert quarter.dose["batch_size"] == 8
    assert quarter.caveat is not None
    assert quarter.caveat.startswith(f"batches of 8 instead of 32, and {told}: ")
    assert (quarter.slowdown < 1) == (told is FIXED), "as many steps of smaller batches take less time"


def test_a_loader_of_another_name_is_told_by_the_batch_found() -> None:
    assert proposals(batch(7, 32), loader="other")[0].dose["batch_size"] == 16
    assert proposals(batch(6, 5), loader="other")[0].dose["batch_size"] == 3


def test_what_is_not_known_is_not_proposed() -> None:
    assert "no batch" in proposals(loader="other").reason
    assert "one sample" in proposals(batch(1, 8), loader="other").reason
    assert "no half" in proposals(batch(3, 8), loader="other").reason
    nothing = live.evidence(roles=(), loops=(live.loop(1, 1),), holdings=(batch(8),))
    silent = live.INCIDENT.__class__(is_oom=True, family=live.INCIDENT.family)
    refused = FIX.propose(silent, nothing)
    assert isinstance(refused, Refused)
    assert "no activations" in refused.reason


CHANGING = (
    *("autocast", "dynamic_quantization", "half_weights", "lighter_optimizer", "optimizer_8bit", "smaller_batch"),
    *("smaller_image", "truncate_sequence"),
)


def case_with(fix_id: str) -> Case:
    fix = get(fix_id)
    forecast = Forecast(basis="dry run", budget=2, peak=1)
    given = {"fix": fix_id, "title": fix.title, "dose": Dose(), "effect": fix.effect, "forecast": forecast}
    offered = Candidate(**given, patch=Refused("not asked for"), applies_live=True)
    plan = Plan(unchanged=forecast, candidates=(offered,))
    return Case(number=1, incident=live.INCIDENT, evidence=live.evidence(), findings=(), plan=plan)


@pytest.mark.parametrize("fix_id", CHANGING)
def test_an_automatic_exact_retry_takes_none_of_those_that_change_the_result(fix_id: str) -> None:
    case = case_with(fix_id)
    assert admitted(case, "exact") == ()
    assert admitted(case, "off") == ()
    assert [one.fix for one in admitted(case, "any")] == [fix_id]


def test_it_heals_where_it_is_asked_for() -> None:
    data = DATA.replace("96", "8192")
    model = MODEL.replace("nn.Linear(8, 16), nn.ReLU()", "nn.Linear(8, 512), nn.Tanh()").replace("16, 4", "512, 4")
    sources = (IMPORTS, data, model, LOADER.replace("32", "4096"), LOOP)
    case = assert_heals("smaller_batch", *map(textwrap.dedent, sources), budget="22MiB")
    assert case.outcome.fixes[0].startswith("smaller_batch(batch_size=")
    assert case.outcome.state is State.CLEAN
    assert not {one.fix for one in admitted(case, "exact")} & set(CHANGING)


def test_what_asks_is_taken_by_no_automatic_retry() -> None:
    asking = [fix_id for fix_id, fix in catalogue().items() if fix.asks]
    assert "free_stale" in asking
    for fix_id in asking:
        assert admitted(case_with(fix_id), "any") == ()


def test_the_batch_of_a_loop_over_slices_is_what_is_at_hand() -> None:
    cells = cells_of(IMPORTS, DATA, MODEL, SLICES)
    namespace = run([IMPORTS, DATA, MODEL])
    namespace |= {"xb": namespace["X"][:32], "yb": namespace["Y"][:32]}
    whole = Holding(bytes=96 * 32, device="cuda:0", role=Role.BATCH, path="xb", expression="xb", shape=(96, 8))
    proposed = FIX.propose(live.INCIDENT, evidence(cells, namespace, whole))
    assert not isinstance(proposed, Refused)
    assert proposed[0].dose == Dose.of(batch_size=16)
