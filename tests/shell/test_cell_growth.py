"""``%memreport --cells``, what each cell has left, and ``%memreport --live``, an output that is refreshed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from frontend import Frontend
from kernels import Kernel

from oomdoctor.model.memory import CellGrowth, Usage
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.shell.memreport import MemReport
from oomdoctor.views.html import render as html
from oomdoctor.views.memory_report import cells_table, live
from oomdoctor.views.mime import live_bundle
from oomdoctor.views.text import render

MIB = 1 << 20
DEVICE = "cuda:0 (simulated)"


def grown(kernel: Kernel) -> dict[int, dict[str, int]]:
    found = json.loads(kernel.run("%memreport --cells --json", ok=True).stdout)
    assert found["schema"] == 1
    return {cell["number"]: cell["grown"] for cell in found["cells"]}


def number_of(kernel: Kernel, cell: str, *, ok: bool = True) -> int:
    return int(kernel.run(cell, ok=ok).content["execution_count"])


def test_which_cell_left_what(ready: Kernel) -> None:
    more = number_of(ready, "more = torch.ones(32 << 18); scrap = torch.ones(64 << 18); del scrap")
    less = number_of(ready, "del more")
    failed = number_of(ready, "held = torch.ones(2 << 18); 1 / 0", ok=False)
    own = number_of(ready, "%memreport --cells")
    found = grown(ready)
    assert found[more][DEVICE] == 32 * MIB
    assert found[less][DEVICE] == -32 * MIB
    assert found[failed][DEVICE] == 2 * MIB
    assert abs(found[less]["host"] + 32 * MIB) < 4 * MIB
    assert own not in found
    reply = ready.run("%memreport --cells", ok=True)
    row = next(line for line in reply.data("text/plain")[0].splitlines() if f"In[{more}]" in line)
    assert "+32.0 MiB" in row
    assert f"most of {DEVICE}" in row
    assert "+32.0 MiB" in reply.data("text/html")[0]


def test_a_simulated_device_that_is_switched_on_has_not_grown(ready: Kernel) -> None:
    at = number_of(ready, "from oomdoctor.allocator.virtual import switch_on\nswitch_on('256MiB')")
    assert DEVICE not in grown(ready)[at]


def test_copies_for_a_retry_are_not_the_cells(ready: Kernel) -> None:
    ready.run("model = torch.nn.Linear(2048, 2048)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)", ok=True)
    step = "optimizer.zero_grad()\nmodel(torch.ones(1, 2048)).sum().backward()\noptimizer.step()"
    ready.run(step, ok=True)
    at = number_of(ready, step)
    assert abs(grown(ready)[at]["host"]) < 8 * MIB, "the copies of the weights are 16 MiB"


def test_a_ring_of_plain_numbers() -> None:
    report = MemReport(SimpleNamespace(execution_count=1))
    for report.number in range(130):
        report.note(report.reading(), 0, report.number)
    report.note(None, 0, 1)
    assert [cell.number for cell, _ in report._cells] == list(range(30, 130))
    assert {type(size) for cell, _ in report._cells for size in cell.grown.values()} == {int}


COST = """\
import sys
from timeit import repeat
from types import SimpleNamespace
from oomdoctor.shell.memreport import MemReport
report = MemReport(SimpleNamespace(execution_count=1))
print(min(repeat(lambda: report.note(report.reading(), 0, 1), number=100, repeat=20)) / 100)
assert "torch" not in sys.modules
"""


def test_what_it_costs_each_cell_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 100e-6


def test_the_table_has_a_column_for_each_memory_in_text_and_html() -> None:
    cells = (
        CellGrowth(number=1, grown={"host": 5 * MIB}),
        CellGrowth(number=2, grown={"cuda:0": 2 * MIB, "host": -MIB}),
        CellGrowth(number=3, grown={"cuda:0": 0, "host": 5 * MIB}),
    )
    for width in (100, 40):
        shown = " ".join(render(cells_table(cells), width=width).split())
        assert "Cell cuda:0 host" in shown
        assert "In[1] +5.00 MiB most of host In[2] +2.00 MiB -1.00 MiB most of cuda:0" in shown
    assert html(cells_table(cells)).count("<tr>") == 4
    assert "No cell has ended" in render(cells_table(()))


# The output that is refreshed ---------------------------------------------------------------------------------------


@pytest.fixture
def page(ready: Kernel) -> Iterator[Frontend]:
    page = Frontend(ready)
    yield page
    page.run("%memreport --live off")


def shown(page: Frontend) -> str:
    return next((one["text/plain"] for one in page.displays.values() if "Refreshed" in one["text/plain"]), "")


def allocated(text: str) -> float:
    return float(text.removeprefix(f"{DEVICE}: ").split()[0])


def test_the_output_is_refreshed_while_later_cells_run(page: Frontend) -> None:
    page.run("%oomdoctor simulate 512MiB")
    page.run("%memreport --live 0.1")
    assert f"{DEVICE}: " in shown(page)
    assert "reserved of 512 MiB" in shown(page)
    assert "resident in this process" in shown(page)
    first, started = allocated(shown(page)), len(page.messages)
    code = "filling = torch.ones(100 << 18)\ntime.sleep(0.8)\ndel filling"
    page.run(f"%%capture out\nimport time\nbefore = torch.ones(1)\n{code}")
    updates = [one for one in page.messages[started:] if one["header"]["msg_type"] == "update_display_data"]
    assert max(allocated(one["content"]["data"]["text/plain"]) for one in updates) - first >= 99
    assert page.run("assert not out.outputs") == "ok", "a cell that captures its output gets none of it"


def test_it_ends_when_it_is_told_to_and_with_the_extension(page: Frontend, ready: Kernel) -> None:
    names = "[one.name for one in __import__('threading').enumerate() if 'oomdoctor-live' in one.name]"
    page.run("%memreport --live")
    page.run("%memreport --live 0.5")
    assert ready.value(names) == ["oomdoctor-live"], "a second one takes the place of the first"
    page.run("%memreport --live off")
    assert ready.value(names) == []
    assert all("Refreshed" not in one["text/plain"] for one in page.displays.values())
    page.run("%memreport --live")
    page.run("%unload_ext oomdoctor")
    assert ready.value(names) == []
    page.run("%load_ext oomdoctor")


TYPED = {
    "%memreport --live off": "--live off ends an output that is refreshed, and there is none",
    "%memreport --live 0": "--live: it needs seconds, 0.1 to 3600, or off, not '0'",
    "%memreport --live nan": "--live: it needs seconds, 0.1 to 3600, or off, not 'nan'",
    "%memreport --live on": "--live: it needs seconds, 0.1 to 3600, or off, not 'on'",
    "%memreport --live off --top 3": "--live takes no other option beside it, not --top",
    "%memreport --live 1 --diff": "--live takes no other option beside it, not --diff",
    "%memreport --cells --top 3": "--cells takes --json alone beside it, not --top",
}


@pytest.mark.parametrize("typed", TYPED)
def test_what_cannot_be_used_is_one_line(ready: Kernel, typed: str) -> None:
    reply = ready.run(typed, ok=True)
    assert TYPED[typed] in reply.stderr
    assert reply.stderr.count("\n") == 1
    assert reply.messages[0]["content"]["name"] == "stderr"
    assert len(reply.messages) == 1


def test_a_terminal_is_told_that_it_needs_a_notebook() -> None:
    code = "from IPython.core.interactiveshell import InteractiveShell as S; s = S.instance()\n"
    code += "s.run_cell('%load_ext oomdoctor'); s.run_cell('%memreport --live')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("oomdoctor")]
    assert said == ["oomdoctor: %memreport --live needs a notebook: what a terminal has printed cannot be refreshed"]


def test_no_random_number_of_the_users_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """To put the generator back would not do: the program draws from it meanwhile."""
    unknown = Unavailable("it is not told")
    usages = (
        Usage("cuda:0", 3 * MIB, 4 * MIB, 8 * MIB),
        Usage("mps:0", 3 * MIB, unknown, unknown),
        Usage("host", unknown),
    )
    live_bundle(live(usages, "state"))
    monkeypatch.setattr(random, "setstate", None)
    before = random.getstate()
    found = live_bundle(live(usages, "state"))
    assert random.getstate() == before
    assert found["text/plain"].splitlines()[0] == "cuda:0: 3.00 MiB allocated, 4.00 MiB reserved of 8.00 MiB"
    assert "mps:0: 3.00 MiB allocated\n" in found["text/plain"]
    assert "host: unknown" in found["text/plain"]
    assert "3.00 MiB allocated" in found["text/html"]
