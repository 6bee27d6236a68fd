"""Two patches as one: what one writes must not touch what the other does."""

import pytest

from oomdoctor.forecast.pairs import joined, joined_patches
from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Edit, Patch
from oomdoctor.model.session import Attempt

CELL = """\
import torch
model = build()
for x, y in loader:
    loss = criterion(model(x), y)
    losses.append(loss)
    loss.backward()
"""


def patch(after, *, cell=2, before=CELL, replay=None):
    return Patch(edits=(Edit(cell=cell, before=before, after=after, replay=after if replay is None else replay),))


APART = (CELL.replace("build()", "build(small=True)"), CELL.replace("append(loss)", "append(loss.detach())"))


def test_changes_apart_from_each_other_are_both_made():
    (edit,) = joined_patches(patch(APART[0]), patch(APART[1])).edits
    assert edit.after == CELL.replace("build()", "build(small=True)").replace("append(loss)", "append(loss.detach())")
    assert (edit.before, edit.replay) == (CELL, edit.after)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("build(small=True)", "build(other=True)"),
        ("build()\nmodel.checkpoint()", "build()\nmodel.half()"),
        ("build()\nfor part in ():\n    pass", "build(small=True)"),
    ],
)
def test_changes_of_the_same_place_are_refused(first, second):
    made = joined_patches(patch(CELL.replace("build()", first)), patch(CELL.replace("build()", second)))
    assert made == Refused("both change the same place of the source")


def test_a_line_and_the_one_after_it_are_the_same_place():
    made = joined_patches(
        patch(CELL.replace("criterion(model(x), y)", "criterion(model(x[:1]), y[:1])")), patch(APART[1])
    )
    assert isinstance(made, Refused)


def test_imports_at_the_same_place_are_both_made_and_each_once():
    head, rest = CELL.split("\n", 1)
    first = f"{head}\nfrom torch.utils.checkpoint import checkpoint\nimport math\n{rest}".replace("build()", "build(1)")
    second = f"{head}\nimport math\nfrom torch import amp\n{rest}".replace("append(loss)", "append(loss.item())")
    (edit,) = joined_patches(patch(first.replace("build(1)", "build()")), patch(second)).edits
    lines = edit.after.splitlines()
    assert sorted(lines[1:4]) == [
        "from torch import amp",
        "from torch.utils.checkpoint import checkpoint",
        "import math",
    ]
    assert lines.count("import math") == 1
    assert "losses.append(loss.item())" in edit.after


def test_changes_of_several_cells_are_all_made_the_failing_one_last():
    other = patch("y = 2\n", cell=1, before="y = 1\n", replay="y = 2\n")
    made = joined_patches(patch(APART[0]), other)
    assert [edit.cell for edit in made.edits] == [1, 2]


def test_an_earlier_cell_of_which_each_redefines_a_part_is_refused():
    first = patch(APART[0], cell=1, replay="def f(): ...")
    assert joined_patches(first, patch(APART[1], cell=1, replay="def g(): ...")) == Refused("both change In[1]")


def test_the_way_to_run_both_has_the_guards_of_both_and_what_comes_before():
    guards = (lambda: None, lambda: None)
    earlier = Edit(cell=1, before="y = 1\n", after="y = 2\n", replay="y = 2\n")
    first = Patch(edits=(earlier, *patch(APART[0]).edits))
    ways = [Attempt(source="-", live=(guard,)) for guard in guards]
    made, attempt = joined(CELL, 2, (first, ways[0]), (patch(APART[1]), ways[1]))
    assert attempt.source == made.edits[-1].after
    assert attempt.replays == ("y = 2\n",)
    assert attempt.live == guards


def test_one_of_them_may_change_the_live_objects():
    def change():
        return None

    made, attempt = joined(
        *(CELL, 2, (Refused("no source"), Attempt(source=CELL, live=(change,)))),
        (patch(APART[0]), Attempt(source=APART[0])),
    )
    assert made == Refused("no source")
    assert (attempt.source, attempt.live) == (APART[0], (change,))


def test_two_changes_of_live_objects_are_refused():
    live = (Refused("no source"), Attempt(source=CELL))
    made, attempt = joined(CELL, 2, live, live)
    assert isinstance(made, Refused)
    assert isinstance(attempt, Refused)
