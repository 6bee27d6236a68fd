"""A change of an earlier cell is taken back with the rest: what the earlier cell had made is there again, as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from state_shell import besides, cleared, differing, known, run, said, started

from oomdoctor import pipeline
from oomdoctor.allocator.virtual import simulate
from oomdoctor.model.case import OutcomeKind, State
from oomdoctor.model.session import Attempt
from oomdoctor.objects.leaves import state_digests
from oomdoctor.pipeline import healing
from oomdoctor.retry import Transaction
from oomdoctor.views import bundle, notice_bundle

MADE: Final = """import torch, torch.nn as nn, torch.nn.functional as F
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(3000, 64), torch.randn(3000, 1)
for i in range(2):
    loss = F.mse_loss(model(x[:50]), y[:50]); opt.zero_grad(); loss.backward(); opt.step()
del loss"""
TRAINS: Final = """for i in range(2):
    loss = F.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()"""


@pytest.fixture(scope="module")
def module_shell() -> Iterator[InteractiveShell]:
    with started("lighter_optimizer", "smaller_batch", "chunked_forward", "micro_batch", "autocast") as made:
        yield made


@pytest.fixture
def shell(module_shell: InteractiveShell) -> Iterator[InteractiveShell]:
    with cleared(module_shell):
        yield module_shell


def failed(shell: InteractiveShell, room: str, *cells: str) -> dict[str, str]:
    """Run cells until the last one runs out of ``room``; return the digests of what was there before it."""
    size = besides(room)
    for cell in cells[:-1]:
        assert run(shell, cell)[0].success
    before = state_digests(shell.user_ns)
    shell.run_cell(f"%oomdoctor simulate {size}B")
    assert not run(shell, cells[-1])[0].success
    return before


def as_before(shell: InteractiveShell, before: dict[str, str]) -> list[str]:
    return differing(before, state_digests(shell.user_ns))


# What an earlier cell had made --------------------------------------------------------------------------------------


def test_a_change_of_an_earlier_cell_that_did_not_heal_leaves_what_that_cell_made(shell: InteractiveShell) -> None:
    before = failed(shell, "30MiB", MADE, TRAINS)
    same = id(shell.user_ns["opt"])
    said(shell, "%oomdoctor fix lighter_optimizer")
    assert (known().outcome.kind, known().outcome.state) == (OutcomeKind.ROLLED_BACK, State.RESTORED)
    assert id(shell.user_ns["opt"]) == same
    assert len(shell.user_ns["opt"].state) == 6
    assert as_before(shell, before) == []
    said(shell, "%oomdoctor fix chunked_forward")
    assert known().outcome.kind is OutcomeKind.HEALED


def test_undo_brings_back_what_an_earlier_cell_had_made(shell: InteractiveShell) -> None:
    before = failed(shell, "6MiB", MADE.replace("3000", "200"), TRAINS.replace("x)", "x[:200])"))
    said(shell, "%oomdoctor fix lighter_optimizer")
    assert known().outcome.kind is OutcomeKind.HEALED
    assert type(shell.user_ns["opt"]) is torch.optim.Adafactor
    assert "Everything is as before the cell ran\n" in said(shell, "%oomdoctor undo")
    assert as_before(shell, before) == []


BY_HAND: Final = """import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
average = [p.detach().clone() for p in model.parameters()]
x, y = torch.randn(3000, 64), torch.randn(3000, 1)
def update(lr):
    for p, mean in zip(model.parameters(), average):
        p.data.add_(p.grad, alpha=-lr)
        mean.data += 0.1 * (p.data - mean)"""
UPDATES: Final = """for a, b in ((x[:90], y[:90]), (x, y)):
    model.zero_grad()
    loss = F.mse_loss(model(a), b)
    loss.backward()
    update(0.1)"""


def test_what_was_written_past_autograd_is_taken_back_where_the_cell_writes_so(shell: InteractiveShell) -> None:
    before = failed(shell, "45MiB", BY_HAND, UPDATES)
    assert as_before(shell, before) != []
    said(shell, "%oomdoctor fix micro_batch")
    assert known().outcome.kind is OutcomeKind.HEALED, known().outcome.why
    healed = [p.detach().clone() for p in (*model_of(shell), *shell.user_ns["average"])]
    said(shell, "%oomdoctor undo")
    assert as_before(shell, before) == []
    shell.run_cell("%oomdoctor simulate off")
    assert run(shell, UPDATES)[0].success
    assert all(map(torch.allclose, healed, (*model_of(shell), *shell.user_ns["average"])))


def model_of(shell: InteractiveShell) -> list[torch.Tensor]:
    return list(shell.user_ns["model"].parameters())


LOADED: Final = """import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(300, 64), torch.randn(300, 1)), batch_size=64)
F.mse_loss(model(torch.randn(50, 64)), torch.randn(50, 1)).backward(); opt.step(); opt.zero_grad()"""
EPOCH: Final = """for x, y in loader:
    loss = F.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()"""


@contextmanager
def third_loss_fails() -> Iterator[None]:
    """Run out of memory at the third loss, wherever it is asked for."""
    losses: list[Any] = []
    real = torch._C._nn.mse_loss

    def loss(*args: Any, **kwargs: Any) -> Any:
        losses.append(None)
        if len(losses) >= 3:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 40.00 MiB of which "
                "10.00 MiB is free. Of the allocated memory 22.85 MiB is allocated by PyTorch, and 7.15 MiB is "
                "reserved by PyTorch but unallocated."
            )
        return real(*args, **kwargs)

    with mock.patch.object(torch._C._nn, "mse_loss", loss):
        yield


@pytest.mark.parametrize("fix", ["lighter_optimizer", "smaller_batch"])
def test_each_change_of_an_earlier_cell_is_taken_back(shell: InteractiveShell, fix: str) -> None:
    assert run(shell, LOADED)[0].success
    before = state_digests(shell.user_ns)
    with third_loss_fails():
        assert not run(shell, EPOCH)[0].success
    for _ in range(2):
        with third_loss_fails():
            said(shell, f"%oomdoctor fix {fix}")
        assert (known().outcome.kind, known().outcome.state) == (OutcomeKind.ROLLED_BACK, State.RESTORED)
        assert as_before(shell, before) == []
    said(shell, f"%oomdoctor fix {fix}")
    assert known().outcome.kind is OutcomeKind.HEALED
    assert as_before(shell, before) != []
    assert "Everything is as before the cell ran\n" in said(shell, "%oomdoctor undo")
    assert as_before(shell, before) == []


def test_what_an_attempt_has_replaced_takes_no_memory_of_the_device_meanwhile() -> None:
    names: dict[str, Any] = {"data": torch.arange(1 << 20, dtype=torch.float32), "shared": torch.ones(1 << 20)}
    names["part"] = names["shared"][:10]
    same, was = id(names["data"]), names["data"].clone()
    with simulate(besides("100MiB")) as device:
        transaction = Transaction(names, "pass", lambda: 1 << 30)
        transaction.hold(Attempt(source="pass", replays=("data = shared = None",)), device.holds)
        before = device.read().allocated
        names["data"] = names["shared"] = None
        transaction.set_aside()
        gc.collect()
        freed = before - device.read().allocated
        assert freed == 4 << 20, "that of `data`; `part` needs the other"
        assert transaction.settle() == ()
        assert id(names["data"]) == same
        assert torch.equal(names["data"], was)
        assert names["part"].untyped_storage().data_ptr() == names["shared"].untyped_storage().data_ptr()


TELLING: Final = """from IPython.core.magic import register_line_magic
def count(*args): counted.append(1)
shell.events.register("post_run_cell", count)
shell.input_transformers_post.append(lambda lines: lines)
@register_line_magic
def counts(line): return len(counted)
for i in range(4):
    loss = F.mse_loss(model(torch.ones(8, 8)), torch.ones(8, 1)); loss.backward(); opt.step()"""
"""A cell that gives functions to the shell."""


def test_what_a_failed_cell_gave_to_the_shell_is_told_of_the_healed_one(shell: InteractiveShell) -> None:
    assert run(shell, NEEDS + "\ncounted, shell = [], get_ipython()")[0].success
    with third_loss_fails():
        assert not run(shell, TELLING)[0].success
    said(shell, "%oomdoctor fix chunked_forward")
    assert (known().outcome.kind, known().outcome.state) == (OutcomeKind.HEALED, State.UNVERIFIED)
    for name in ("callbacks of post_run_cell", "line magics", "input_transformers_post"):
        assert f"the {name} differ from before the cell, and are not put back" in str(known().outcome.why)
    assert "the line magics" in said(shell, "%oomdoctor undo")
    for _ in range(2):
        shell.events.callbacks["post_run_cell"].pop()
        shell.input_transformers_post.pop()


# What a retry has found to be wrong ---------------------------------------------------------------------------------

MIXED: Final = """import torch, torch.nn as nn, torch.nn.functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(64, 512); self.b = nn.Linear(512, 10)
    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b((h - h.mean(0)) / (h.std(0) + 1e-5))
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
X, Y = torch.randn(4000, 64), torch.randint(0, 10, (4000,))"""
BATCHES: Final = """for x, y in zip(X.split(2000), Y.split(2000)):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()"""


def test_what_a_retry_has_refuted_is_handed_out_no_more(shell: InteractiveShell) -> None:
    failed(shell, "16MiB", MIXED, BATCHES)
    both = [one.fix for one in known().plan.candidates]
    assert sorted(both[:2]) == ["chunked_forward", "micro_batch"]
    said(shell, "%oomdoctor fix 1")
    told = "results differ: "
    assert told in known().outcome.why
    assert told in dict(known().plan.refusals)[both[0]]
    assert [one.fix for one in known().plan.candidates] == both, "numbers that were shown stay as they are"
    shell.rl_next_input = None
    for line in ("diff 1", "fix 1", f"fix {both[0]} --insert", f"diff {both[0]}", "diff"):
        answer = said(shell, f"%oomdoctor {line}")
        assert answer.startswith("oomdoctor: ")
        assert told in answer
    assert shell.rl_next_input is None
    said(shell, "%oomdoctor retry")
    assert known().outcome.why.startswith(f"{known().plan.candidates[1].label}: tried on "), "the next is tried"
    assert told in dict(known().plan.refusals)[both[1]]
    assert len(known().plan.refusals) == len(dict(known().plan.refusals))
    assert "Offered" not in str(notice_bundle(known())["text/plain"])
    assert "fix 1" not in str(bundle(known())["text/plain"])


def test_where_what_was_to_be_tried_is_refuted_another_change_is_looked_for(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted, plan, without = pipeline.admitted, healing.plan, list[frozenset[str]]()

    def planned(*args: Any, **terms: Any) -> Any:
        without.append(terms["without"])
        return plan(*args, **terms)

    monkeypatch.setattr(pipeline, "admitted", lambda case, auto: admitted(case, auto)[:1])
    monkeypatch.setattr(healing, "plan", planned)
    said(shell, "%oomdoctor auto exact")
    try:
        failed(shell, "16MiB", MIXED, BATCHES)
    finally:
        said(shell, "%oomdoctor auto off")
    refuted = {fix for fix, why in known().plan.refusals if "results differ" in why}
    assert refuted | {"chunked_forward", "micro_batch"} == refuted
    assert len(without) == 1
    assert without[0] < refuted
    assert known().outcome.state is State.RESTORED


# Cells between the failure and the fix ------------------------------------------------------------------------------

HARMLESS: Final = (
    "!true",
    "torch.cuda.empty_cache()",
    "import gc; gc.collect()",
    "import os",
    "spare = 1",
    "later = model",
    "%timeit -n1 -r1 1 + 1",
    "%%time\nprint(x_train.mean())",
    "%%time\nsum(p.numel() for p in model.parameters())",
    "print(torch.equal(x_train, x_train))",
    "for p in model.parameters():\n    print(p.shape)",
    "def helper():\n    return opt.step()",
    "print('opt' in globals() and type(opt))",
)
MOVING: Final = (
    ("with torch.no_grad():\n    next(model.parameters()).add_(1)", "written `model"),
    ("opt = opt", None),
    ("x_train = x_train + 0", "bound `x_train`, which the failed cell uses"),
    ("factor = 2", "bound `factor`, which the failed cell uses"),
    ("torch.rand(3)", "drawn random numbers"),
    ("log.append(1)", "changed `log`"),
    ("model.eval()", "changed `model"),
    ("opt.param_groups[0]['lr'] = 0.5", "changed `opt"),
    ("model.note = 1", "changed `model"),
    ("mystery()", "written `x_train`"),
)
NEEDS: Final = """import torch, torch.nn as nn, torch.nn.functional as F
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x_train, y_train = torch.randn(64, 8), torch.randn(64, 1)
factor, spare, log = 1, 0, []
def scaled(loss):
    return loss * factor
def mystery():
    x_train.data.zero_()"""
STEPS: Final = """for i in range(4):
    loss = scaled(F.mse_loss(model(x_train), y_train))
    opt.zero_grad()
    loss.backward()
    opt.step()
    log.append(i)"""


@pytest.fixture
def broken(shell: InteractiveShell) -> InteractiveShell:
    """A shell in which a cell has just run out of memory."""
    assert run(shell, NEEDS)[0].success
    with third_loss_fails():
        assert not run(shell, STEPS)[0].success
    return shell


def test_cells_that_look_or_bind_other_names_change_nothing(broken: InteractiveShell) -> None:
    for cell in HARMLESS:
        assert run(broken, cell)[0].success
    said(broken, "%oomdoctor fix chunked_forward")
    assert known().outcome.kind is OutcomeKind.HEALED, known().outcome
    names = broken.user_ns
    assert (names["spare"], names["later"] is names["model"], callable(names["helper"])) == (1, True, True)
    assert len(names["log"]) == 4
    for cell in HARMLESS:
        assert run(broken, cell)[0].success
    assert "Everything is as before the cell ran\n" in said(broken, "%oomdoctor undo")
    assert (names["spare"], names["later"] is names["model"], callable(names["helper"])) == (1, True, True)
    assert names["log"] == []


@pytest.mark.parametrize(("cell", "why"), MOVING, ids=[cell for cell, _ in MOVING])
def test_a_cell_that_moves_the_state_on_is_named_with_what_it_did(
    broken: InteractiveShell, cell: str, why: str | None
) -> None:
    number = broken.execution_count
    assert run(broken, cell)[0].success
    said(broken, "%oomdoctor fix chunked_forward")
    if why is None:
        assert known().outcome.kind is OutcomeKind.HEALED
        return
    assert known().outcome.kind is OutcomeKind.OFFERED
    told = said(broken, "%oomdoctor fix chunked_forward")
    assert f"can no longer be retried: In[{number}] has {why}" in told
    assert told.count(";") == 0


def test_a_change_that_needs_what_a_later_cell_has_bound_is_refused(shell: InteractiveShell) -> None:
    made = LOADED.replace("loader = DataLoader(TensorDataset(", "size = 64\ndata = TensorDataset(")
    made = made.replace("torch.randn(300, 1)), batch_size=64)", "torch.randn(300, 1))\nloader = DataLoader(data, size)")
    assert run(shell, made)[0].success
    with third_loss_fails():
        assert not run(shell, EPOCH)[0].success
    assert run(shell, "data = None")[0].success
    said(shell, "%oomdoctor fix smaller_batch")
    assert known().outcome.kind is OutcomeKind.REFUSED
    assert "`data` was bound by a later cell, and the change needs what it was before" in known().outcome.why
    assert shell.user_ns["data"] is None


# What is written where the step is one expression -------------------------------------------------------------------


UNNAMED: Final = """for i in range(2):
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()"""


def test_a_change_of_results_leaves_a_state_that_is_known(shell: InteractiveShell) -> None:
    """That its results are rounded is a matter of its effect, and told as such."""
    failed(shell, "29MiB", MADE, UNNAMED)
    said(shell, "%oomdoctor fix autocast")
    made = next(one for one in known().plan.candidates if one.fix == "autocast")
    assert made.caveat is not None
    assert (known().outcome.kind, known().outcome.state) == (OutcomeKind.HEALED, State.CLEAN)
    told = str(notice_bundle(known())["text/plain"])
    assert "as if the changed cell had run first" in told
    assert "rounded to bfloat16" in told


# What is typed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["help", "--help", "-h"])
def test_the_help_names_every_magic_with_its_options(shell: InteractiveShell, asked: str) -> None:
    told = said(shell, f"%oomdoctor {asked}")
    assert "`%oomdoctor status`" in told
    for option in ("--device D", "--diff", "--snapshot PATH", "--json [PATH]", "--top N"):
        assert option in told.split("`%memreport")[1].partition("\n")[0]
    assert "--device-memory SIZE" in told.split("`%%memplan")[1].partition("\n")[0]


@pytest.mark.parametrize("line", ["%oomdoctor simulate 512", "%%memplan --device-memory 16\n1"])
def test_a_size_without_a_unit_is_asked_for_one(shell: InteractiveShell, line: str) -> None:
    told = said(shell, line)
    assert told.startswith("oomdoctor: ")
    assert "has no unit" in told
    assert told.count("\n") == 1
    assert "simulated device: off" in said(shell, "%oomdoctor status")


def test_that_a_cell_cannot_be_retried_has_one_reason(broken: InteractiveShell) -> None:
    said(broken, "%oomdoctor fix chunked_forward")
    (label,) = known().outcome.fixes
    told = said(broken, "%oomdoctor fix chunked_forward")
    assert f"can no longer be retried: {label} healed it: `%oomdoctor undo` takes it back" in told
    assert "snapshot" not in told
    number = broken.execution_count
    assert run(broken, "log = 1")[0].success
    assert said(broken, "%oomdoctor undo").endswith(
        f"can no longer be undone: In[{number}] has bound `log`, which the failed cell uses\n"
    )
    since = f"{label} healed it, and In[{number}] has bound `log`, which the failed cell uses"
    assert f"{since}: to try another change, run it again" in said(broken, "%oomdoctor fix chunked_forward")
