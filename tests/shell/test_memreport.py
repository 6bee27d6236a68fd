"""``%memreport`` in a real kernel, and ``oomdoctor.report()`` in a real script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import Kernel

MIB = 1 << 20

SMALL_MODEL = """\
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def ready(kernel: Kernel) -> Kernel:
    """A kernel with a small model on a simulated device."""
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run("import torch", ok=True)
    kernel.run("%oomdoctor simulate 512MiB", ok=True)
    kernel.run(SMALL_MODEL, ok=True)
    return kernel


def _evidence(kernel: Kernel, line: str) -> dict[str, object]:
    return json.loads(kernel.run(line, ok=True).stdout)["evidence"]


def test_a_person_sees_first_what_fills_the_memory(ready: Kernel) -> None:
    ready.run("big = torch.ones(200 << 18)", ok=True)
    reply = ready.run("%memreport", ok=True)
    assert reply.stderr == ""
    (plain,), (page,) = reply.data("text/plain"), reply.data("text/html")
    first, second = plain.splitlines()[:2]
    assert first.startswith("cuda:0 (simulated): ")
    assert "of 512 MiB in use; " in first
    assert first.endswith("your tensors in `big`.")
    assert second.startswith("host memory")
    assert "del big" in plain
    for shown in (plain, page):
        assert "24 parameters" in shown
        assert "24 gradients" in shown
        assert re.search(r"Accounted for (99\.\d|100\.0) % of allocated", shown)
    assert "model[3].weight" not in plain
    assert "model[3].weight" in ready.run("%memreport --top 200", ok=True).data("text/plain")[0]


def test_the_report_keeps_nothing_alive(ready: Kernel) -> None:
    ready.run("import weakref\nbig = torch.ones(16 << 18); seen = weakref.ref(big)", ok=True)
    ready.run("%memreport", ok=True)
    ready.run("%memreport --diff", ok=True)
    ready.run("del big", ok=True)
    assert ready.value("seen() is None") is True


def test_growth_since_the_last_report(ready: Kernel) -> None:
    first = ready.run("%memreport --diff", ok=True).data("text/plain")[0]
    assert "There is nothing to compare with yet" in first
    ready.run("losses = []\nx = torch.randn(64, 256)\nscrap = torch.ones(1 << 20)", ok=True)
    ready.run("%memreport", ok=True)
    ready.run("losses += [model(x).sum() for _ in range(8)]\ndel scrap", ok=True)
    grown = ready.run("%memreport --diff", ok=True).data("text/plain")[0]
    assert "Since the report of In[7]: cuda:0 (simulated) +" in grown
    assert "graphs kept alive" in grown
    lines = grown.splitlines()
    assert any("losses[" in line and "graph" in line and "+" in line for line in lines)
    assert any("-4.00 MiB" in line and "`scrap`, gone" in line for line in lines)
    found = json.loads(ready.run("%memreport --diff --json", ok=True).stdout)
    assert set(found) == {"schema", "evidence", "growth"}
    assert {device["device"] for device in found["growth"]["devices"]} == {"cuda:0", "cpu"}


def test_a_local_of_a_failed_or_running_function_is_told_with_its_cell(ready: Kernel) -> None:
    ready.run("def evaluate():\n    held = torch.ones(1 << 22)\n    return 1 / 0", ok=True)
    ready.run("evaluate()")
    assert "local `held` of evaluate at In[5] line 3" in ready.run("%memreport", ok=True).data("text/plain")[0]
    ready.run("def look():\n    mine = torch.ones(1 << 23)\n    get_ipython().run_line_magic('memreport', '')", ok=True)
    assert "local `mine` of look at In[8] line 3" in ready.run("look()", ok=True).data("text/plain")[0]


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_one_device_by_its_name_or_the_beginning_of_it(ready: Kernel, name: str) -> None:
    shown = ready.run(f"%memreport --device {name}", ok=True).data("text/plain")[0]
    assert shown.startswith("cuda:0 (simulated)")
    assert "\nhost memory" in shown
    found = _evidence(ready, f"%memreport --device={name} --json")
    assert [device["name"] for device in found["devices"]] == ["cuda:0"]  # type: ignore[attr-defined]
    host = ready.run("%memreport --device cpu", ok=True).data("text/plain")[0]
    assert host.startswith("host memory")
    assert "cuda:0" not in host.partition("Not on this machine")[0]


@pytest.mark.parametrize("asked", ["--help", "-h", "help"])
def test_the_usage_is_printed_and_nothing_is_searched(kernel: Kernel, asked: str) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    reply = kernel.run(f"%memreport {asked}", ok=True)
    assert reply.stdout.startswith("Show what holds memory now")
    assert "--snapshot PATH" in reply.stdout
    assert reply.data("text/plain") == []


def test_a_page_beside_printed_json_is_confirmed_and_the_json_can_be_read(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    reply = kernel.run("%memreport --json --html here.html", ok=True)
    assert json.loads(reply.stdout)["schema"] == 1
    assert reply.stderr == "here.html: a page that opens offline\n"


def test_files_are_written_and_nothing_is_displayed(ready: Kernel) -> None:
    reply = ready.run("%memreport --json here.json --html here.html --top 3", ok=True)
    assert reply.data("text/html") == []
    assert reply.stdout.splitlines() == ["here.html: a page that opens offline", "here.json: the evidence as JSON"]
    found = ready.value("__import__('json').load(open('here.json'))")
    assert found["schema"] == 1
    assert found["evidence"]["census"]["accounted_ratio"] > 0.99
    page = ready.value("open('here.html', encoding='utf-8').read()")
    assert page.startswith("<!doctype html>")
    assert "optimizer.state" in page


MODES = """\
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
asked = []
class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        asked.append(str(func))
        return func(*args, **(kwargs or {}))
class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        asked.append(str(func))
        return func(*args, **(kwargs or {}))
"""


@pytest.mark.parametrize("line", ["", "--diff --html page.html", "--snapshot here.pickle"])
def test_the_first_report_of_a_process_asks_no_mode_of_the_users(kernel: Kernel, line: str) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run(MODES, ok=True)
    kernel.run(f"with Dispatch(), Function():\n    get_ipython().run_line_magic('memreport', '{line}')", ok=True)
    assert kernel.value("asked") == []
    kernel.run("with Dispatch(), Function():\n    torch.ones(2)", ok=True)
    assert kernel.value("asked") != []


BAD = {
    "%memreport --device tpu": "no device 'tpu' is in use: there is cuda:0 and cpu",
    "%memreport --device": "--device: expected one argument",
    "%memreport --top 0": "--top: it needs a number above zero, not '0'",
    "%memreport --top=-3": "--top: it needs a number above zero",
    "%memreport --diff yes": "%memreport: unrecognized arguments: yes",
    "%memreport --diff=yes": "--diff: ignored explicit argument",
    "%memreport --json=": "--json: it needs a path",
    "%memreport --json=/tmp/out space.json": "%memreport: unrecognized arguments: space.json",
    "%memreport --html good.html --json nowhere/x.json": "--json: it needs a path, of a file in a folder that exists",
    "%memreport --html . --json good.json": "--html: it needs a path, of a file in a folder that exists",
    "%memreport --html /proc/x.html": "/proc/x.html cannot be written: ",
    "%memreport --html good.html --device tpu": "no device 'tpu' is in use",
    "%memreport --html good.html --snapshot good.pickle": "there is no snapshot: the simulated GPU has no CUDA",
    "%memreport --ranks": "%memreport: unrecognized arguments: --ranks",
}


def test_bad_values_give_one_line_and_write_nothing(ready: Kernel) -> None:
    files = "sorted(__import__('os').listdir('.'))"
    before = ready.value(files)
    for line, says in BAD.items():
        reply = ready.run(line, ok=True)
        assert says in reply.stderr, line
        assert reply.stderr.count("\n") == 1
        assert reply.stdout == ""
        assert reply.data("text/plain") == []
    assert ready.value(files) == before


def test_without_a_device_there_is_no_snapshot_and_nothing_is_initialised(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    reply = kernel.run("%memreport --snapshot here.pickle", ok=True)
    assert "there is no snapshot: this process uses no CUDA device" in reply.stderr
    assert kernel.value("__import__('os').path.exists('here.pickle')") is False


@pytest.mark.gpu
def test_a_snapshot_of_cuda_opens_and_says_whether_it_has_traces(kernel: Kernel) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    kernel.run("%load_ext oomdoctor\nimport torch", ok=True)
    kernel.run("held = torch.ones(16 << 18, device='cuda')", ok=True)
    read = "len(__import__('pickle').load(open('here.pickle', 'rb'))['segments'])"
    without = kernel.run("%memreport --snapshot here.pickle", ok=True)
    assert "without traces: torch.cuda.memory._record_memory_history() must be on" in without.stdout
    assert kernel.value(read) >= 1
    kernel.run("torch.cuda.memory._record_memory_history()\nmore = torch.ones(1 << 20, device='cuda')", ok=True)
    assert "with the traces recorded so far" in kernel.run("%memreport --snapshot here.pickle", ok=True).stdout
    kernel.run("torch.cuda.memory._record_memory_history(enabled=None)", ok=True)


def test_a_host_alone_is_reported_with_its_tensors(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run("import torch\nheld = torch.ones(40 << 18)", ok=True)
    shown = kernel.run("%memreport", ok=True).data("text/plain")[0]
    assert shown.startswith("host memory")
    words = " ".join(shown.split())
    assert "of that is no tensor); tensors take 40.0 MiB, 100 % of it your tensors in `held`." in words
    assert "outside tensors NumPy arrays, Python objects and libraries" in words
    assert words.count("Not on this machine: ") == 1
    for name in ("CUDA", "XPU", "MPS", "NVML"):
        assert len(re.findall(rf"\b{name}\b", words.partition("Not on this machine: ")[2])) == 1


def test_the_function_calls_the_cells_of_a_notebook_by_their_numbers(ready: Kernel) -> None:
    ready.run("import oomdoctor\ndef look():\n    return oomdoctor.report()", ok=True)
    ready.run("def work():\n    held = torch.ones(64 << 18)\n    return look()", ok=True)
    reply = ready.run("print(work())", ok=True)
    assert "work at In[6] line 3" in reply.stdout
    assert ".py" not in reply.stdout
    assert "<ipython-input" not in reply.stdout


SCRIPT = """\
import json, pathlib, sys, weakref
import torch
import oomdoctor

GLOBAL = torch.ones(8 << 18)

def main():
    inside = torch.ones(4 << 18)
    before = oomdoctor.report()
    print(before)
    later, seen = torch.ones(16 << 18), weakref.ref(inside)
    del inside
    assert seen() is None, "the report keeps what the program dropped"
    after = oomdoctor.report()
    print(after.diff(before))
    pathlib.Path(sys.argv[1]).write_text(after.to_html(), encoding="utf-8")
    pathlib.Path(sys.argv[2]).write_text(json.dumps(after.to_dict()))

main()
"""


def test_a_script_prints_its_report(tmp_path: Path) -> None:
    script, page, shape = tmp_path / "train.py", tmp_path / "page.html", tmp_path / "shape.json"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(page), str(shape)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.stderr == ""
    assert "Not on this machine: " in done.stdout
    report, _, growth = done.stdout.partition("Since the earlier report:")
    assert report.startswith("host memory")
    assert "GLOBAL" in report
    assert "inside" in report
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "+64.0 MiB" not in growth
    assert "+16.0 MiB  `later`, new" in growth
    assert "-4.00 MiB  `inside`, gone" in growth
    assert "later" in page.read_text(encoding="utf-8")
    assert json.loads(shape.read_text())["schema"] == 1


def test_the_ends_of_the_cells_so_far_are_a_timeline(ready: Kernel) -> None:
    ready.run("big = torch.ones(200 << 18)", ok=True)
    ready.run("del big", ok=True)
    reply = ready.run("%memreport", ok=True)
    (plain,), (page,) = reply.data("text/plain"), reply.data("text/html")
    plain = " ".join(plain.split())
    told = re.search(
        r"At the ends of cells: \S+ MiB after In\[4\], at most (\d+) MiB after In\[5\], now (\S+) MiB", plain
    )
    assert told is not None, plain[-600:]
    assert 200 <= int(told[1]) < 220
    assert float(told[2]) < 20
    assert page.count("<img ") == 2, "the holders and the ends of the cells"
    assert ">limit 512 MiB<" in page
    assert "At the ends of cells" in ready.run("%memreport --device cpu", ok=True).data("text/plain")[0]
