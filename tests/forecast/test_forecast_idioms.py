"""What notebooks do that a fake tensor has no answer for by itself."""

import pytest
import torch
from forecast_lab import TRAIN, Bench, forecast, mlp, namespace, nothing, session
from idioms import cells

from oomdoctor.forecast import price
from oomdoctor.model.session import Attempt

IDIOMS = cells()


def _train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("name", IDIOMS)
def test_the_idiom_is_followed(name):
    ns = namespace(mlp, "adamw") | {"data": torch.randn(512, 256), "train": _train, "counter": torch.tensor(5)}
    ns["kept"] = ns["model"](ns["data"]).sum()
    before = {key: value.clone() for key, value in ns["model"].state_dict().items()}
    found = forecast(ns, IDIOMS[name])
    assert found.refused is None
    assert found.peak > 1 << 20
    assert all(torch.equal(before[key], value) for key, value in ns["model"].state_dict().items())
    assert all(parameter.grad is None for parameter in ns["model"].parameters())
    assert ns["counter"] == 5


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


PACKED = "x, lengths = torch.randn(3, 3, 5), torch.tensor([3, 2, 1])\nnn.utils.rnn.pack_padded_sequence(x, lengths)"


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
        (PACKED, "at line 2 with DynamicOutputShapeException"),
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

    assert "brought back: RuntimeError: no snapshot" in forecast(ns, "pass", prepare=fails).refused


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


def test_nothing_is_priced_for_nothing():
    assert price(session({}, ""), [], budget=None, prepare=nothing) == ()
    assert Bench(simulated=True).read().simulated
