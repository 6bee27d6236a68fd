from __future__ import annotations

import ast

import libcst as cst
import pytest

from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.unavailable import Refused
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.magics import mask

ROUND_TRIPS = [
    "x = 1\n",
    "x = 1",
    "",
    "\n\n%matplotlib inline\nimport torch  # keep   me\n\n",
    "%%time\nfor i in range(3):\n\ttrain(i)  \n",
    "!pip install 'it''s' \\\n   more \\\n   end\nx = 1",
    'if True:\n    !ls "unbalanced\n    %time y = f(1)\nfiles = !ls -l\nobj?\n?obj\nobj.attr??\n',
    "text = '''\n%not a magic\n!nor this\n'''\n%load_ext x\n",
    "value = ('%d'\n    % 3)\n!ls\n",
    "%%bash\nfor f in *; do echo $f; done\n",
    "π = 3.14\n%time π\n",
    "def f():\n    '''doc'''\n    %time\n    return 1\n",
    "x = 7 \\\n  % 3\n%time pass\n",
    "await thing()\n%pip list\n",
    "x = 1\r\n%time\r\ny = 2\r\n",
]


def cells(*sources: str) -> Cells:
    return Cells(history=tuple(Cell(number=n, source=s) for n, s in enumerate(sources, 1)))


def parsed(source: str) -> rewriting.ParsedCell:
    found = rewriting.read(source)
    assert isinstance(found, rewriting.ParsedCell), found
    return found


@pytest.mark.parametrize("source", ROUND_TRIPS)
def test_unchanged_cell_is_byte_identical(source: str) -> None:
    cell = parsed(source)
    assert rewriting.write(cell, cell.module) == source


@pytest.mark.parametrize("source", ROUND_TRIPS)
def test_masked_text_is_python_with_the_same_lines(source: str) -> None:
    text = mask(source).text
    ast.parse(text)
    assert text.count("\n") == source.count("\n")


def test_strings_and_operators_are_not_taken_for_magics() -> None:
    assert "%not a magic\n!nor this" in mask(ROUND_TRIPS[7]).text
    assert "    % 3" in mask(ROUND_TRIPS[8]).text


def test_statement_under_a_line_magic_is_seen() -> None:
    tree = ast.parse(mask("%time train(model)\n!ls\nout = !ls\n").text)
    assert [ast.unparse(node) for node in tree.body] == ["train(model)", "pass", "out = None"]


def test_magics_survive_a_change_elsewhere() -> None:
    cell = parsed("%%time\nif a:\n    !ls  # now\nx = 1 # one\n")
    target = rewriting.statement_at(cell, 4)
    assert target is not None
    changed = rewriting.replace(cell.module, target, rewriting.statements("y = 2\nz = 3\n", cell))
    assert rewriting.write(cell, changed) == "%%time\nif a:\n    !ls  # now\ny = 2\nz = 3\n"


def test_changing_a_magic_line_is_refused() -> None:
    cell = parsed("%time train(model)\n")
    name = next(node for node in cell.positions if isinstance(node, cst.Name) and node.value == "model")
    changed = rewriting.replace(cell.module, name, cst.Name("other"))
    assert isinstance(rewriting.write(cell, changed), Refused)


def test_broken_source_is_refused_with_its_line() -> None:
    found = rewriting.read("x = 1\ny = = 2\n")
    assert isinstance(found, Refused)
    assert "line 2" in found.reason


def test_path_to_a_line_goes_from_the_outside_in() -> None:
    cell = parsed("def f():\n    for x in y:\n        g(x)\n")
    assert [type(node).__name__ for node in rewriting.path_to(cell, 3)] == ["FunctionDef", "For", "SimpleStatementLine"]
    assert rewriting.statement_at(cell, 9) is None


def test_replace_with_nothing_removes() -> None:
    cell = parsed("a = 1\nb = 2\n")
    target = rewriting.statement_at(cell, 1)
    assert target is not None
    assert rewriting.replace(cell.module, target, ()).code == "b = 2\n"


def test_fresh_name_is_in_no_cell() -> None:
    assert rewriting.fresh_name("micro", cells("x = 1")) == "micro"
    assert rewriting.fresh_name("micro", cells("micro = 1", "# micro_2")) == "micro_3"
    assert rewriting.fresh_name("micro", cells("x"), taken=["micro"]) == "micro_2"
    assert rewriting.fresh_name("for", cells("x")) == "for_2"


def change(source: Cells, number: int, line: int, text: str) -> object:
    cell = source.get(number)
    read = parsed(cell.source)
    old = rewriting.statement_at(read, line)
    assert old is not None
    return rewriting.edit(source, cell, read, rewriting.replace(read.module, old, rewriting.statements(text, read)))


def test_edit_of_an_earlier_cell_replays_its_function_alone() -> None:
    both = cells("n = 0\n\n# why\n@deco\ndef f():\n    %time\n    return 1\n\ndef g(): pass\n", "f()")
    made = change(both, 1, 7, "return 2\n")
    assert not isinstance(made, Refused)
    assert made.replay == "# why\n@deco\ndef f():\n    %time\n    return 2\n"  # type: ignore[attr-defined]
    assert made.after.startswith("n = 0\n")  # type: ignore[attr-defined]


def test_edit_of_the_failing_cell_replays_all_of_it() -> None:
    made = change(cells("x = 1", "!ls\ny = 2\n"), 2, 2, "y = 3\n")
    assert made.replay == made.after == "!ls\ny = 3\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", ["x = 1\n", "class A:\n    x = 1\n"])
def test_edit_that_a_replay_could_not_follow_is_refused(source: str) -> None:
    made = change(cells(source, "f()"), 1, source.count("\n"), "x = 2\n")
    assert isinstance(made, Refused)
    assert "live objects" in made.reason


EARLIER = "%matplotlib inline\nimport os\n\ndef f():\n    return 1\nx = f()\nclass A: pass\n"


def imported(source: Cells, line: int, text: str, live: list[str] | None = None) -> object:
    """The first cell with another statement on a line, and what that imports."""
    read = parsed(source.get(1).source)
    old = rewriting.statement_at(read, line)
    assert old is not None
    module = rewriting.replace(read.module, old, rewriting.statements(text, read))
    module = import_lines.insert_at_top(read, module, ["import math", "import os"])
    return rewriting.edit(source, source.get(1), read, module, live)


def test_what_an_earlier_cell_newly_imports_is_replayed_before_its_functions() -> None:
    made = imported(cells(EARLIER, "f()"), 5, "return math.pi\n")
    assert not isinstance(made, Refused)
    assert made.after == EARLIER.replace("os\n", "os\nimport math\n").replace("1", "math.pi")  # type: ignore[attr-defined]
    assert made.replay == "import math\n\n\ndef f():\n    return math.pi\n"  # type: ignore[attr-defined]


def test_a_comment_above_the_first_statement_of_an_earlier_cell_makes_it_no_changed_one() -> None:
    made = imported(cells("# Tensor type\nx = 2\n\ndef f():\n    return 1\n", "f()"), 5, "return math.pi\n")
    assert not isinstance(made, Refused)
    assert made.replay == "import math\nimport os\n\n\ndef f():\n    return math.pi\n"  # type: ignore[attr-defined]


def test_what_the_objects_are_told_is_replayed_for_changed_statements() -> None:
    both = cells(EARLIER, "f()")
    refused = imported(both, 6, "x = math.pi\n")
    assert isinstance(refused, Refused)
    assert "statements of cell 1" in refused.reason
    made = imported(both, 6, "x = math.pi\n", ["x = math.pi", "y = x"])
    assert made.replay == "import math\n\n\nx = math.pi\ny = x"  # type: ignore[attr-defined]
    refused = imported(both, 7, "class A: z = math.pi\n", ["A.z = math.pi"])
    assert isinstance(refused, Refused)
    assert "a class of cell 1" in refused.reason


def test_join_puts_the_failing_cell_last_and_passes_refusals_on() -> None:
    both = cells("def f():\n    a = 1\n", "y = 2\n")
    last, first = change(both, 2, 1, "y = 3\n"), change(both, 1, 2, "a = 2\n")
    patch = rewriting.join(both, [last, first])  # type: ignore[list-item]
    assert not isinstance(patch, Refused)
    assert [edit.cell for edit in patch.edits] == [1, 2]
    assert rewriting.join(both, [Refused("no")]) == Refused("no")
    assert isinstance(rewriting.join(both, []), Refused)
