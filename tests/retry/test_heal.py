"""The healing loop: whatever a trial does, the state is a known one."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from oomdoctor.errors import OomDoctorError
from oomdoctor.evidence import devices
from oomdoctor.evidence.host import HostAccelerator
from oomdoctor.model.case import OutcomeKind, State
from oomdoctor.model.session import Attempt
from oomdoctor.retry import Choice, Transaction, heal


class Doomed(MemoryError):
    """What the program raises in these tests for want of memory."""


def outcome_of(
    sources: list[str],
    *,
    most: int = 3,
    live: Any = None,
    log: list[Any] | None = None,
    more: dict[str, Any] | None = None,
    room: int = 1 << 20,
    failed: set[str] | None = None,
    is_oom: Any = lambda exc: isinstance(exc, Doomed),
    accelerator: Any = None,
    writes: bool = False,
    last: Sequence[str] = (),
) -> tuple[Any, Any, dict[str, Any]]:
    """Heal a program whose cell appends to ``log``; each source is one trial of a fix of its own."""
    log = [] if log is None else log
    log.append(0)
    namespace: dict[str, Any] = {"log": log, "Doomed": Doomed, "OomDoctorError": OomDoctorError, "__name__": "__main__"}
    namespace |= more or {}
    transaction = Transaction(namespace, "log.append(1)", lambda: room)
    namespace["log"].append("wreck")
    if writes:
        Path("left.txt").write_text("by the run that failed")
        time.sleep(0.03)  # by the clock of the file system
    trials = [
        Choice(fix=source.partition("#")[2] or str(at), label=f"trial {at}",
              attempt=Attempt(source=source, live=(live,) if live else ()))
        for at, source in enumerate([*sources, *last])
    ]  # fmt: skip
    later = [trials[len(sources) :], []] if last else []

    async def run(attempt: Attempt) -> BaseException | None:
        try:
            exec(attempt.source, namespace)
        except Exception as exc:  # noqa: BLE001 - the program's own failure is what is asked for
            return exc
        return None

    result, error = asyncio.run(
        heal(
            transaction, trials[:len(sources)], run,
            accelerator=accelerator or HostAccelerator(), is_oom=is_oom,
            most_attempts=most, time_budget_s=60, failed=failed, writes=writes,
            last=lambda: later.pop(0) if later else [],
        )
    )  # fmt: skip
    return result, error, namespace


def test_the_first_that_runs_through_heals() -> None:
    outcome, error, namespace = outcome_of(["log.append(1); raise Doomed", "log.append(2)", "log.append(3)"])
    assert (outcome.kind, outcome.state, outcome.attempts) == (OutcomeKind.HEALED, State.CLEAN, 2)
    assert outcome.fixes == ("trial 1",)
    assert error is None
    assert namespace["log"] == [0, 2]


def test_what_is_planned_last_is_tried_when_nothing_else_is_left() -> None:
    outcome, error, namespace = outcome_of(["raise OomDoctorError('unfit')"], last=["log.append(2)"])
    assert (outcome.kind, outcome.fixes, error) == (OutcomeKind.HEALED, ("trial 1",), None)
    assert namespace["log"] == [0, 2]
    outcome, _, _ = outcome_of(["raise OomDoctorError('unfit')"], last=["raise OomDoctorError('as well')"])
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.REFUSED, 2)


@pytest.mark.gpu
def test_a_program_that_resets_the_peak_does_not_hide_it() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    kept = torch.ones(1, device="cuda")
    reset = torch._C._cuda_resetPeakMemoryStats
    take = "large = torch.empty({} << 20, dtype=torch.uint8, device='cuda'); del large"
    calls = "torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()"
    source = "\n".join([calls, take.format(64), calls, take.format(8)])
    failing = f"{take.format(96)}\nraise Doomed"
    before = torch.cuda.memory_allocated()
    assert before >= kept.nbytes
    cuda = devices.of_name("cuda:0")
    outcome, error, _ = outcome_of([failing, source], more={"torch": torch}, accelerator=cuda)
    assert (outcome.kind, outcome.state, error) == (OutcomeKind.HEALED, State.CLEAN, None)
    assert outcome.peak == before + (64 << 20)
    assert torch._C._cuda_resetPeakMemoryStats is reset


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("mode", ["r", "a+", "r+b"])
def test_what_the_failed_run_has_written_is_not_read(
    mode: str, swallows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reads = f"open('left.txt', {mode!r}).close()"
    reads = f"try:\n    {reads}\nexcept Exception: log.append('caught')" if swallows else reads
    outcome, error, namespace = outcome_of([f"{reads}\nlog.append(2)"], writes=True)
    assert (outcome.kind, error) == (OutcomeKind.ROLLED_BACK if error else OutcomeKind.REFUSED, None)
    assert "written by the run that failed" in outcome.why
    assert namespace["log"] == [0]


def test_files_that_were_there_or_that_the_attempt_writes_itself_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old = tmp_path / "old.txt"
    old.write_text("from before")
    os.utime(old, (1, 1))
    before = open
    source = """
open('old.txt').close()
with open('left.txt', 'w') as file: file.write('anew')
open('left.txt').close()
torch.save(1, 'a.pt')
assert torch.load('a.pt') == 1
"""
    assert outcome_of([source], writes=True, more={"torch": torch})[0].kind is OutcomeKind.HEALED
    assert open is before
    assert outcome_of(["open('left.txt').close()"])[0].kind is OutcomeKind.HEALED, "nothing of it writes"


def test_a_folder_that_a_run_has_made_is_made_again_and_one_that_was_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, made = os.mkdir, "import os\nos.makedirs('runs/new')"
    outcome, error, namespace = outcome_of([f"{made}\nraise Doomed", f"{made}\nlog.append(2)"])
    assert (outcome.kind, outcome.attempts, error) == (OutcomeKind.HEALED, 2, None)
    assert namespace["log"] == [0, 2]
    assert os.mkdir is make
    time.sleep(0.1)  # by the clock of the file system
    outcome, error, _ = outcome_of(["import os\nos.mkdir('runs')"])
    assert (outcome.kind, type(error)) == (OutcomeKind.FAILED, FileExistsError)


def test_when_none_does_the_state_is_that_of_the_start() -> None:
    outcome, error, namespace = outcome_of(["log.append(1); raise Doomed"] * 2)
    assert (outcome.kind, outcome.state, outcome.attempts) == (OutcomeKind.ROLLED_BACK, State.RESTORED, 2)
    assert isinstance(error, Doomed)
    assert namespace["log"] == [0]


def test_a_change_whose_trial_ran_out_of_memory_counts_as_one_that_did_and_its_next_dose_is_tried() -> None:
    failed: set[str] = set()
    short = "log.append(1); raise OomDoctorError('no memory for the trial') from Doomed() #one"
    outcome, error, namespace = outcome_of([short, short, "log.append(2) #one"], most=3, failed=failed)
    assert (outcome.kind, outcome.state, outcome.attempts) == (OutcomeKind.HEALED, State.CLEAN, 3)
    assert failed == {"trial 0", "trial 1"}
    assert namespace["log"] == [0, 2]
    outcome, error, namespace = outcome_of([short] * 3, most=2)
    assert (outcome.kind, outcome.state, outcome.attempts) == (OutcomeKind.REFUSED, State.RESTORED, 2)
    assert outcome.why == "memory ran out with trial 1 as well: no memory for the trial"
    assert error is None
    assert namespace["log"] == [0]


def test_whether_memory_ran_out_is_asked_while_the_failure_holds_what_it_held() -> None:
    held: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    class Thing:
        pass

    def is_oom(exc: BaseException) -> bool:
        alive.append(held[-1]() is not None)
        return True

    source = "def f():\n    kept = Thing()\n    note(kept)\n    raise Doomed\nf()"
    outcome_of([source], is_oom=is_oom, more={"Thing": Thing, "note": lambda thing: held.append(weakref.ref(thing))})
    assert alive == [True]


def test_an_error_of_the_program_ends_it_and_the_state_is_that_of_the_start() -> None:
    outcome, error, namespace = outcome_of(["log.append(1); raise KeyError('mine')", "log.append(2)"])
    assert (outcome.kind, outcome.state, outcome.attempts) == (OutcomeKind.FAILED, State.RESTORED, 1)
    assert isinstance(error, KeyError)
    assert namespace["log"] == [0]


@pytest.mark.parametrize(
    "step",
    [
        "optimizer.step()",
        "try:\n    optimizer.step()\nexcept Exception: pass",
        "for _ in range(3):\n    try:\n        optimizer.step()\n    except Exception: pass",
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_no_attempt_changes_weights_that_could_not_be_copied(step: str, fused: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    more = {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=1.0, fused=fused)}
    sources = [f"log.append(1); weight\n{step}\nraise Doomed", f"log.append(2); weight\n{step}"]
    outcome, error, namespace = outcome_of(sources, more=more, room=100)
    assert (outcome.kind, outcome.state, outcome.attempts) == (OutcomeKind.REFUSED, State.RESTORED, 2)
    assert "`weight` could not be kept: there was not enough host memory" in outcome.why
    assert error is None
    assert namespace["log"] == [0]
    assert weight.equal(torch.ones(1000))
    assert outcome_of(sources, more=more)[0].kind is OutcomeKind.HEALED


@pytest.mark.parametrize("rest", ["loss = data.sum()", "data.mul_(2)", "averages[0].mul_(2)"])
def test_what_is_only_read_needs_no_copy_where_there_is_no_room(rest: str) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    more = {"data": torch.ones(100_000), "averages": [torch.ones(100_000)]}
    more |= {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=1.0)}
    if "averages" not in rest:
        del more["averages"]
    sources = [f"log.append(1); weight\noptimizer.step()\n{rest}\nraise Doomed", f"optimizer.step()\n{rest}"]
    outcome, error, _ = outcome_of(sources, more=more, room=20_000)
    if "loss" in rest:
        assert (outcome.kind, outcome.state, error) == (OutcomeKind.HEALED, State.CLEAN, None)
        assert weight.equal(torch.zeros(1000))
    else:
        assert (outcome.kind, outcome.state) == (OutcomeKind.REFUSED, State.RESTORED)
        assert "could not be kept: there was not enough host memory" in outcome.why
        assert weight.equal(more["data"][:1000])


def test_no_attempt_changes_buffers_that_could_not_be_copied() -> None:
    norm = torch.nn.BatchNorm1d(512)
    x = torch.randn(4, 512)
    forward = "for _ in range(3):\n    try:\n        norm(x)\n    except Exception: pass"
    outcome, _, _ = outcome_of([f"{forward}\nraise Doomed", forward], more={"norm": norm, "x": x}, room=100)
    assert (outcome.kind, outcome.state) == (OutcomeKind.REFUSED, State.RESTORED)
    assert norm.running_mean.equal(torch.zeros(512))
    assert norm.num_batches_tracked == 0


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(4).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.empty(4, device="meta"),
    ],
    ids=["sparse", "csr", "mkldnn", "jagged", "meta"],
)
def test_an_odd_tensor_stands_in_nobodys_way(odd: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    more = {"odd": odd(), "weight": weight, "optimizer": torch.optim.SGD([weight], lr=1.0)}
    outcome, _, _ = outcome_of(["odd; optimizer.step(); raise Doomed", "odd; optimizer.step()"], more=more)
    assert (outcome.kind, outcome.state) == (OutcomeKind.HEALED, State.CLEAN)
    assert weight.equal(torch.zeros(1000))


def test_a_tensor_whose_storage_was_freed_is_not_read() -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    emptied = torch.ones(1 << 20)
    emptied.untyped_storage().resize_(0)
    more = {"emptied": emptied, "weight": weight, "optimizer": torch.optim.SGD([weight], lr=1.0)}
    sources = ["emptied; optimizer.step(); raise Doomed", "emptied; optimizer.step()"]
    outcome, _, _ = outcome_of(sources, more=more)
    assert outcome.kind is OutcomeKind.REFUSED
    assert "`emptied` could not be kept" in outcome.why
    assert weight.equal(torch.ones(1000))


def test_what_was_made_in_inference_mode_comes_back() -> None:
    with torch.inference_mode():
        counts = torch.zeros(8)
    source = "import torch\nwith torch.inference_mode(): counts += 1"
    outcome, _, _ = outcome_of([f"{source}\nraise Doomed", source], more={"counts": counts})
    assert (outcome.kind, outcome.state) == (OutcomeKind.HEALED, State.CLEAN)
    assert counts.tolist() == [1.0] * 8


def test_no_attempt_follows_one_that_cannot_be_taken_back() -> None:
    kept = torch.ones(1000)
    sources = ["log.append(1); kept.add_(1); raise Doomed", "log.append(2); kept.add_(1)"]
    outcome, error, _ = outcome_of(sources, more={"kept": kept})
    assert (outcome.kind, outcome.state, outcome.attempts) == (OutcomeKind.ROLLED_BACK, State.UNVERIFIED, 1)
    assert "`kept` was written in place and no copy was kept" in outcome.why
    assert isinstance(error, Doomed)


def test_attempts_are_bounded() -> None:
    outcome, _, namespace = outcome_of(["log.append(1); raise Doomed"] * 3 + ["log.append(2)"], most=3)
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.ROLLED_BACK, 3)
    assert namespace["log"] == [0]


def test_what_ran_out_of_memory_before_is_not_tried_again() -> None:
    failed: set[str] = set()
    sources = ["log.append(1); raise Doomed"] * 2
    assert outcome_of(sources, most=1, failed=failed)[0].attempts == 1
    assert failed == {"trial 0"}
    outcome, _, _ = outcome_of(sources, failed=failed)
    assert (outcome.kind, outcome.attempts, outcome.fixes) == (OutcomeKind.ROLLED_BACK, 1, ("trial 1",))
    outcome, error, namespace = outcome_of(sources, failed=failed)
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.REFUSED, 0)
    assert outcome.why == "every fix that could be tried has run out of memory before"
    assert error is None
    assert namespace["log"] == [0]


def test_a_fix_that_finds_itself_unfit_is_passed_over_with_its_stronger_doses() -> None:
    unfit = "log.append(1); raise OomDoctorError('couples its samples')#same"
    outcome, _, namespace = outcome_of([unfit, unfit, "log.append(2)"], most=1)
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.HEALED, 2)
    assert namespace["log"] == [0, 2]
    outcome, error, namespace = outcome_of([unfit, unfit])
    assert (outcome.kind, outcome.state) == (OutcomeKind.REFUSED, State.RESTORED)
    assert "couples its samples" in outcome.why
    assert error is None
    assert namespace["log"] == [0]


def test_a_live_change_that_cannot_be_made_is_passed_over() -> None:
    @contextmanager
    def refusing() -> Iterator[None]:
        raise OomDoctorError("not with this loader")
        yield

    outcome, _, namespace = outcome_of(["log.append(1)"], live=refusing)
    assert outcome.kind is OutcomeKind.REFUSED
    assert "not with this loader" in outcome.why
    assert namespace["log"] == [0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_what_escapes_a_trial_goes_on_after_the_state_is_back(error: type[BaseException]) -> None:
    @contextmanager
    def broken() -> Iterator[None]:
        yield
        raise error

    log: list[Any] = []
    with pytest.raises(error):
        outcome_of(["log.append(1)"], live=broken, log=log)
    assert log == [0]


def test_the_classes_of_an_attempt_that_failed_are_gone_when_the_next_one_begins() -> None:
    class Base:
        pass

    cell = "class Made(Base): pass\nlog.append(len(Base.__subclasses__()))\n"
    outcome, _, namespace = outcome_of([cell + "raise Doomed", cell], more={"Base": Base})
    assert outcome.kind is OutcomeKind.HEALED
    assert namespace["log"] == [0, 1]


def test_what_replays_bind_anew_comes_back() -> None:
    namespace: dict[str, Any] = {"log": [0], "Doomed": Doomed, "__name__": "__main__"}
    exec("def step(): return 1\nimport torch\nloader = torch.utils.data.DataLoader([1, 2], batch_size=2)", namespace)
    step, loader = namespace["step"], weakref.ref(namespace["loader"])
    transaction = Transaction(namespace, "log.append(step()); next(iter(loader))", lambda: 1 << 20)
    replay = "def step(): return 2\nloader = torch.utils.data.DataLoader([1, 2], batch_size=1)\n"

    async def run(attempt: Attempt) -> BaseException | None:
        for source in (*attempt.replays, attempt.source):
            try:
                exec(source, namespace)
            except Doomed as exc:
                return exc
        return None

    trial = Choice(fix="a", label="a", attempt=Attempt(source="log.append(step()); raise Doomed", replays=(replay,)))
    outcome, _ = asyncio.run(
        heal(
            transaction, [trial], run,
            accelerator=HostAccelerator(), is_oom=lambda exc: isinstance(exc, Doomed),
            most_attempts=3, time_budget_s=60,
        )
    )  # fmt: skip
    assert (outcome.kind, outcome.state) == (OutcomeKind.ROLLED_BACK, State.RESTORED), outcome.why
    assert namespace["step"] is step
    assert namespace["loader"] is loader()
    assert namespace["log"] == [0]


def test_methods_that_replays_give_to_a_class_go_with_a_failed_attempt() -> None:
    namespace: dict[str, Any] = {"log": [0], "Doomed": Doomed, "__name__": "__main__"}
    exec("import torch\nclass Net(torch.nn.Module):\n    def forward(self): return 1\nnet = Net()", namespace)
    forward, cls = namespace["Net"].forward, namespace["Net"]
    transaction = Transaction(namespace, "log.append(net())", lambda: 1 << 20)
    replay = (
        "class Changed:\n    def forward(self): return 2\n\n"
        'Net.forward = Changed.forward\nNet.forward.__qualname__ = "Net.forward"\ndel Changed\n'
    )

    async def run(attempt: Attempt) -> BaseException | None:
        for source in (*attempt.replays, attempt.source):
            try:
                exec(source, namespace)
            except Doomed as exc:
                return exc
        return None

    trial = Choice(fix="a", label="a", attempt=Attempt(source="log.append(net()); raise Doomed", replays=(replay,)))
    outcome, _ = asyncio.run(
        heal(
            transaction, [trial], run,
            accelerator=HostAccelerator(), is_oom=lambda exc: isinstance(exc, Doomed),
            most_attempts=3, time_budget_s=60,
        )
    )  # fmt: skip
    assert (outcome.kind, outcome.state) == (OutcomeKind.ROLLED_BACK, State.RESTORED), outcome.why
    assert namespace["Net"] is cls
    assert cls.forward is forward
    assert forward.__qualname__ == "Net.forward"
    assert namespace["net"]() == 1
    assert namespace["log"] == [0]


def test_without_trials_nothing_is_tried() -> None:
    outcome, error, namespace = outcome_of([])
    assert (outcome.kind, outcome.attempts, error) == (OutcomeKind.REFUSED, 0, None)
    assert namespace["log"] == [0]


def test_what_the_failed_cell_had_made_is_told_to_be_gone_with_it() -> None:
    namespace: dict[str, Any] = {"log": [0], "Doomed": Doomed, "__name__": "__main__", "torch": torch}
    cell = "model = torch.nn.Linear(2, 2); n = 3; log.append(model); raise Doomed"
    transaction = Transaction(namespace, cell, lambda: 1 << 20)
    with pytest.raises(Doomed):
        exec(cell, namespace)

    async def run(attempt: Attempt) -> BaseException | None:
        return Doomed()

    outcome, _ = asyncio.run(
        heal(
            transaction, [Choice(fix="a", label="a", attempt=Attempt(source=cell))], run,
            accelerator=HostAccelerator(), is_oom=lambda exc: isinstance(exc, Doomed),
            most_attempts=3, time_budget_s=60,
        )
    )  # fmt: skip
    assert (outcome.kind, outcome.state) == (OutcomeKind.ROLLED_BACK, State.RESTORED)
    assert "model" not in namespace
    assert outcome.why.endswith("; what the cell had made before it failed is gone: `model`, `n`")
