"""The line that a report says frees something, typed as it stands in a real kernel, frees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from kernels import Kernel

SETUP = """\
import sys, weakref
import torch
refs = []

def made(mib=8):
    tensor = torch.ones(mib << 18, requires_grad=True)
    refs.append(weakref.ref(tensor.untyped_storage()))
    return tensor

def fails():
    kept = made()
    raise ValueError("an earlier failure")

def fails_with(tensor):
    raise ValueError("an earlier failure")
"""
CASES = "len(__import__('oomdoctor.pipeline').pipeline.cases())"
ALIVE = "[ref() is not None for ref in refs]"


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run(SETUP, ok=True)
    yield kernel
    kernel.stop()


@pytest.fixture
def loaded(shared: Kernel) -> Kernel:
    """A kernel that holds no tensor yet."""
    shared.run("refs.clear()", ok=True)
    assert _lines(shared, "output_cache") == _lines(shared, "traceback") == {}
    return shared


def _lines(kernel: Kernel, role: str) -> dict[str, str]:
    """Return the line that is said to free each holder of that role."""
    found = json.loads(kernel.run("%memreport --json", ok=True).stdout)["evidence"]["census"]["holdings"]
    return {one["path"]: one["frees"] for one in found if one["role"] == role}


SHOWN = {
    "the latest result": (["made()"], 1),
    "results before it": (["made()", "made()", "made()", "made()", "made()", "1 + 1"], 5),
    "a list": (["[made(), made()]"], 2),
    "a graph": (["(made() * 2).sum()"], 1),
    "without its entry": (["made()", "del globals()[f'_{max(Out)}'], Out[max(Out)]"], 1),
}


@pytest.mark.parametrize("shown", SHOWN)
def test_each_line_for_a_result_that_ipython_keeps(loaded: Kernel, shown: str) -> None:
    cells, tensors = SHOWN[shown]
    for cell in cells:
        loaded.run(cell, ok=True)
    assert loaded.value(ALIVE) == [True] * tensors
    lines = _lines(loaded, "output_cache")
    assert lines
    for line in dict.fromkeys(lines.values()):
        assert loaded.run(line, ok=True).stderr == ""
    assert loaded.value(ALIVE) == [False] * tensors
    assert _lines(loaded, "output_cache") == {}
    loaded.run("20 + 1", ok=True)
    assert loaded.run("_ * 2", ok=True).data("text/plain") == ["42"]


def test_an_underscore_that_a_cell_binds_is_a_name_of_the_users(loaded: Kernel) -> None:
    loaded.run("kept, _ = 1, made()", ok=True)
    assert loaded.value(ALIVE) == [True]
    assert _lines(loaded, "output_cache") == {}
    held = json.loads(loaded.run("%memreport --json", ok=True).stdout)["evidence"]["census"]["holdings"]
    assert "_" in [one["path"] for one in held]
    loaded.run("del _", ok=True)
    assert loaded.value(ALIVE) == [False]


HELD = {
    "by a name that was shown": (["x = made()", "x"], "x", "%xdel x"),
    "by two names, one shown": (["x = made(); y = x", "y"], "x", "%xdel y"),
    "shown twice": (["x = made()", "x", "x"], "x", "%xdel x"),
    "in a list beside what was shown": (
        ["x = made(); xs = [x]", "x"],
        "x",
        "get_ipython().del_var('x'); del xs",
    ),
    "by a view that was shown": (["x = made()", "x[:3]"], "x", "get_ipython().del_var('_'); del x"),
    "by a model that was shown": (
        [
            "model = torch.nn.Module(); model.w = torch.nn.Parameter(made().detach())",
            "opt = torch.optim.SGD(model.parameters())",
            "model",
        ],
        "model.w",
        "get_ipython().del_var('model'); del opt",
    ),
    "by a failed call": (
        ["x = made()", "fails_with(x)"],
        "x",
        "get_ipython().run_line_magic('oomdoctor', 'fix release_traceback'); del x",
    ),
    "by an error that is kept": (
        ["try:\n    fails_with(made())\nexcept ValueError as error:\n    kept = error"],
        "kept.__traceback__.tb_next.tb_frame.f_locals['tensor']",
        "del kept",
    ),
}


@pytest.mark.parametrize("held", HELD)
def test_what_the_shell_holds_too_is_in_the_line(loaded: Kernel, held: str) -> None:
    cells, path, told = HELD[held]
    before = set(loaded.value("list(globals())"))
    for cell in cells:
        loaded.run(cell)
    found = json.loads(loaded.run("%memreport --json", ok=True).stdout)["evidence"]["census"]["holdings"]
    lines = {one["path"]: one["frees"] for one in found}
    assert path in lines, lines
    assert loaded.value(ALIVE) == [True]
    assert re.sub(r"'_\d*'", "'_'", lines[path]) == told
    loaded.run(lines[path], ok=True)
    assert loaded.value("__import__('gc').collect() >= 0")
    assert loaded.value(ALIVE) == [False]
    for name in set(loaded.value("list(globals())")) - before:
        loaded.run(f"globals().pop({name!r}, None);", ok=True)


def test_one_of_several_results_is_freed_by_its_line_alone(loaded: Kernel) -> None:
    for _ in range(3):
        loaded.run("made()", ok=True)
    before = _lines(loaded, "output_cache")
    _, middle, _ = sorted(before, key=lambda path: int(path[4:-1]))
    loaded.run(before[middle], ok=True)
    assert loaded.value(ALIVE) == [True, False, True]
    assert _lines(loaded, "output_cache").keys() == before.keys() - {middle}
    loaded.run("%oomdoctor fix clear_output_cache", ok=True)


def test_an_earlier_traceback_is_let_go_of_without_a_case(loaded: Kernel) -> None:
    loaded.run("fails()", ok=False)
    assert loaded.value(ALIVE) == [True]
    (line,) = set(_lines(loaded, "traceback").values())
    assert line == "%oomdoctor fix release_traceback"
    reply = loaded.run(line, ok=True)
    assert reply.stderr == ""
    assert reply.stdout == "8.00 MiB of tensors freed; %debug and %tb no longer reach that failure\n"
    assert loaded.value(ALIVE) == [False]
    assert _lines(loaded, "traceback") == {}
    assert loaded.run(line, ok=True).stdout == "there was no tensor to free\n"
    assert loaded.value(CASES) == 0


def test_the_fix_for_all_results_works_without_a_case(loaded: Kernel) -> None:
    for _ in range(4):
        loaded.run("made()", ok=True)
    loaded.run("'kept'", ok=True)
    reply = loaded.run("%oomdoctor fix clear_output_cache", ok=True)
    assert reply.stdout == "32.0 MiB of tensors freed; the results are no longer in Out\n"
    assert loaded.value(ALIVE) == [False] * 4
    assert loaded.value("Out[max(Out)]") == "kept"


def test_a_fix_that_changes_the_cell_still_needs_a_case(loaded: Kernel) -> None:
    for fix in ("micro_batch", "detach_history"):
        reply = loaded.run(f"%oomdoctor fix {fix}", ok=True)
        assert reply.stderr == "oomdoctor: no cell that ran out of memory was diagnosed so far\n"


def test_beside_a_case_that_it_does_not_heal_it_is_let_go_of_too(loaded: Kernel) -> None:
    loaded.run("%config OomDoctor.forecast_time_s = 0\n%oomdoctor simulate 64MiB", ok=True)
    loaded.run("torch.ones(1 << 26)", ok=False)
    loaded.run("fails()", ok=False)
    assert loaded.value(ALIVE) == [True]
    reply = loaded.run("%oomdoctor fix release_traceback", ok=True)
    assert reply.stdout.startswith("8.00 MiB of tensors freed")
    assert loaded.value(ALIVE) == [False]
    assert loaded.value(CASES) == 1


def test_where_it_can_heal_a_failed_cell_it_does(loaded: Kernel) -> None:
    loaded.run("%config OomDoctor.forecast_time_s = 20\n%oomdoctor simulate 64MiB", ok=True)
    loaded.run("def fails_with_much():\n    kept = made(40)\n    raise ValueError", ok=True)
    loaded.run("fails_with_much()", ok=False)
    loaded.run("result = torch.ones(30 << 18).sum().item()", ok=False)
    reply = loaded.run("%oomdoctor fix release_traceback", ok=True)
    assert "healed" in reply.text.lower()
    assert loaded.value("result") == 30 << 18
    assert loaded.value(ALIVE) == [False]
