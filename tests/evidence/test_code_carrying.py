"""A recurrent state carried through a loop that does not train: where nothing differentiates what is made of it."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from observed import facts
from torch import nn

from oomdoctor.model.session import Cell, Cells


def read(*sources: str) -> Any:
    history = tuple(Cell(number=n, source=textwrap.dedent(s).strip("\n")) for n, s in enumerate(sources, 1))
    modules = [("rnn", nn.GRU(4, 4)), ("head", nn.Linear(4, 4))]
    return facts(Cells(history=history), dict(modules), modules, loaded=()).first("detach_state")


EVALUATION = """
    hidden = None
    for x, y in chunks:
        out, hidden = rnn(x, hidden)
        losses.append(F.mse_loss(head(out), y).item())
"""
FUNCTION = """
    def evaluate(rnn, chunks):
        total, hidden = 0.0, None
        for x, y in chunks:
            out, hidden = rnn(x, hidden)
            total += F.mse_loss(head(out), y).item()
        return total
"""
TRAINING = """
    hidden = None
    for x, y in chunks:
        out, hidden = rnn(x, hidden)
        loss = F.mse_loss(head(out), y)
        loss.backward(retain_graph=True)
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("sources", "place"),
    [
        ((EVALUATION,), "In[1] line 3"),
        ((FUNCTION, "print(evaluate(rnn, chunks))"), "In[1] line 4"),
        (("for epoch in range(2):\n" + textwrap.indent(textwrap.dedent(EVALUATION), "    "),), "In[1] line 5"),
        (("with timer():\n" + textwrap.indent(textwrap.dedent(EVALUATION), "    "),), "In[1] line 5"),
    ],
)
def test_a_state_of_an_evaluation_is_carried_and_differentiated_by_nothing(sources, place) -> None:
    found = read(*sources)
    assert (str(found), found.kind) == (f"{place}: out, hidden = rnn(x, hidden)", "idle")
    assert found.names == ("hidden",)


@pytest.mark.parametrize(
    "source",
    [
        EVALUATION.replace("        losses", "        hidden = hidden.detach()\n        losses"),
        EVALUATION.replace("        out", "        hidden = None\n        out"),
        EVALUATION + "    hidden.sum().backward()\n",
        "    with torch.no_grad():\n" + textwrap.indent(EVALUATION, "    "),
        "    @torch.no_grad()" + FUNCTION + "    evaluate(rnn, chunks)\n",
        FUNCTION.replace(".item()", "") + "    evaluate(rnn, chunks).backward()\n",
    ],
)
def test_a_state_that_is_cut_or_differentiated_or_without_graph_is_none(source) -> None:
    found = read(source)
    assert found is None


def test_a_loop_that_trains_comes_first() -> None:
    found = read(FUNCTION, TRAINING + "    evaluate(rnn, chunks)\n")
    assert (str(found), found.kind) == ("In[2] line 3: out, hidden = rnn(x, hidden)", "carried")
