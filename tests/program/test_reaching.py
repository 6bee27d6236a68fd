"""What had not been reached when a cell failed has done nothing yet; what may have run, counts as run."""

from __future__ import annotations

import pytest
from observed import facts

from oomdoctor.model.session import Cell, Cells

MAIN = """def main():
    for epoch in range(2):
        train()
    torch.save(a, "end")
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("source", "running", "may_have_run", "ahead"),
    [
        pytest.param(MAIN, (6, 3), (), (4,), id="behind a loop of a function that is called once"),
        pytest.param("for i in y:\n    train()\n    torch.save(a, f)\ntorch.save(b, f)", (2,), (3,), (4,), id="loop"),
        pytest.param("def f():\n    train()\n    torch.save(a, f)\nfor i in y:\n    f()", (5, 2), (3,), (), id="often"),
        pytest.param("def f():\n    train()\n    torch.save(a, f)\nf()\nf()", (5, 2), (3,), (), id="called before"),
        pytest.param(
            "def f():\n    train()\n    torch.save(a, f)\nf()\nf()", (4, 2), (), (3,), id="called again later"
        ),
        pytest.param("def f():\n    train()\n    torch.save(a, f)\ng = f\nf()", (5, 2), (3,), (), id="another name"),
        pytest.param("def f():\n    torch.save(a, f)\ntrain()\nf()", (3,), (), (2,), id="function called later"),
        pytest.param("def f():\n    torch.save(a, f)\nf()\ntrain()\nf()", (4,), (2,), (), id="called earlier as well"),
        pytest.param("torch.save(a, f)\ntrain()", (2,), (1,), (), id="before"),
        pytest.param("[f() for f in (train, save)]\ntorch.save(a, f)", (1,), (), (2,), id="comprehension"),
        pytest.param(
            "try:\n    train()\nexcept E:\n    torch.save(a, f)\nfinally:\n    torch.save(b, f)\ntorch.save(c, f)",
            *((2,), (4, 6), (7,)),
            id="handlers",
        ),
        pytest.param("with out:\n    train()\ntorch.save(a, f)", (2,), (3,), (), id="a context that may swallow it"),
        pytest.param("with torch.no_grad():\n    train()\ntorch.save(a, f)", (2,), (), (3,), id="one that does not"),
        pytest.param("if x:\n    train()\nelse:\n    torch.save(a, f)", (2,), (), (4,), id="the other branch"),
        pytest.param("%time train()\ntorch.save(a, f)", (1,), (2,), (), id="a magic that shows errors and goes on"),
        pytest.param(
            "try:\n    train()\nexcept E as e:\n    x = e\ntorch.save(a, f)\nraise x", (2, 6), (5,), (), id="again"
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
    cells = Cells(history=(Cell(number=1, source="train()\ntorch.save(a, f)"),))
    assert facts(cells, {}).not_reached == ()
    assert len(facts(cells, {}).not_repeatable) == 1
