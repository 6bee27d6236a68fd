"""What notebooks do that a fake tensor has no answer for by itself."""

import pickle
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from capabilities import fakes_know_all, tells_saved
from forecast_lab import TRAIN, Bench, forecast, mlp, namespace, nothing, open_descriptors, session
from idioms import cells
from real_runs import real_rise

from oomdoctor.forecast import dry_runs, price
from oomdoctor.model.session import Attempt
from oomdoctor.sandbox.copies import Copy

IDIOMS = cells()


def _train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


BOUNDS = {
    "nonzero": 1.15,
    "enumerate and zip": 1.1,
    "mixup and permutations": 1.05,
}
"""Idioms whose memory values decide, or objects of Python that keep a batch: how far above the real peak is enough."""
TOLERANCE = 0.02
LIBRARIES = {
    "the Trainer of transformers": """
arguments = TrainingArguments("out", per_device_train_batch_size=8, max_steps=6, report_to=[], use_cpu=True)
Trainer(model=gpt, args=arguments, train_dataset=rows).train()
""",
    "accelerate": """
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(F.cross_entropy(model(x), y))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    "generate": "out = gpt.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)",
    "generate with samples": "out = gpt.generate(prompt, max_new_tokens=24, do_sample=True, pad_token_id=0)",
    "generate with beams": "out = gpt.generate(prompt, max_new_tokens=24, num_beams=3, pad_token_id=0)",
    "generate and keep the scores": """
out = gpt.generate(
    prompt, max_new_tokens=40, do_sample=True, top_p=0.9, pad_token_id=0, return_dict_in_generate=True,
    output_scores=True, eos_token_id=[]
)
""",
    "Lightning": """
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Lit(model), loader)
""",
}


def _namespace():
    ns = namespace(mlp, "adamw") | {"data": torch.randn(512, 256), "train": _train, "counter": torch.tensor(5)}
    ns["kept"] = ns["model"](ns["data"]).sum()
    return ns


def _namespace_of_libraries():
    import lightning
    from accelerate import Accelerator
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Lit(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch, _index):
            loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    ns = namespace(mlp, "adamw") | {"lightning": lightning, "Lit": Lit, "Accelerator": Accelerator}
    config = GPT2Config(vocab_size=500, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=9)
    draw = torch.randint
    rows = [{"input_ids": draw(0, 499, (64,)), "labels": draw(0, 499, (64,))} for _ in range(64)]
    ns |= {"gpt": GPT2LMHeadModel(config), "rows": rows, "prompt": draw(10, 499, (4, 8))}
    return ns | {"Trainer": Trainer, "TrainingArguments": TrainingArguments}


def _digest(ns):
    model, data = ns["model"], [value for value in ns.values() if isinstance(value, torch.Tensor)]
    return {
        "model": pickle.dumps(model.state_dict()),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "hooks": [(len(one._forward_hooks), len(one._backward_hooks), one.training) for one in model.modules()],
        "optimizer": pickle.dumps(ns["optimizer"].state_dict()),
        "tensors": pickle.dumps([value.detach() for value in data]),
        "names": {key: id(value) for key, value in ns.items()},
        "random": (torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state())),
        "files": open_descriptors(),
        "threads": threading.active_count(),
        "folder": Path.cwd(),
    }


def _watched(ns, cells):
    """Forecast all cells in one copy; whenever one has been answered, look whether anything has changed here."""
    forecast(ns, "pass")  # loads what the first one loads
    changed, answers = [], []

    class Watched(Copy):
        def wait(self):
            before = _digest(ns)
            for answer in super().wait():
                answers.append(answer)
                now = _digest(ns) if not self.over else before
                changed.extend(key for key in before if now[key] != before[key])
                yield answer

    attempts = [Attempt(source=source) for source in ("pass", *cells.values())]
    before = _digest(ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_runs, "Copy", Watched)
        idle, *found = price(session(ns, "", simulated=True), attempts, budget=None, prepare=nothing, timeout_s=200)
    assert _digest(ns) == before
    assert len(answers) == len(attempts)
    return idle.peak, dict(zip(cells, found, strict=True)), changed


@pytest.fixture(scope="module")
def followed():
    return _watched(_namespace(), IDIOMS)


@pytest.fixture(scope="module")
def followed_in_libraries():
    return _watched(_namespace_of_libraries(), LIBRARIES)


def test_there_are_sixty_idioms():
    assert len(IDIOMS) + len(LIBRARIES) >= 60


def _check(found, real, bound):
    assert (1 - TOLERANCE) * real <= found <= (bound or 1 + TOLERANCE) * real


_MARKS = {"the graph of an earlier cell": tells_saved, "weights are parametrised": fakes_know_all}


@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS.get(name, ())) for name in IDIOMS])
def test_the_peak_of_the_idiom_is_that_of_its_real_run(name, followed, tmp_path):
    idle, found, _ = followed
    assert found[name].refused is None
    _check(found[name].peak - idle, real_rise(_namespace, IDIOMS[name], tmp_path), BOUNDS.get(name))


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_peak_of_a_library_s_loop_is_that_of_its_real_run(name, followed_in_libraries, tmp_path):
    idle, found, _ = followed_in_libraries
    assert found[name].refused is None
    real = real_rise(_namespace_of_libraries, LIBRARIES[name], tmp_path)
    _check(found[name].peak - idle, real, None)


def test_nothing_here_has_changed_after_any_of_them(followed, followed_in_libraries):
    assert followed[2] == followed_in_libraries[2] == []


def test_of_a_bool_that_nobody_knows_the_likelier_is_taken_and_it_says_so():
    cell = "x = torch.rand(9000)\nif x.sum() > 0:\n    y = torch.ones(5 << 20)"
    idle, found = (forecast({"torch": torch}, source) for source in ("pass", cell))
    assert found.peak - idle.peak == pytest.approx(20 << 20, rel=0.01)
    assert "on the likelier way where values decide" in found.basis
    assert "likelier" not in idle.basis


LBFGS = """
newton = torch.optim.LBFGS(model.parameters())
def closure():
    newton.zero_grad()
    loss = model(data).sum()
    loss.backward()
    return loss
newton.step(closure)
"""


def test_of_lbfgs_it_is_said_that_more_may_be_needed():
    found = forecast(_namespace(), LBFGS)
    assert found.at_least
    assert "LBFGS may search further" in found.basis


def test_a_loop_that_ends_once_tensors_are_close_is_gone_to_its_end():
    cell = "x, kept = torch.zeros(1 << 16), []\nfor i in range(20):\n    new = torch.rand(1 << 16)\n    {}\n"
    cell += "y = torch.ones(5 << 20)"
    ends = "if torch.allclose(x, new): break\n    kept.append(new)"
    idle = forecast({"torch": torch}, "pass").peak
    endless = forecast({"torch": torch}, cell.format("kept.append(new)")).peak
    assert forecast({"torch": torch}, cell.format(ends)).peak == endless > idle + (20 << 20)
    known = "if torch.equal(torch.tensor([1, 2]), torch.tensor([1, 2])): break\n    kept.append(new)"
    assert forecast({"torch": torch}, cell.format(known)).peak < endless


def test_the_evaluation_after_a_training_loop_is_seen():
    evaluation = "    big = torch.ones(50 << 20)\n    del big\n"
    ns = namespace(mlp)
    train, both = (forecast(ns, source).peak for source in (TRAIN, TRAIN + evaluation))
    assert both - train > 150 << 20


def test_a_leak_in_a_loop_without_an_optimizer_is_followed_until_it_stops():
    ns = {"torch": torch}
    idle = forecast(ns, "pass").peak
    leaking = forecast(ns, "kept = []\nfor i in range(50):\n    kept.append(torch.ones(1 << 18))")
    assert leaking.peak - idle == 50 << 20


ACCUMULATED = """
for i, (x, y) in enumerate(fine):
    F.cross_entropy(model(x), y).backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_accumulation_over_many_batches_reaches_the_second_step():
    ns = namespace(mlp, "adamw")
    ns["fine"] = torch.utils.data.DataLoader(ns["loader"].dataset, batch_size=8)
    never, sometimes = (forecast(ns | {"every": every}, ACCUMULATED).peak for every in (1_000_000, 12))
    assert sometimes - never > sum(p.nbytes for p in ns["model"].parameters())


class Shell:
    """What IPython shows of itself to the forecast."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def system(self, command: str) -> None:
        self.said.append(command)

    def run_line_magic(self, name: str, line: str) -> None:
        self.said.append(name)


def test_magics_are_left_out_and_what_they_time_is_run():
    ns = namespace(mlp)
    shell = Shell()
    ns["get_ipython"] = lambda: shell
    cell = "%matplotlib inline\n!touch /tmp/x\nfiles = !ls\n%time y = model(torch.randn(4096, 256))\n"
    cell += "get_ipython().system('ls')\n"
    with_magics, plain = price(
        session(ns, cell, shell=shell),
        [Attempt(source=cell), Attempt(source="y = model(torch.randn(4096, 256))")],
        budget=None,
        prepare=nothing,
    )
    assert with_magics.refused is None
    assert with_magics.peak == plain.peak
    assert with_magics.peak_line == 4
    assert shell.said == []


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("%%bash\nls", "begins with %%bash"),
        ("%run other.py", "%run"),
        ("this is (not Python", "not Python"),
        ("x = 1\nmodel(torch.randn(3, 3))", "at line 2 with RuntimeError"),
        ("raise ValueError('first\\nsecond')", "ValueError: first"),
        ("class Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd", "Odd"),
        ("input('name?')", "asks for input"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise StopIteration", "StopIteration"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_a_reason(cell, reason):
    found = forecast(namespace(mlp), cell)
    assert found.peak is None
    assert reason in found.refused
    assert "\n" not in found.refused


def test_top_level_await_is_run():
    cell = "import asyncio\nasync def job():\n    await asyncio.sleep(0)\n    return torch.ones(20 << 20)\n"
    cell += "out = await job()"
    ns = {"torch": torch}
    assert forecast(ns, cell).peak - forecast(ns, "pass").peak == 80 << 20


def test_replays_and_live_changes_are_in_place_when_the_cell_runs():
    ns = namespace(mlp) | {"size": lambda: 1}

    class Wider:
        def __enter__(self):
            ns["wide"] = torch.ones(10 << 20)

        def __exit__(self, *_):
            raise AssertionError("nothing is undone in a process that ends")

    attempts = [
        Attempt(source="t = torch.ones(size(), 1 << 20)"),
        Attempt(source="t = torch.ones(size(), 1 << 20)", replays=("def size(): return 5",)),
        Attempt(source="t = torch.ones(size(), 1 << 20)", live=(Wider,)),
    ]
    first, replayed, live = price(session(ns, ""), attempts, budget=None, prepare=nothing)
    assert replayed.peak - first.peak == 16 << 20
    assert live.peak - first.peak == 40 << 20
    assert "wide" not in ns


def test_the_line_of_the_peak_is_one_of_the_cell_even_where_an_earlier_cell_is_replayed():
    ns = {"torch": torch}
    replay = "def make():\n    return torch.ones(10 << 20)\nmake()"
    attempts = [Attempt(source="x = 1\ny = make()", replays=(replay,)), Attempt(source="x = 1", replays=(replay,))]
    called, replayed = price(session(ns, ""), attempts, budget=None, prepare=nothing)
    assert called.peak == replayed.peak
    assert (called.peak_line, replayed.peak_line) == (None, None)
    both = Attempt(source="x = make()\ny = make()", replays=(replay,))
    assert price(session(ns, ""), [both], budget=None, prepare=nothing)[0].peak_line == 2


def test_the_start_of_the_cell_is_brought_back_first():
    ns = namespace(mlp) | {"waste": torch.ones(10 << 20)}
    with_waste = forecast(ns, "pass").peak
    without = forecast(ns, "pass", prepare=lambda: ns.__delitem__("waste"))
    assert with_waste - without.peak == 40 << 20
    assert "waste" in ns

    def fails() -> None:
        raise RuntimeError("no snapshot")

    assert "restored: RuntimeError: no snapshot" in forecast(ns, "pass", prepare=fails).refused


def test_slowdown_is_relative_to_the_first_attempt():
    ns = namespace(mlp) | {"data": torch.randn(1024, 256)}
    attempts = [Attempt(source="model(data)"), Attempt(source="model(data); model(data)"), Attempt(source="1 / 0")]
    first, twice, failing = price(session(ns, ""), attempts, budget=None, prepare=nothing)
    assert first.slowdown == 1.0
    assert twice.slowdown == pytest.approx(2.0, rel=0.05)
    assert failing.slowdown is None


def test_half_the_batch_in_twice_the_steps_takes_as_long():
    ns = namespace(mlp)
    ns["fine"] = torch.utils.data.DataLoader(ns["loader"].dataset, batch_size=128)
    source = TRAIN.replace("loader", "fine")
    _, halved = price(session(ns, ""), [Attempt(source=TRAIN), Attempt(source=source)], budget=None, prepare=nothing)
    assert halved.slowdown == pytest.approx(1.15, abs=0.15)


def test_parts_of_a_loop_are_not_compared_where_it_is_not_known_how_large_they_are():
    ns = namespace(mlp)
    ns["fine"] = torch.utils.data.DataLoader(ns["loader"].dataset, batch_size=16)
    source = "for x, y in fine:\n    model(x)"
    attempts = [
        Attempt(source=source),
        Attempt(source=f"with torch.no_grad():\n    {source.replace(chr(10), chr(10) + '    ')}"),
    ]
    as_it_is, without_graph = price(session(ns, ""), attempts, budget=None, prepare=nothing)
    assert as_it_is.peak is not None
    assert without_graph.slowdown is None


def test_nothing_is_priced_for_nothing():
    assert price(session({}, ""), [], budget=None, prepare=nothing) == ()
    assert Bench(simulated=True).read().simulated
