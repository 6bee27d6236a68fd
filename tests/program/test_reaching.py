"""What had not been reached when a cell failed has done nothing yet; what may have run, counts as run."""

from __future__ import annotations

import pytest
import torch
from observed import facts

from oomdoctor.model.session import Cell, Cells, Standing
from oomdoctor.objects.frames import own_names

MAIN = """def main():
    for epoch in range(2):
        train()
    os.remove(a, "end")
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("source", "running", "may_have_run", "ahead"),
    [
        pytest.param(MAIN, (6, 3), (), (4,), id="behind a loop of a function that is called once"),
        pytest.param("for i in y:\n    train()\n    os.remove(a, f)\nos.remove(b, f)", (2,), (3,), (4,), id="loop"),
        pytest.param("def f():\n    train()\n    os.remove(a, f)\nfor i in y:\n    f()", (5, 2), (3,), (), id="often"),
        pytest.param("def f():\n    train()\n    os.remove(a, f)\nf()\nf()", (5, 2), (3,), (), id="called before"),
        pytest.param("def f():\n    train()\n    os.remove(a, f)\nf()\nf()", (4, 2), (), (3,), id="called again later"),
        pytest.param("def f():\n    train()\n    os.remove(a, f)\ng = f\nf()", (5, 2), (3,), (), id="another name"),
        pytest.param("def f():\n    os.remove(a, f)\ntrain()\nf()", (3,), (), (2,), id="function called later"),
        pytest.param("def f():\n    os.remove(a, f)\nf()\ntrain()\nf()", (4,), (2,), (), id="called earlier as well"),
        pytest.param("os.remove(a, f)\ntrain()", (2,), (1,), (), id="before"),
        pytest.param(
            "def f():\n    model.f()\n    train()\n    os.remove(a, f)\nf()",
            (5, 3),
            (),
            (4,),
            id="a method of its name",
        ),
        *(
            pytest.param(
                f"def g():\n    f = data()\n    {use}\ndef f():\n    train()\n    os.remove(a, f)\ng()\nf()",
                *((8, 5), () if is_data else (6,), (6,) if is_data else ()),
                id=f"a name of another function's own, {use}",
            )
            for use, is_data in (("return len(f)", True), ("f()", False), ("global f", False))
        ),
        pytest.param("[f() for f in (train, save)]\nos.remove(a, f)", (1,), (), (2,), id="comprehension"),
        pytest.param(
            "try:\n    train()\nexcept E:\n    os.remove(a, f)\nfinally:\n    os.remove(b, f)\nos.remove(c, f)",
            *((2,), (4, 6), (7,)),
            id="handlers",
        ),
        pytest.param("with out:\n    train()\nos.remove(a, f)", (2,), (3,), (), id="a context that may swallow it"),
        pytest.param("with torch.no_grad():\n    train()\nos.remove(a, f)", (2,), (), (3,), id="one that does not"),
        pytest.param("if x:\n    train()\nelse:\n    os.remove(a, f)", (2,), (), (4,), id="the other branch"),
        pytest.param("%time train()\nos.remove(a, f)", (1,), (2,), (), id="a magic that shows errors and goes on"),
        pytest.param(
            "try:\n    train()\nexcept E as e:\n    x = e\nos.remove(a, f)\nraise x", (2, 6), (5,), (), id="again"
        ),
    ],
)
def test_what_was_reached(
    source: str, running: tuple[int, ...], may_have_run: tuple[int, ...], ahead: tuple[int, ...]
) -> None:
    cells = Cells(history=(Cell(number=1, source=source),))
    found = facts(cells, {}, line=running[0], running=[(1, line) for line in running])
    assert [int(one.split(":")[0].removeprefix("line ")) for one in found.not_repeatable] == list(may_have_run)
    assert [int(one.split(":")[0].removeprefix("line ")) for one in found.not_reached] == list(ahead)


def test_without_a_line_all_may_have_run() -> None:
    cells = Cells(history=(Cell(number=1, source="train()\nos.remove(a, f)"),))
    assert facts(cells, {}).not_reached == ()
    assert len(facts(cells, {}).not_repeatable) == 1


@pytest.mark.parametrize(
    ("body", "ahead"),
    [
        pytest.param("loss = train()\nos.remove(a)", True, id="the statement that failed would have bound it"),
        pytest.param("train()\nloss = 1\nos.remove(a)", True, id="a later one would have"),
        pytest.param("with torch.no_grad():\n    loss = train()\nos.remove(a)", True, id="within a context"),
        pytest.param("train()\nif x:\n    loss = 1\nos.remove(a)", False, id="not in each round"),
        pytest.param("train()\nif x:\n    continue\nloss = 1\nos.remove(a)", False, id="a round may have left before"),
        pytest.param("loss = train()\nos.remove(a)\ndel loss", False, id="deleted"),
        pytest.param("try:\n    loss = train()\nexcept E:\n    pass\nos.remove(a)", False, id="swallowed"),
    ],
)
def test_no_round_has_ended_where_what_each_binds_is_not_bound(body: str, ahead: bool) -> None:
    lines = body.splitlines()
    at = next(at for at, line in enumerate(lines, 2) if "train()" in line)
    cells = Cells(history=(Cell(number=1, source="\n".join(["for i in y:", *(f"    {line}" for line in lines)])),))
    found = facts(cells, {"y": [], "x": 1, "i": 1, "a": ""}, line=at, running=[(1, at)])
    assert (found.not_repeatable == (), bool(found.not_reached)) == (ahead, ahead)
    again = facts(cells, {"y": [], "x": 1, "i": 1, "a": "", "loss": 2.0}, line=at, running=[(1, at)])
    assert again.not_reached == ()


def test_what_a_function_has_not_bound_tells_of_its_loops() -> None:
    fit = "def fit():\n    for x in y:\n        step()\n        n = 1\n        os.remove(a)\n"
    cells = Cells(history=(Cell(number=1, source=f"{fit}def step():\n    train()\nfit()"),))
    running = [(1, 8), (1, 3), (1, 7)]

    def stood(unbound: set[str]) -> dict[tuple[int, int], Standing]:
        return {(1, 3): Standing(frozenset(unbound), {}), (1, 7): Standing(frozenset(), {})}

    first = facts(cells, {}, line=8, running=running, standing=stood({"n"}))
    later = facts(cells, {}, line=8, running=running, standing=stood(set()))
    assert (first.not_repeatable, len(first.not_reached)) == ((), 1)
    assert (len(later.not_repeatable), later.not_reached) == (1, ())


def test_a_method_of_a_librarys_object_is_not_the_programs_own_of_that_name() -> None:
    source = """class Trainer:
    def train(self):
        self.model.train()
        loss = fit()
        os.remove(a)
def fit():
    failing()
trainer.train()"""
    cells, running = Cells(history=(Cell(number=1, source=source),)), [(1, 8), (1, 4), (1, 7)]

    def ahead(**own: frozenset[str]) -> int:
        stood = {
            (1, 4): Standing(frozenset({"loss"}), {f"self.{name}": names for name, names in own.items()}),
            (1, 7): Standing(frozenset(), {}),
        }
        return len(facts(cells, {}, line=8, running=running, standing=stood).not_reached)

    assert (ahead(model=own_names(torch.nn.Linear(1, 1))), ahead(model=frozenset({"train"})), ahead()) == (1, 0, 0)


def test_a_module_is_not_the_function_of_its_name() -> None:
    module = Cell(number=-1, source="def train():\n    failing()\n    os.remove(a)", file="/home/user/train.py")
    cells = Cells(history=(module, Cell(number=1, source="import train\ntrain.train()")))
    found = facts(cells, {}, line=2, running=[(1, 2), (-1, 2)])
    assert (found.not_repeatable, found.not_reached) == ((), ("train.py, line 3: `os.remove(a)`",))


@pytest.mark.parametrize(
    ("source", "was_passed_by"),
    [
        pytest.param("if x:\n    r = os.remove(a)\ntrain()", True, id="a branch that would have bound a name"),
        pytest.param("if x:\n    s = 1\nelse:\n    os.remove(a)\n    r = 1\ntrain()", True, id="the other one"),
        pytest.param("if x:\n    if z:\n        r = os.remove(a)\ntrain()", True, id="a branch of a branch"),
        pytest.param("for i in y:\n    r = os.remove(a)\ntrain()", True, id="a loop without a round"),
        pytest.param("if x:\n    os.remove(a)\ntrain()", False, id="it binds nothing"),
        pytest.param("for i in y:\n    os.remove(a)\n    if x:\n        break\n    r = 1\ntrain()", False, id="left"),
        pytest.param("try:\n    if x:\n        r = os.remove(a)\nexcept E:\n    pass\ntrain()", False, id="swallowed"),
        pytest.param("if x:\n    r = os.remove(a)\n    del r\ntrain()", False, id="deleted"),
    ],
)
def test_a_block_that_would_have_bound_a_name_was_passed_by(source: str, was_passed_by: bool) -> None:
    cells = Cells(history=(Cell(number=1, source=source),))
    line = len(source.splitlines())
    found = facts(cells, {}, line=line, running=[(1, line)])
    assert (len(found.not_repeatable), len(found.not_reached)) == ((0, 1) if was_passed_by else (1, 0))
