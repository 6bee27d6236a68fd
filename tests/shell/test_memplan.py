"""``%%memplan`` in a real kernel, and ``oomdoctor.plan()`` in a real script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kernels import Kernel, Reply

from oomdoctor.errors import UsageError
from oomdoctor.shell.cells import cells_until, is_own, planned
from oomdoctor.shell.memplan import read_options
from oomdoctor.shell.outputs import PRINTED

SETUP = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Sequential(*[part for _ in range(4) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(8192, 256))
batch_size = 4096
loader = DataLoader(data, batch_size=batch_size)
"""
STEP = """\
for (x,) in loader:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
PARAMETERS = 4 * (256 * 256 + 256) * 4
TOO_SMALL = "56MiB"
STATE = "__import__('oomdoctor.objects.leaves', fromlist=['_']).state_digests({**globals()})"
NAMES = "sorted(name for name in globals() if name[:1] != '_')"
DEVICE = "__import__('oomdoctor.allocator.virtual', fromlist=['_']).active()"
MIB = 1 << 20


@pytest.fixture(scope="module")
def ready() -> Iterator[Kernel]:
    """A kernel with a small model and its data on a simulated device with room to spare."""
    kernel = Kernel()
    try:
        for cell in ("%load_ext oomdoctor", SETUP, "%oomdoctor simulate 256MiB"):
            kernel.run(cell, ok=True)
        yield kernel
    finally:
        kernel.stop()


def _plan(kernel: Kernel, options: str, cell: str = STEP) -> dict[str, Any]:
    reply = kernel.run(f"%%memplan --json {options}\n{cell}", ok=True)
    found: dict[str, Any] = json.loads(reply.stdout)
    return found


def _shown(reply: Reply) -> str:
    (plain,) = reply.data("text/plain")
    return plain


def test_a_cell_is_forecast_and_not_run(ready: Kernel) -> None:
    before, names = ready.value(STATE), ready.value(NAMES)
    reply = ready.run(f"%%memplan\n{STEP}x_after = 1", ok=True)
    assert (ready.value(STATE), ready.value(NAMES)) == (before, names)
    assert reply.stderr == ""
    (page,), plain = reply.data("text/html"), _shown(reply)
    for shown in (plain, re.sub(r"<[^>]*>", "", page)):
        assert f"Forecast of In[{reply.content['execution_count']}], made without running it" in shown
        assert re.search(r"on cuda:0 \(simulated\): ✓ fits \(dry run, ± \d+ %\)", " ".join(shown.split()))
        assert "H200 141 GB" in shown
        assert "there seem to be no more samples" in " ".join(shown.split())
        assert "Memory over time" in shown
        assert "At the peak" in shown
        assert "What to change" not in shown
    assert "peak at line 4 │ loss.backward()" in plain


def test_the_forecast_is_what_the_cell_then_takes(ready: Kernel) -> None:
    found = _plan(ready, "")["forecast"]
    ready.run(f"{DEVICE}.reset_peak()\n{STEP}", ok=True)
    assert found["peak"] == pytest.approx(ready.value(f"{DEVICE}.read().peak_allocated"), rel=found["error_ratio"])
    ready.run("del loss, x; optimizer.zero_grad()", ok=True)
    roles = dict(found["course"]["at_peak"])
    assert roles["parameter"] == PARAMETERS
    assert roles["activation"] > 16 * MIB
    assert max(size for size, _ in found["course"]["points"]) == pytest.approx(sum(roles.values()), rel=0.01)
    assert found["course"]["flops"] > 0


def test_the_digest_would_see_a_cell_that_was_run(ready: Kernel) -> None:
    before = ready.value(STATE)
    ready.run("with torch.no_grad(): model[0].bias[0] += 1", ok=True)
    assert ready.value(STATE) != before


def test_the_cell_is_run_if_it_fits(ready: Kernel) -> None:
    first = ready.run("%%memplan --run\nran = 'yes'\nran", ok=True)
    assert _executed(first) == "'yes'"
    assert ready.value("ran") == "yes"
    # As a cell of its own, in the history as it was run, without the line above it.
    assert ready.value("In[-1]") == "ran = 'yes'\nran"
    ready.run("del ran", ok=True)


def _executed(reply: Reply) -> str:
    results = [m for m in reply.messages if m["header"]["msg_type"] == "execute_result"]
    (result,) = results
    assert result["content"]["execution_count"] == reply.content["execution_count"]
    return str(result["content"]["data"]["text/plain"])


def test_a_cell_that_is_run_and_fails_answers_as_such(ready: Kernel) -> None:
    """It fails in the user's process alone, which the forecast cannot know."""
    ready.run("PID = __import__('os').getpid()", ok=True)
    reply = ready.run("%%memplan --run\n{}['missing'] if __import__('os').getpid() == PID else None", ok=False)
    assert reply.errors[0]["ename"] == "KeyError"
    ready.run("del PID", ok=True)


def test_a_cell_that_awaits_is_run(ready: Kernel) -> None:
    ready.run("%%memplan --run\nimport asyncio\nawait asyncio.sleep(0.01)\nawaited = 3", ok=True)
    assert ready.value("awaited") == 3
    ready.run("del awaited, asyncio", ok=True)


def test_the_cell_is_not_run_if_it_does_not_fit(ready: Kernel) -> None:
    before = ready.value(STATE)
    reply = ready.run("%%memplan --run --device-memory 8MiB\nnever = torch.ones(16 << 20)", ok=True)
    assert ready.value(STATE) == before
    assert reply.stderr.startswith("oomdoctor: not run: it needs ≈ ")
    assert reply.stderr.endswith(" of 8.00 MiB, too large\n")
    assert "on a device of 8.00 MiB: ✗ too large" in _shown(reply)


def test_where_it_does_not_fit_the_fixes_and_the_largest_batch_do(ready: Kernel) -> None:
    found = _plan(ready, f"--device-memory {TOO_SMALL}")
    assert found["verdict"] == "too large"
    fixes = {one["id"]: one for one in found["fixes"]}
    assert {"micro_batch", "smaller_batch"} <= fixes.keys()
    assert fixes["micro_batch"]["forecast"]["fits"] is True
    batch = found["largest_batch"]
    assert batch["now"] == 4096
    assert 0 < batch["size"] < batch["above"] <= 4096
    ready.run(f"%oomdoctor simulate {TOO_SMALL}", ok=True)
    for size, fits in ((batch["size"], True), (4096, False)):
        reply = ready.run(f"loader = DataLoader(data, batch_size={size})\n{STEP}")
        assert (reply.status == "ok") is fits, reply.text
        ready.run("loss = x = None; optimizer.zero_grad()", ok=True)
    ready.run("del loss, x; loader = DataLoader(data, batch_size=batch_size)", ok=True)
    ready.run("%oomdoctor simulate 256MiB", ok=True)


def test_the_json_goes_where_it_is_asked_to(ready: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "a plan.json"
    reply = ready.run(f"%%memplan --json '{path}'\nx = 1", ok=True)
    assert reply.stdout == f"{path}: the plan as JSON\n"
    written = json.loads(path.read_text())
    assert (written["schema"], written["cell"]["source"]) == (1, "x = 1\n")
    assert written["largest_batch"] is None
    assert written["largest_batch_why"] == "no training loop was found in what the cell runs"
    assert json.loads(ready.run("%%memplan --json -\nx = 1", ok=True).stdout)["fits"] is True


def test_a_cell_with_magics_is_forecast_and_run(ready: Kernel) -> None:
    cell = "%time made = torch.ones(1 << 20)\n!echo from the shell\nhere = %pwd\nmade.sum().item()"
    assert _plan(ready, "", cell)["forecast"]["peak"] > 4 * MIB
    reply = ready.run(f"%%memplan --run\n{cell}", ok=True)
    assert "from the shell" in reply.stdout
    assert ready.value("float(made.sum())") == 1 << 20
    assert _plan(ready, "", f"%%time\n{cell}")["fits"] is True
    ready.run("del made, here", ok=True)


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("%%memplan\n  \n", "%%memplan forecasts the cell below its line, and there is nothing below it"),
        ("%%memplan\nx = (", "the cell below %%memplan is not Python: '(' was never closed (line 1 of it)"),
        (
            "%%memplan --bad\nx",
            "%%memplan: unrecognized arguments: --bad; it takes --run, --device-memory, --device",
        ),
        ("%%memplan --device-memory 3x\nx", "'3x' is not a memory size: write a number above zero"),
        ("%%memplan --device mps\nx", "no device 'mps' is in use: there is cuda:0 and cpu"),
        ("%%memplan --json /nowhere/x\nx", "argument --json: it needs a path, of a file in a folder that exists"),
        ("%%memplan 'x\nx", "No closing quotation"),
    ],
)
def test_bad_input_is_answered_with_one_line(ready: Kernel, cell: str, line: str) -> None:
    before = ready.value(STATE)
    reply = ready.run(cell, ok=True)
    assert line in reply.stderr
    assert reply.stderr.count("\n") == 1
    assert reply.stdout == ""
    assert reply.data("text/plain") == []
    assert ready.value(STATE) == before


def test_an_empty_cell_is_an_error_of_one_line(ready: Kernel) -> None:
    """IPython itself answers a cell magic with nothing below it."""
    reply = ready.run("%%memplan", ok=False)
    assert "%%memplan is a cell magic, but the cell body is empty" in reply.text


def test_a_cell_that_is_indented_is_forecast_as_ipython_runs_it(ready: Kernel) -> None:
    found = _plan(ready, "", "    rows = torch.ones(1 << 20)\n    if True:\n        rows.fill_(2)\n")
    assert found["forecast"]["refused"] is None
    assert found["forecast"]["peak_line"] == 1


def test_help_is_had_without_a_cell(ready: Kernel) -> None:
    shown = ready.run("%memplan --help", ok=True)
    assert shown.stdout.startswith("Forecast the cell below without running it")
    assert shown.stdout == ready.run("%%memplan --help\n1", ok=True).stdout
    assert "%memplan has no cell below it" in ready.run("%memplan train()", ok=True).stderr


def test_a_cell_for_a_device_that_is_lacked_is_not_run(ready: Kernel) -> None:
    reply = ready.run("%%memplan --run\ntorch.ones(8, device='cuda')", ok=True)
    assert reply.stderr == "oomdoctor: not run: it asks for a device that this machine lacks\n"
    assert "at line" not in _shown(reply)  # of one


def test_a_cell_that_raises_has_no_forecast_and_is_not_run(ready: Kernel) -> None:
    reply = ready.run("%%memplan --run\nbound = 1\nraise ValueError('of the user')", ok=True)
    assert "the dry run of the cell stopped at line 2 with ValueError: of the user" in " ".join(_shown(reply).split())
    assert reply.stderr.startswith("oomdoctor: not run: it has no forecast: the dry run of the cell stopped")
    assert ready.value("'bound' in globals()") is False


def test_without_a_forecast_the_least_is_told(ready: Kernel) -> None:
    ready.run("adam = torch.optim.AdamW(model.parameters())", ok=True)
    cell = STEP.replace("optimizer", "adam").replace(
        "    loss.backward()", "    raise OSError('no')\n    loss.backward()"
    )
    found = _plan(ready, "--device-memory 1MiB", cell)
    assert found["forecast"]["peak"] is None
    assert found["least"]["peak"] >= 4 * PARAMETERS + 8 * MIB  # weights, gradients, two states; the data
    assert "activations are not counted" in found["least"]["basis"]
    assert found["verdict"] == "too large"
    assert {card["verdict"] for card in found["cards"]} == {"unknown"}
    ready.run("del adam", ok=True)


def test_without_fork_the_least_is_told_and_why(ready: Kernel) -> None:
    ready.run("import os\nfork = os.fork\ndel os.fork", ok=True)
    try:
        planned = _plan(ready, "-")
    finally:
        ready.run("os.fork = fork", ok=True)
    assert planned["forecast"]["refused"] == "forecasts need fork(), which this system has not"
    assert planned["least"]["peak"] >= 2 * PARAMETERS


def test_without_a_simulated_device_the_host_is_planned_for(ready: Kernel) -> None:
    ready.run("%oomdoctor simulate off", ok=True)
    found = _plan(ready, "", "x = torch.ones(1 << 20)")
    assert found["device"]["name"] == "host memory"
    assert found["fits"] is True
    assert found["forecast"]["reserved"] is None
    assert all(card["reserved"] >= card["peak"] for card in found["cards"])
    ready.run("%oomdoctor simulate 256MiB", ok=True)
    assert _plan(ready, "--device cpu", "x = 1")["device"]["name"] == "host memory"
    assert _plan(ready, "--device cuda", "x = 1")["device"]["name"] == "cuda:0 (simulated)"


def test_a_plan_leaves_a_failed_cell_open_to_its_fixes(kernel: Kernel) -> None:
    for cell in ("%load_ext oomdoctor", SETUP, f"%oomdoctor simulate {TOO_SMALL}"):
        kernel.run(cell, ok=True)
    kernel.run(STEP, ok=False)
    kernel.run("%%memplan\ny = 1", ok=True)
    kernel.run("%oomdoctor fix micro_batch", ok=True)
    assert kernel.value("__import__('oomdoctor').last_case().to_dict()['outcome']['kind']") == "healed"
    kernel.run("%unload_ext oomdoctor", ok=True)
    assert "Cell magic `%%memplan` not found" in kernel.run("%%memplan\nx = 1", ok=False).text


def test_a_cell_that_was_only_planned_has_not_run() -> None:
    raw = ["", "batch_size = 8", "%%memplan --run\nbatch_size = 16", "batch_size = 32"]
    shell = SimpleNamespace(history_manager=SimpleNamespace(input_hist_raw=raw))
    found = cells_until(shell, 4, "train()")
    assert [(cell.number, cell.source) for cell in found.history] == [
        (1, "batch_size = 8"),
        (3, "batch_size = 32"),
        (4, "train()"),
    ]
    assert planned("\n%%memplan --run\na\nb") == "a\nb"
    assert planned("%%memplan") == ""
    assert [planned(text) for text in ("%%memplans\nx", "x", "# %%memplan\nx", "")] == [None] * 4
    assert is_own("%%memplan\nx = 1")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--run=1"], "--run: ignored explicit argument '1'"),
        (["--device-memory"], "--device-memory: expected one argument"),
        (["--device-memory="], "is not a memory size"),
        (["--device", "--run"], "--device: expected one argument"),
        (["--device", "cpu", "--device-memory", "1GiB"], "two answers to one question"),
        (["run"], "unrecognized arguments: run; it takes --run, --device-memory"),
    ],
)
def test_options_that_cannot_be_used_are_refused(words: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        read_options(words)


def test_options_are_read_in_both_spellings() -> None:
    found = read_options(["--device-memory=2g", "--json"])
    assert (found.device_memory, found.json, found.run) == (2 << 30, PRINTED, False)
    found = read_options(["--json", "-", "--run", "--device", "cuda:1"])
    assert (found.device, found.json, found.run) == ("cuda:1", PRINTED, True)


SCRIPT = f"""\
import functools
import oomdoctor
from oomdoctor.errors import UsageError
{SETUP}
def train(epochs=1):
    calls.append(epochs)
    for _ in range(epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()

def made(count=1):
    calls.append(count)
    return torch.ones(count << 20)

calls = []
for given in (made, functools.partial(made, 1), "made()", lambda: made()):
    found = oomdoctor.plan(given, device_memory="1GiB")
    print(found.fits, found.forecast.peak)
print(calls, "_oomdoctor_planned" in globals())
print(repr(oomdoctor.plan("x = torch.ones(1 << 20)", namespace={{"torch": torch}}, device_memory=1 << 24)))
print(oomdoctor.plan(train, device_memory="1GiB"))

async def awaited():
    return torch.ones(1 << 20)

def yielded():
    yield torch.ones(1 << 20)

indented = '''
    rows = torch.ones(1 << 20)
    rows.sum()
    '''
for given in (awaited, indented):
    print("MiB", (oomdoctor.plan(given, device_memory="1GiB").forecast.peak >> 20) - 9)
print(oomdoctor.plan("1", time_s=0).forecast.refused)
for bad, options in (
    (3, {{}}),
    (" ", {{}}),
    (train, {{"device_memory": "much"}}),
    (train, {{"namespace": 1}}),
    (train, {{"device_memory": 16}}),
    (train, {{"device_memory": 16.5}}),
    (train, {{"time_s": -1}}),
    (train, {{"time_s": "much"}}),
    (yielded, {{}}),
    ("x = torch.ones(", {{}}),
):
    try:
        oomdoctor.plan(bad, **options)
    except UsageError as exc:
        print("refused:", exc)
"""


def test_in_a_script_a_call_is_planned_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert set(lines[:4]) == {lines[0]}
    assert lines[0].startswith("True ")
    assert lines[4] == "[] False"
    assert lines[5] == "<Planned: ≈ 13.0 MiB, too large>"  # 4 MiB, and the 9 MiB that are there
    assert [line for line in lines if line.startswith("MiB")] == ["MiB 4", "MiB 4"]
    assert "forecasts are switched off" in lines
    shown = "\n".join(lines[6:])
    assert "Forecast of train(), made without running it" in shown
    assert "now it has 4096" in shown
    assert "In[" not in shown
    assert [line for line in lines if line.startswith("refused:")] == [
        "refused: plan takes a callable or source (str), and was given int",
        "refused: plan takes a callable or source, and the source has nothing in it",
        "refused: 'much' is not a memory size: write a number above zero with a unit, such as 512MiB or 1.5GiB",
        "refused: namespace takes a dictionary of names, and was given int",
        "refused: '16' has no unit, and would be 16 bytes: write 16GiB or 512MiB",
        "refused: device_memory takes a text such as '16GiB', or bytes, and was given float",
        "refused: time_s takes seconds, 0 or more, and was given -1",
        "refused: time_s takes seconds, 0 or more, and was given 'much'",
        "refused: yielded() runs nothing until it is iterated over: plan a function that does, or the source",
        "refused: the source is not Python: '(' was never closed (line 1 of it)",
    ]
