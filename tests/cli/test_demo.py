"""``oomdoctor demo``: real kernels, and a story that cannot end well by itself."""

import asyncio
import copy
import json
import re
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from oomdoctor.cli import demo, main
from oomdoctor.cli.demo import CellEnd, Reading, run_notebook
from oomdoctor.errors import OomDoctorError
from oomdoctor.model.fix import Edit


def edit(cell, after, replay):
    return Edit(cell=cell, before="", after=after, replay=replay)


PATCHED = (edit(4, "patched = True", "patched = True"),)


def a_case(kind="healed"):
    return {"outcome": {"kind": kind, "fixes": ["micro_batch(micro_batch=64)"], "why": ""}}


def an_end(cell, *, case=None, number=0, edits=(), digests=None, count=None, error=None):
    node = new_code_cell(source="pass", id=cell, execution_count=count)
    reading = Reading(
        number=number, case=case, edits=edits, losses=(), digests={"model": "1"} if digests is None else digests
    )
    return CellEnd(cell=node, elapsed_s=0.1, error=error, reading=reading)


def a_healed_run():
    offered, healed = a_case("offered"), a_case()
    return [
        an_end("data", count=3),
        an_end("train", count=4, case=offered, number=1, error="OutOfMemoryError: CUDA"),
        an_end("fix", count=5, case=healed, number=1, edits=PATCHED),
        an_end("learned", count=6, case=healed, number=1, edits=PATCHED, digests={"model": "2"}),
    ]


def execute(cells, directory, **metadata):
    notebook = new_notebook(cells=cells, metadata=metadata)
    return asyncio.run(
        run_notebook(notebook, directory=directory, on_start=lambda cell: None, on_end=lambda end: None)
    ), notebook


class TestTheKernel:
    def test_it_is_this_interpreter_whatever_the_notebook_names(self, tmp_path, monkeypatch):
        startup = tmp_path / "ipython" / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "00.py").write_text("configured = True")
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        source = "import sys\nprint(sys.executable)\nlosses = [3.5, 1.25]\nprint('configured' in globals())"
        name = {"name": "no-such-kernel", "display_name": "?", "language": "python"}
        (end,), notebook = execute([new_code_cell(source, id="one")], tmp_path, kernelspec=name)
        assert notebook.cells[0].outputs[0].text == f"{sys.executable}\nFalse\n"
        assert notebook.cells[0].execution_count == 1
        assert end.error is None
        assert end.reading.losses == (3.5, 1.25)
        assert end.reading.case is None
        assert "losses" in end.reading.digests

    def test_an_expected_failure_goes_on_and_is_told(self, tmp_path):
        cells = [
            new_code_cell("1 / 0", id="fails", metadata={"tags": ["raises-exception"]}),
            new_code_cell("x = 1", id="next"),
        ]
        ends, _ = execute(cells, tmp_path)
        assert [(end.cell.id, end.error) for end in ends] == [
            ("fails", "ZeroDivisionError: division by zero"),
            ("next", None),
        ]

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("1 / 0", "'bad' failed: ZeroDivisionError: division by zero"),
            ("import os; os._exit(1)", "'bad' did not end"),
        ],
    )
    def test_any_other_failure_is_an_error(self, tmp_path, source, said):
        with pytest.raises(OomDoctorError, match=said):
            execute([new_code_cell(source, id="bad")], tmp_path)

    def test_the_digests_tell_two_states_apart(self, tmp_path):
        cells = [
            new_code_cell("import random, torch\nlosses = [1.0]"),
            new_code_cell("losses.append(2.0)\nrandom.seed(1)"),
        ]
        (first, second), _ = execute(cells, tmp_path)
        assert {
            name for name in first.reading.digests if first.reading.digests[name] != second.reading.digests[name]
        } == {
            "losses",
            "(random number generators)",
        }


class TestTheCheck:
    def test_a_healed_failure_is_paired_with_the_cell_that_failed(self):
        ((failed, healed),) = demo.healed_pairs(a_healed_run())
        assert (failed, healed.cell.id) == ("train", "fix")

    def test_a_failure_that_was_not_healed_is_an_error(self):
        ends = a_healed_run()[:2]
        with pytest.raises(OomDoctorError, match="failure 1 was not healed: offered"):
            demo.healed_pairs(ends)

    def test_a_run_without_a_failure_is_an_error(self):
        with pytest.raises(OomDoctorError, match="no cell ran out of memory"):
            demo.healed_pairs([an_end("data", count=1)])

    def test_the_fresh_notebook_has_the_changed_cells_and_none_of_ours(self):
        source = nbformat.read(demo.notebook_path(), as_version=4)
        before = copy.deepcopy(source)
        fresh = demo.fresh_notebook(source, a_healed_run())
        text = {cell.id: cell.source for cell in fresh.cells}
        assert text["train"] == "patched = True"
        assert "%" not in "".join(line[:1] for source in text.values() for line in source.splitlines())
        assert {"imports", "data", "model", "train", "train-more", "sample"} <= text.keys()
        assert all("raises-exception" not in cell.metadata.get("tags", ()) for cell in fresh.cells)
        assert source == before

    def test_a_cell_that_both_fixes_change_is_changed_when_each_failure_comes(self):
        """The first failure was healed without what the second one's fix changes in the cells before it."""
        source = new_notebook(
            cells=[new_code_cell(f"{name} = 0", id=name) for name in ("data", "model", "train", "between", "more")]
        )
        first = (edit(2, "blocks = 2", "blocks[:] = 2"), edit(3, "train = 1", "train = 1"))
        second = tuple(edit(at, f"all = {at}", f"redo = {at}") for at in (1, 2, 3, 4, 5))
        ends = [
            an_end("data", count=1),
            an_end("model", count=2),
            an_end("train", count=3, number=1, case=a_case(), edits=first),
            an_end("between", count=4, number=1, case=a_case(), edits=first),
            an_end("more", count=5, number=2, case=a_case(), edits=second),
        ]
        fresh = demo.fresh_notebook(source, ends)
        assert [cell.source for cell in fresh.cells] == [
            *("data = 0", "blocks = 2", "train = 1", "all = 4"),
            *("redo = 1", "redo = 2", "redo = 3", "all = 5"),
        ]
        nbformat.validate(fresh)

    def test_a_fix_without_a_patch_cannot_be_checked(self):
        ends = [*a_healed_run()[:2], an_end("fix", count=5, case=a_case(), number=1)]
        with pytest.raises(OomDoctorError, match="no patch"):
            demo.fresh_notebook(nbformat.read(demo.notebook_path(), as_version=4), ends)

    def test_the_same_state_is_told(self):
        pairs = demo.healed_pairs(a_healed_run())
        (line,) = demo.compare(pairs, [an_end("train", digests={"model": "1"})])
        assert "same state" in line
        assert "model" in line

    @pytest.mark.parametrize("digests", [{"model": "2"}, {"model": "1", "more": "3"}, {}])
    def test_another_state_is_an_error(self, digests):
        pairs = demo.healed_pairs(a_healed_run())
        with pytest.raises(OomDoctorError, match=r"not that of a fresh run, after the cell 'train': \w+"):
            demo.compare(pairs, [an_end("train", digests=digests)])


SMALL = {
    "imports": "import random\nimport numpy as np\nimport torch\nfrom torch import nn\n"
    "random.seed(0); np.random.seed(0); torch.manual_seed(0)",
    "model": "layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())]\n"
    "model = nn.Sequential(*layers)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "loader = [(torch.randn(8192, 64), torch.randn(8192, 64))]\ncriterion = nn.MSELoss()\nlosses = []",
    "simulate": "%load_ext oomdoctor\n%oomdoctor simulate 40MiB",
    "train": "for x, y in loader:\n    optimizer.zero_grad()\n    loss = criterion(model(x), y)\n"
    "    loss.backward()\n    optimizer.step()\n    losses.append(loss.item())",
    "fix": "%oomdoctor fix 1",
}


@pytest.fixture
def small_notebook(tmp_path, monkeypatch):
    """Let the demo run a smaller notebook of the same make."""
    cells = [new_code_cell(source, id=name) for name, source in SMALL.items()]
    cells[3].metadata["tags"] = ["raises-exception"]
    path = tmp_path / "small.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    monkeypatch.setattr(demo, "notebook_path", lambda: path)


def run_demo(output, *arguments):
    return main(["demo", "--output", str(output), *arguments])


@pytest.mark.thorough
def test_a_small_cell_is_healed_to_the_state_of_a_fresh_run(tmp_path, small_notebook, capsys):
    assert run_demo(tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "same state after train, bit for bit" in out
    assert "asked for" in out
    assert "Healed: In[" in out
    assert "%oomdoctor fix 1" in out
    assert re.search(r"The change of In\[\d+\]:\n *--- In\[\d+\]\n", out)
    assert re.search(r"^ +\+ .*chunk\(", out, re.MULTILINE), "the lines that the healed cell ran, unbroken"


@pytest.mark.thorough
def test_a_fresh_run_that_ends_elsewhere_makes_the_command_fail(tmp_path, small_notebook, monkeypatch, capsys):
    faithful = demo.fresh_notebook

    def sabotaged(source, ends):
        notebook = faithful(source, ends)
        notebook.cells[-1].source += "\nwith torch.no_grad():\n    next(model.parameters())[0, 0] += 1e-7"
        return notebook

    monkeypatch.setattr(demo, "fresh_notebook", sabotaged)
    assert run_demo(tmp_path / "out") == 1
    said = "the healed state is not that of a fresh run, after the cell 'train': layers, model, optimizer"
    assert capsys.readouterr().err == f"oomdoctor demo: {said}\n"


def test_a_notebook_in_which_nothing_is_healed_makes_the_command_fail(tmp_path, monkeypatch, capsys):
    notebook = tmp_path / "quiet.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("print('all is well')", id="quiet")]), notebook)
    monkeypatch.setattr(demo, "notebook_path", lambda: notebook)
    assert run_demo(tmp_path / "out") == 1
    assert capsys.readouterr().err == "oomdoctor demo: no cell ran out of memory, so nothing was shown\n"
    assert "all is well" in (tmp_path / "out" / "01_first_oom.html").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_the_demo_heals_and_leaves_the_state_of_a_fresh_run(tmp_path, capsys):
    assert run_demo(tmp_path, "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert [case["outcome"]["kind"] for case in report["cases"]] == ["healed", "healed"]
    assert err.count("same state") == 2
    notebook = nbformat.read(tmp_path / "01_first_oom.ipynb", as_version=4)
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert outputs["train"][0].ename == "OutOfMemoryError"
    assert not any(output.output_type == "error" for output in outputs["train-more"])
    assert len(report["losses"]) == 90
    assert report["losses"][-1] < report["losses"][49] < report["losses"][0] / 3
    assert "OutOfMemoryError" in (tmp_path / "01_first_oom.html").read_text()
