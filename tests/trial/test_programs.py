"""The trial's answer on each pair of programs beside the one that running both to their end measures."""

from __future__ import annotations

import json
import linecache
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from covering import few

from oomdoctor.model.fix import Effect
from oomdoctor.model.plan import Trial
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.sandbox.openmp import keep_one_thread
from oomdoctor.trial import compare

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
STRICTER: Final = {
    "same_linear_hook": "how often a hook runs is compared too",
    "same_tqdm_postfix": "its weights are right for batches of 16 rows alone, and a trial takes 13",
}
"""Pairs that end alike and are told to differ, each with the reason."""
ON_OTHER_ROWS: Final = {
    "unseen_buckets_of_length": "only later batches are padded",
    "unseen_hardest_sixteen": "a trial takes fewer rows than are kept",
    "unseen_part_without_labels": "only later batches have a part without labels",
}
"""Pairs that differ only on rows that a trial does not have."""
ROUNDING: Final = frozenset({"differs_bfloat16_parts", "differs_key_bias_under_adam", "differs_adam_scales_rounding"})
"""Pairs that differ by what rounding alone makes of the unchanged program: the answer tells how much that is."""


def cells_of(program: Path) -> dict[str, list[str]]:
    parts = re.split(r"^# %% *(.*)\n", program.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    cells: dict[str, list[str]] = {}
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        cells.setdefault(kind.strip(), []).append(text)
    return cells


def tried(cells: dict[str, list[str]], folder: Path, effect: Effect = Effect.EQUIVALENT) -> Trial:
    """Run the setup in a copy of this process, in a folder of its own, and try the change there."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            keep_one_thread()  # the pool of OpenMP does not survive a fork
            os.chdir(folder)
            os.write(writer, json.dumps(asdict(_tried(cells, effect))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    found = json.loads(told)
    return Trial(**{**found, "beside": tuple(found["beside"])})


def _tried(cells: dict[str, list[str]], effect: Effect) -> Trial:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    *earlier, last = cells["setup"]
    again = cells.get("setup after", [])
    for at, text in enumerate(earlier if again else cells["setup"]):
        name = f"<cell {at} of a pair>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), namespace)
    (before,), (after,) = cells["before"], cells["after"]
    shown = Cells(history=tuple(Cell(number=at, source=text) for at, text in enumerate([*cells["setup"], before], 1)))
    session: Any = Session(namespace=namespace, cells=shown, accelerator=None)
    unchanged = Attempt(source=before, replays=(last,) if again else ())
    return compare(
        session, lambda: None, unchanged, [Attempt(source=after, replays=tuple(again))], effect=effect, aim_s=0.3
    )


@pytest.mark.parametrize("program", few(PROGRAMS, PROGRAMS[::6]), ids=lambda path: path.stem)
def test_what_differs_is_never_told_to_be_the_same(program: Path, tmp_path: Path) -> None:
    kind, name = program.stem.split("_")[0], program.stem
    trial = tried(cells_of(program), tmp_path)
    if kind != "same" and name not in (*ROUNDING, *ON_OTHER_ROWS):
        assert trial.same is False, trial
        assert trial.why
    if kind == "same" and name not in STRICTER:
        assert trial.same is True, trial
    if trial.same and name in ROUNDING:
        assert float(trial.basis.partition("up to ")[2].split()[0]) > 1e-4


def test_what_is_another_in_each_run_is_not_compared(tmp_path: Path) -> None:
    """Clocks and ids: the loop of a training that is timed is the same program."""
    (program,) = (one for one in PROGRAMS if one.stem == "same_class_weights")
    cells = cells_of(program)
    times = "import time, uuid\nname, began = str(uuid.uuid4()), {uuid.uuid4().hex: time.time()}\n"
    for kind in ("before", "after"):
        cells[kind] = [f"{times}{cells[kind][0]}took = time.time()\n"]
    assert tried(cells, tmp_path).same is True


def test_a_change_that_takes_longer_prints_the_same_times(tmp_path: Path) -> None:
    setup = "import time, torch\nfrom time import perf_counter\nmodel, x = torch.nn.Linear(4, 1), torch.randn(32, 4)\n"
    before = "began = perf_counter()\nmodel(x).sum().backward()\nprint(f'{perf_counter() - began:.5f} s')\n"
    after = before.replace("model(x)", "[model(x) for _ in range(100)][0]")
    slow = after.replace("print", "time.sleep(60)\nprint")
    for changed in (after, slow):
        trial = tried({"setup": [setup], "before": [before], "after": [changed]}, tmp_path, effect=Effect.EXACT)
        assert trial.same is True, trial
    counted = after.replace("model(x) for", "(perf_counter(), model(x))[1] for")
    assert tried({"setup": [setup], "before": [before], "after": [counted]}, tmp_path, effect=Effect.EXACT).same is True


def test_a_thread_beside_the_program_sleeps_for_real(tmp_path: Path) -> None:
    """One that did not would take the time of the program: a bar of progress draws itself anew so often a second."""
    setup = "import threading, time, torch\nmodel, x = torch.nn.Linear(4, 1), torch.randn(32, 4)\n"
    before = (
        "ticks, done = [], False\ndef draw():\n    while not done:\n        ticks.append(0)\n        time.sleep(0.01)\n"
    )
    before += "bar = threading.Thread(target=draw)\nbar.start()\nfor _ in range(300):\n    model(x).sum().backward()\n"
    before += "done = True\nbar.join()\nspins = len(ticks) > 5000\ndel ticks, bar, draw\nprint(spins)\n"
    after = before.replace("model(x)", "model(x.clone())")
    trial = tried({"setup": [setup], "before": [before], "after": [after]}, tmp_path, effect=Effect.EXACT)
    assert trial.same is True, trial
    spinning = after.replace("spins = ", "spins = not ")
    assert (
        tried({"setup": [setup], "before": [before], "after": [spinning]}, tmp_path, effect=Effect.EXACT).same is False
    )


def test_a_library_reads_the_clocks_of_a_trial_by_a_name_of_its_own(tmp_path: Path) -> None:
    setup = "import os, sys, types, torch\nbar = sys.modules['bar'] = types.ModuleType('bar')\n"
    setup += "exec('from time import monotonic', vars(bar))\nmodel, x = torch.nn.Linear(4, 1), torch.randn(32, 4)\n"
    before = "os.makedirs('logs', exist_ok=True)\nbegan = bar.monotonic()\nmodel(x).sum().backward()\n"
    before += "print(int(bar.monotonic() - began > 0.1))\n"
    after = before.replace("model(x)", "sum(range(1 << 24))\nmodel(x)")
    trial = tried({"setup": [setup], "before": [before], "after": [after]}, tmp_path, effect=Effect.EXACT)
    assert trial.same is True, trial


STEPS = """\
for _ in range(2):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_threads_of_a_number_that_was_set_leave_the_same(tmp_path: Path) -> None:
    setup = "import torch\ntorch.manual_seed(0)\nmodel, x = torch.nn.Linear(300, 300), torch.randn(400, 300)\n"
    setup += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for change, same in ((("model(x)", "model(x.clone())"), True), (("step()", "step(); optimizer.step()"), False)):
            for _ in range(3):
                cells = {"setup": [setup], "before": [STEPS], "after": [STEPS.replace(*change)]}
                trial = tried(cells, tmp_path, effect=Effect.EXACT)
                assert trial.same is same, trial
    finally:
        torch.set_num_threads(threads)


def test_programs_that_raise_alike_before_a_step_have_shown_nothing(tmp_path: Path) -> None:
    setup = "import torch\nmodel, x = torch.nn.Linear(3, 3), torch.randn(4, 3)\n"
    before = "model(x).square().mean().backward()\nraise ValueError('no')\n"
    trial = tried({"setup": [setup], "before": [before], "after": [before.replace("square", "abs")]}, tmp_path)
    assert trial.same is None


OUTPUTS = """\
import torch
from covering import few
from types import SimpleNamespace
torch.manual_seed(7)
table = torch.nn.Embedding(11, 11)
optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
texts = torch.randint(0, 11, (3, 8, 5))
targets = texts.clone()
targets[:, 0, :3] = -100

def model(ids, labels):
    logits = table(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
    return {"loss": loss, "logits": logits, "cache": SimpleNamespace(layers=[{"keys": logits + 1}])}
"""
STEP = """\
for ids, labels in zip(texts, targets):
    optimizer.zero_grad()
    outputs = model(ids, labels)
    outputs["loss"].backward()
    optimizer.step()
"""
STEP_IN_PARTS = """\
for ids, labels in zip(texts, targets):
    optimizer.zero_grad()
    for part, marks in PARTS:
        outputs = model(part, marks)
        (outputs["loss"] * ((marks[:, 1:] != -100).sum() / (labels[:, 1:] != -100).sum())).backward()
    optimizer.step()
"""


def test_outputs_of_the_last_part_are_so_however_deep(tmp_path: Path) -> None:
    # Lines of this file are known to a trial as the user's own.
    after = STEP_IN_PARTS.replace("PARTS", "zip(ids.chunk(3), labels.chunk(3))")
    trial = tried({"setup": [OUTPUTS], "before": [STEP], "after": [after]}, tmp_path)
    assert trial.same is True, trial
    assert "outputs" in trial.beside


def test_a_run_that_fails_before_it_trains_tells_nothing(tmp_path: Path) -> None:
    setup = "import torch\nmodel, x = torch.nn.Linear(4, 1), torch.randn(32, 4)\n"
    before = "assert model(x).isnan().all()\nmodel(x).square().mean().backward()\n"
    trial = tried({"setup": [setup], "before": [before], "after": [before.replace("mean", "sum")]}, tmp_path)
    assert trial.same is None
    assert "AssertionError" in trial.why


@pytest.mark.parametrize("line", ["%run train.py", "%timeit -n1 fit()", "%%prun\nfit()"])
def test_code_that_a_magic_runs_is_not_tried(line: str, tmp_path: Path) -> None:
    trial = tried({"setup": ["x = 1\n"], "before": [line], "after": [f"{line}\n"]}, tmp_path)
    assert trial.same is None
    assert "not followed" in trial.why
