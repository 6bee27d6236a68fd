"""``oomdoctor.heal`` in scripts: functions and blocks that ran out of memory are run again, or left as they failed."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from state_shell import besides, started

import oomdoctor
from oomdoctor import fixes, pipeline
from oomdoctor.errors import UsageError
from oomdoctor.model.case import OutcomeKind
from oomdoctor.shell import error_boundary, script_watch, scripts
from oomdoctor.shell.config import OomDoctor

BUDGET, AMPLE = "12MiB", "512MiB"


def simulate(size: str) -> AbstractContextManager[object]:
    """Give a device with so many bytes besides what this process holds, for other tests too."""
    return oomdoctor.simulate(besides(size))


EVALUATE = '''
import torch
from torch import nn
import oomdoctor

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 8))
model.eval()
calls = []

@oomdoctor.heal
def evaluate(model, batches, *more, notes=None):
    """Return a score."""
    calls.append(batches)
    outputs = []
    for step in range(batches):
        outputs.append(model(torch.randn(256, 64)))
    score = sum(output.sum().item() for output in outputs)
    if notes is not None:
        notes.append(score)
    if "raise" in more:
        raise more[1]
    return score, more, notes
'''
KEPT = """
    for step in range(batches):
        outputs.append(model(torch.randn(256, 64)))
"""
OUTER = """
@oomdoctor.heal
def outer(model, batches):
    calls.append("outer")
    return evaluate(model, batches)
"""
NESTED = """
def make():
    @oomdoctor.heal
    def inner(model, batches):
        return evaluate.__wrapped__(model, batches)
    return inner
healed = make()
"""
WRAPPED = """
import functools
healed = oomdoctor.heal(functools.wraps(evaluate)(lambda *args: evaluate.__wrapped__(*args)))
"""

SCRIPT = (
    """\
import random
import sys

import numpy
"""
    + EVALUATE.replace("nn.GELU()", "nn.GELU(), nn.BatchNorm1d(512)")
    + '''
@oomdoctor.heal
def both(model, seen):
    model.train()
    seen.append(random.random() + numpy.random.rand())
    outputs = []
    for step in range(20):
        outputs.append(model(torch.randn(256, 64)))
    return sum(output.sum().item() for output in outputs)

def main():
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, seen, both(model, seen)

if sys.argv[1] != "-":
    from oomdoctor.allocator import virtual
    device = virtual.switch_on(sys.argv[1])
optimizer, seen, score = main()

@oomdoctor.heal
def train(model, optimizer, seen):
    # What lies within a string stays as it is.
    text = """
        indented
    """
    x, y = torch.randn(256, 64), torch.randn(256, 8)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    seen.append(random.random() + numpy.random.rand())
    outputs = []
    for step in range(20):
        outputs.append(model(torch.randn(256, 64)))
    return text, [output.sum().item() for output in outputs]

text, marks = train(model, optimizer, seen)

from oomdoctor.objects.leaves import state_digests
names = frozenset({"model", "optimizer", "seen", "score", "text", "marks", "calls"})
for name, digest in sorted(state_digests(globals(), names=names).items()):
    print(name, digest)
print(sorted(name for name in globals() if name not in ("device", "virtual")))
'''
)


@pytest.fixture(autouse=True)
def by_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Price few changes, by estimates alone: one test in a process of its own has all of them, and forecasts."""
    few = {name: fixes.get(name) for name in ("detach_history", "no_grad_eval", "chunked_forward", "checkpoint_blocks")}
    monkeypatch.setattr(fixes, "catalogue", lambda: few)
    monkeypatch.setattr(scripts, "OomDoctor", functools.partial(OomDoctor, forecast_time_s=0.0))


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Load a text as a module of the user's."""
    loaded: list[str] = []

    def load(source: str) -> ModuleType:
        name = f"script_{len(loaded)}"
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in loaded:
        sys.modules.pop(name, None)


def last() -> Any:
    case = pipeline.last_case()
    assert case is not None
    return case


def out_of_memory() -> type[BaseException]:
    import torch

    return torch.OutOfMemoryError


# The state -----------------------------------------------------------------------------------------------------------


def run(path: Path, source: str, word: str) -> subprocess.CompletedProcess[str]:
    path.write_text(source, encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(path), word], capture_output=True, text=True, timeout=180, cwd=path.parent
    )


def test_a_healed_script_leaves_what_the_fixed_one_leaves(tmp_path: Path) -> None:
    healed = run(tmp_path / "script.py", SCRIPT, BUDGET)
    assert healed.returncode == 0, healed.stderr
    assert re.findall("Healed: .*", healed.stderr) == [
        "Healed: the call of `both` ran to its end with 1 change in place, after 1 attempt.",
        "Healed: the call of `train` ran to its end with 1 change in place, after 1 attempt.",
    ]
    assert "From now on `both` in script.py is what the change made of it." in healed.stderr
    assert healed.stderr.count("exact: identical results") >= 2
    # The fixed script, by both diffs.
    for told in diffs_of(healed.stderr, "script.py"):
        (tmp_path / "fix.diff").write_text(told, encoding="utf-8")
        before = (tmp_path / "script.py").read_text(encoding="utf-8")
        subprocess.run(["patch", "-p0", "script.py", "fix.diff"], check=True, cwd=tmp_path, capture_output=True)
        assert (tmp_path / "script.py").read_text(encoding="utf-8") != before
    fixed = (tmp_path / "script.py").read_text(encoding="utf-8")
    fresh = run(tmp_path / "script.py", fixed, "-")
    assert fresh.returncode == 0, fresh.stderr
    assert healed.stdout.splitlines() == fresh.stdout.splitlines()


def diffs_of(told: str, name: str) -> list[str]:
    lines = told.splitlines(keepends=True)
    starts = [at for at, line in enumerate(lines) if line == f"--- {name}\n"]
    ends = [next(at for at in range(start, len(lines)) if not lines[at].strip()) for start in starts]
    return ["".join(lines[start:end]) for start, end in zip(starts, ends, strict=True)]


FILL = """\
import resource
from pathlib import Path
import numpy as np
import oomdoctor

kept = []

@oomdoctor.heal(auto="off")
def fill():
    while True:
        kept.append(np.ones({size}, np.uint8))

used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (200 << 20), -1))
try:
    fill()
except MemoryError:
    print("the error is the user's")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on data are Linux's")
@pytest.mark.parametrize("size", [64 << 10, 1 << 20])
def test_a_script_that_fills_what_a_limit_leaves_is_diagnosed(tmp_path: Path, size: int) -> None:
    (tmp_path / "fill.py").write_text(FILL.format(size=size))
    ended = subprocess.run([sys.executable, "fill.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stdout == "the error is the user's\n", ended.stderr
    assert "Why" in ended.stderr
    assert "This process has reached its own limit on memory" in ended.stderr


def test_a_script_that_is_run_with_the_futures_of_another_is_healed(tmp_path: Path) -> None:
    import __future__

    path = tmp_path / "script.py"
    path.write_text(f"{EVALUATE}{PART}", encoding="utf-8")
    flags = __future__.annotations.compiler_flag
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with simulate(BUDGET):
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec", flags=flags, dont_inherit=True), namespace)
    assert last().outcome.kind is OutcomeKind.HEALED


# Functions ----------------------------------------------------------------------------------------------------------


def test_a_call_is_healed_and_returns_its_result(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = load(EVALUATE)
    names, notes = set(vars(module)), [1.0]
    wrapper = module.evaluate
    module.torch.manual_seed(3)
    with simulate(AMPLE):
        wanted = wrapper.__wrapped__(module.model, 20, "a", 2.5, notes=[1.0])
    module.calls.clear()
    module.torch.manual_seed(3)
    with simulate(BUDGET):
        score, more, given = wrapper(module.model, 20, "a", 2.5, notes=notes)
    assert last().outcome.kind is OutcomeKind.HEALED
    assert last().outcome.state == "clean"
    assert (score, more) == wanted[:2]
    assert given is notes
    assert notes == [1.0, score]
    assert module.calls == [20]
    assert set(vars(module)) == names
    told = capsys.readouterr()
    assert "Out of memory, case" in told.err
    assert "+        outputs.append(model(torch.randn(256, 64)).detach())" in told.err
    assert "oomdoctor could not finish" not in told.err
    assert told.out == ""


def test_after_it_was_healed_the_changed_function_is_called_by_all(load: Any) -> None:
    module = load(EVALUATE)
    kept = module.evaluate
    with simulate(BUDGET):
        module.evaluate(module.model, 20)
        number = last().number
        assert module.evaluate is kept
        kept(module.model, 20)
        module.evaluate(module.model, 20)
    assert last().number == number
    assert module.calls == [20, 20, 20]
    assert module.evaluate.__doc__ == "Return a score."


def test_a_function_healed_under_another_name_follows_its_change(load: Any) -> None:
    module = load(EVALUATE.replace("@oomdoctor.heal\n", "") + "\nsafely = oomdoctor.heal(evaluate)\n")
    with simulate(BUDGET):
        module.safely(module.model, 20)
        number = last().number
        module.safely(module.model, 20)
        module.evaluate(module.model, 20)
    assert last().number == number


def test_what_is_not_healed_raises_its_own_error_from_the_state_of_the_start(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(EVALUATE.replace(KEPT, KEPT + "        open('/dev/null', 'a').close()\n"))
    with simulate(BUDGET), pytest.raises(out_of_memory()) as caught:
        module.evaluate(module.model, 20)
    assert last().outcome.kind is OutcomeKind.REFUSED
    assert "open('/dev/null', 'a')" in last().outcome.why
    frames = [
        (frame.name, frame.lineno) for frame in traceback.extract_tb(caught.tb) if frame.filename == module.__file__
    ]
    assert frames == [
        ("evaluate", 1 + EVALUATE.splitlines().index("        outputs.append(model(torch.randn(256, 64)))"))
    ]
    assert not any("<oomdoctor" in frame.filename for frame in traceback.extract_tb(caught.tb))
    told = capsys.readouterr().err
    assert "Not retried: the call of `evaluate` was left as it failed." in told
    assert "%oomdoctor" not in told


def test_a_retry_that_runs_out_as_well_is_taken_back_and_told_once(load: Any) -> None:
    module, before = load(EVALUATE), len(pipeline.cases())
    with simulate("4MiB"), pytest.raises(out_of_memory()) as caught:
        module.evaluate(module.model, 600)
    assert [case.outcome.kind for case in pipeline.cases()[before:]] == [OutcomeKind.ROLLED_BACK]
    assert module.calls == []
    assert not any("<oomdoctor" in frame.filename for frame in traceback.extract_tb(caught.tb))


def test_off_diagnoses_only(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = load(EVALUATE.replace("@oomdoctor.heal", "@oomdoctor.heal(auto='off')"))
    with simulate(BUDGET), pytest.raises(out_of_memory()):
        module.evaluate(module.model, 20)
    assert last().outcome.kind is OutcomeKind.OFFERED
    assert [one.fix for one in last().plan.candidates]
    assert "What to change" in capsys.readouterr().err


def test_other_errors_pass_as_they_are(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = load(EVALUATE)
    before = len(pipeline.cases())
    for error in (ValueError("mine"), KeyboardInterrupt(), SystemExit(3)):
        with simulate(AMPLE), pytest.raises(type(error)) as caught:
            module.evaluate(module.model, 2, "raise", error)
        assert caught.value is error
    with pytest.raises(TypeError, match="missing 2 required"):
        module.evaluate()
    assert module.calls == [2, 2, 2]
    assert len(pipeline.cases()) == before
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_of_the_retry_is_raised_with_the_state_restored(load: Any, error: BaseException) -> None:
    module = load(EVALUATE)
    notes: list[float] = []
    code = module.evaluate.__wrapped__.__code__
    with simulate(BUDGET), pytest.raises(type(error)) as caught:
        module.evaluate(module.model, 20, "raise", error, notes=notes)
    assert caught.value is error
    assert (module.calls, notes) == ([], [])
    assert module.evaluate.__wrapped__.__code__ is code
    with simulate(AMPLE):
        assert module.evaluate(module.model, 1, notes=notes)[2] is notes


def test_a_retry_that_ends_the_program_has_healed_it(load: Any) -> None:
    module = load(EVALUATE)
    with simulate(BUDGET), pytest.raises(SystemExit):
        module.evaluate(module.model, 20, "raise", SystemExit(3))
    assert last().outcome.kind is OutcomeKind.HEALED
    assert module.calls == [20]


def test_the_inner_one_heals_and_the_outer_leaves_it_to_it(load: Any) -> None:
    module = load(EVALUATE + OUTER)
    before = len(pipeline.cases())
    with simulate(BUDGET):
        module.outer(module.model, 20)
    assert len(pipeline.cases()) == before + 1
    assert module.calls == ["outer", 20]
    refused = load((EVALUATE + OUTER).replace(KEPT, KEPT + "        open('/dev/null', 'a').close()\n"))
    with simulate(BUDGET), pytest.raises(out_of_memory()):
        refused.outer(refused.model, 20)
    assert len(pipeline.cases()) == before + 2


def test_a_new_failure_in_the_handler_of_one_that_was_told_is_told_as_well(load: Any) -> None:
    module = load(EVALUATE.replace("@oomdoctor.heal", "@oomdoctor.heal(auto='off')"))
    before = len(pipeline.cases())
    errors: list[BaseException] = []
    with simulate(BUDGET):
        try:
            module.evaluate(module.model, 20)
        except out_of_memory() as first:
            with pytest.raises(out_of_memory()) as second:
                module.evaluate(module.model, 30)
            errors = [first, second.value]
    assert errors[1].__context__ is errors[0]
    assert last().incident.cell.source_line.endswith("evaluate(model, 30)")
    assert len(pipeline.cases()) == before + 2


def test_recursion_is_healed_where_it_runs_out(load: Any) -> None:
    module = load(
        EVALUATE
        + """
@oomdoctor.heal
def deeper(model, depth, trail):
    trail.append(depth)
    if depth:
        return deeper(model, depth - 1, trail)
    outputs = []
    for step in range(20):
        outputs.append(model(torch.randn(256, 64)))
    return len(outputs)
"""
    )
    trail: list[int] = []
    with simulate(BUDGET):
        assert module.deeper(module.model, 2, trail) == 20
        assert module.deeper(module.model, 1, trail) == 20
    assert trail == [2, 1, 0, 1, 0]


def test_a_method_is_healed_on_its_live_objects(load: Any) -> None:
    module = load(
        """
import torch
from torch import nn
import oomdoctor

class Trainer:
    def __init__(self):
        layers = [nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(6)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = 0

    @oomdoctor.heal
    def fit(self, steps):
        for _ in range(steps):
            x, y = torch.randn(512, 64), torch.randn(512, 64)
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.steps += 1
        return loss.item()

class Other(Trainer):
    def fit(self, steps):
        return super().fit(steps)
"""
    )
    trainer, other = module.Trainer(), module.Other()
    with simulate("14MiB"):
        assert trainer.fit(2) > 0
        assert last().outcome.kind is OutcomeKind.HEALED
        with pytest.raises(out_of_memory()):
            other.fit(2)
    assert trainer.steps == 2
    assert "reached in another way than as a method of its first argument" in last().outcome.why


def test_a_call_beside_another_thread_is_left_as_it_failed(load: Any) -> None:
    module = load(EVALUATE + "\ndef waits(event):\n    event.wait(60)\n")
    event = threading.Event()
    thread = threading.Thread(target=module.waits, args=(event,), name="waiter")
    thread.start()
    try:
        with simulate(BUDGET), pytest.raises(out_of_memory()):
            module.evaluate(module.model, 20)
    finally:
        event.set()
        thread.join()
    assert "the thread waiter is running `waits` meanwhile" in last().outcome.why
    with simulate(BUDGET):
        module.evaluate(module.model, 20)
    assert last().outcome.kind is OutcomeKind.HEALED


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("healed = oomdoctor.heal(lambda model, batches: evaluate.__wrapped__(model, batches))", "is a lambda"),
        (NESTED, "defined within another function"),
        ("healed = evaluate\nevaluate = None", "stands for something else in its module"),
        (WRAPPED, "stands for something else in its module"),
    ],
)
def test_what_cannot_be_called_again_from_its_text_is_left_as_it_failed(load: Any, made: str, reason: str) -> None:
    module = load(EVALUATE + made)
    with simulate(BUDGET), pytest.raises(out_of_memory()):
        module.healed(module.model, 20)
    assert last().outcome.kind is OutcomeKind.REFUSED
    assert reason in last().outcome.why


def test_a_file_that_was_edited_since_it_was_loaded_is_not_taken_for_the_program(load: Any) -> None:
    module = load(
        EVALUATE + "import pathlib\nhere = pathlib.Path(__file__)\nhere.write_text('#\\n' + here.read_text())\n"
        "import linecache\nlinecache.clearcache()\nlater = oomdoctor.heal(evaluate.__wrapped__)\n"
    )
    with simulate(BUDGET), pytest.raises(out_of_memory()):
        module.later(module.model, 20)
    assert "its file was changed after it was loaded" in last().outcome.why


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("@oomdoctor.heal\ndef f():\n    yield 1", "heal takes no generator: `f` has handed out values"),
        ("@oomdoctor.heal\nasync def f():\n    yield 1", "heal takes no generator: `f` has handed out values"),
        (
            "@oomdoctor.heal\nasync def f(): ...",
            "heal takes no coroutine function: write what `f` computes as a plain one",
        ),
        ("class A:\n    @oomdoctor.heal\n    @staticmethod\n    def f(): ...", "below `@staticmethod`"),
        ("@oomdoctor.heal\nclass A: ...", "heal takes a function, and was given type"),
        ("oomdoctor.heal(print)", "heal takes a function, and was given builtin_function_or_method"),
        ("oomdoctor.heal(auto='on')", "The 'auto' trait of an OomDoctor instance expected any of"),
        ("oomdoctor.heal(attempts=0)", "The value of the 'attempts' trait of"),
        ("oomdoctor.heal(time_s='long')", "The 'retry_time_s' trait of an OomDoctor instance expected a float"),
    ],
)
def test_what_cannot_be_healed_is_refused_in_one_line(load: Any, line: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(f"import oomdoctor\n{line}")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


# The moment of the failure ----------------------------------------------------------------------------------------

SETUP = EVALUATE + f"from oomdoctor.allocator import virtual\nvirtual.switch_on({BUDGET!r})\n"
PART = """\
@oomdoctor.heal
def part():
    begin()
    outputs = []
    for step in range(20):
        outputs.append(model(torch.randn(256, 64)))

def begin():
    calls.append("begun")

part()
"""


@pytest.fixture
def switched_off() -> Iterator[None]:
    yield
    from oomdoctor.allocator import virtual

    virtual.switch_off()


HOOKED = """\
import weakref
inputs = []
model.register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0].untyped_storage())))

@oomdoctor.heal
def run():
    return [model(torch.randn(8192, 64)).sum() for step in range(20)]

outputs = run()
"""


@pytest.mark.usefixtures("switched_off")
def test_what_a_hooked_layer_was_given_is_let_go_of_before_the_call_is_made_again(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The closure of ``_call_impl.<locals>.inner`` has it.
    alive, release = [], script_watch.release

    def released(failure: BaseException) -> None:
        inputs = sys.modules["script_0"].inputs
        alive.append(sum(one() is not None for one in inputs))
        release(failure)
        alive.append(sum(one() is not None for one in inputs))

    monkeypatch.setattr(script_watch, "release", released)
    with pytest.raises(out_of_memory()):
        load(SETUP.replace("12MiB", "32MiB") + HOOKED)
    assert alive == [1, 0]


@pytest.mark.usefixtures("switched_off")
def test_a_timer_of_the_failed_call_does_not_fire_and_that_of_its_retry_does(load: Any) -> None:
    begin = "import threading\n    threading.Timer(600, calls.append, ['timer']).start()"
    load(SETUP + PART.replace('calls.append("begun")', begin))
    waiting = [one for one in threading.enumerate() if isinstance(one, threading.Timer) and not one.finished.is_set()]
    for timer in waiting:
        timer.cancel()
    assert last().outcome.kind is OutcomeKind.HEALED
    assert len(waiting) == 1


@pytest.mark.usefixtures("switched_off")
def test_a_call_beside_a_pool_that_goes_on_with_its_work_is_left_as_it_failed(load: Any) -> None:
    done = threading.Event()
    setup = "import builtins, concurrent.futures\npool = concurrent.futures.ThreadPoolExecutor(1)\n"
    submits = PART.replace('calls.append("begun")', "pool.submit(builtins.done.wait, 60)")
    with mock.patch.object(builtins, "done", done, create=True), pytest.raises(out_of_memory()):
        load(f"{SETUP}{setup}{submits}")
    done.set()
    assert last().outcome.kind is OutcomeKind.REFUSED
    assert "goes on with what the cell gave it" in last().outcome.why


@pytest.mark.usefixtures("switched_off")
def test_an_attempt_that_has_started_a_process_is_the_last(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    origin, rounds = os.getpid(), iter((False, True))
    process = multiprocessing.Process(target=time.sleep, args=(60,), name="sleeper")

    def begun() -> None:
        if os.getpid() == origin and next(rounds):
            process.start()
            raise ValueError

    part = PART.replace('calls.append("begun")', "builtins.begun()")
    with mock.patch.object(builtins, "begun", begun, create=True), pytest.raises(out_of_memory()):
        load(f"{SETUP}import builtins\n{part}")
    process.kill()
    assert "started the process `sleeper`, which goes on and cannot be undone" in capsys.readouterr().err


# Beside the others ----------------------------------------------------------------------------------------------------


def test_a_fault_of_ours_leaves_the_users_error(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(EVALUATE)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    for target in ("observe", "plan", "heal"):
        with monkeypatch.context() as patch, simulate(BUDGET):
            patch.setattr(pipeline, target, broken)
            with pytest.raises(out_of_memory()):
                module.evaluate(module.model, 20)
        assert "RuntimeError: planted" in capsys.readouterr().err
    module.calls.clear()
    with simulate(BUDGET):
        module.evaluate(module.model, 20)
    assert module.calls == [20]


def test_nothing_of_ours_is_left_set(load: Any) -> None:
    from torch.nn.modules import module as nn_module
    from torch.optim import optimizer

    def hooks() -> tuple[int, int, int]:
        return (
            len(nn_module._global_forward_pre_hooks),
            len(optimizer._global_optimizer_pre_hooks),
            threading.active_count(),
        )

    module, before = load(EVALUATE), hooks()
    with simulate(BUDGET):
        module.evaluate(module.model, 20)
        with pytest.raises(ValueError, match="mine"):
            module.evaluate(module.model, 2, "raise", ValueError("mine"))
    assert hooks() == before
    assert not error_boundary.is_left_alone()


def test_in_a_notebook_one_of_the_two_acts(capsys: pytest.CaptureFixture[str]) -> None:

    before = len(pipeline.cases())
    with started("detach_history") as shell, simulate(BUDGET):
        assert shell.run_cell(EVALUATE, store_history=True).success
        assert shell.run_cell("evaluate(model, 20)", store_history=True).success
        shell.run_cell("@oomdoctor.heal(auto='off')\n" + EVALUATE.rpartition("@oomdoctor.heal\n")[2])
        assert not shell.run_cell("evaluate(model, 20)", store_history=True).success
    kinds = [case.outcome.kind for case in pipeline.cases()[before:]]
    told = capsys.readouterr()
    assert kinds == [OutcomeKind.HEALED, OutcomeKind.OFFERED]
    assert told.err.count("Out of memory, case") == 2
    assert "Out of memory, case" not in told.out
    assert "OutOfMemoryError" in told.out


def test_heal_is_light() -> None:
    program = (
        "import sys, oomdoctor\n@oomdoctor.heal\ndef f(x):\n    return x\nassert f(3) == 3\n"
        "print(*({'torch', 'numpy', 'rich', 'libcst', 'IPython'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
