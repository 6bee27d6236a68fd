"""Functions that are called by another name than that of their definition are part of what the cell runs."""

from __future__ import annotations

from typing import Any

import pytest

from oomdoctor.model.session import Cell, Cells
from oomdoctor.objects.named import other_names
from oomdoctor.program.definitions import read
from oomdoctor.program.regions import regions
from oomdoctor.program.training_loops import training_loops

STEP = """\
from functools import partial

def train_step(model, opt, x):
    opt.zero_grad()
    loss = model(x).mean()
    loss.backward()
    opt.step()
"""
LOOP = "for x in data:\n    {call}\n"
STORED = {
    "partial": ("step = partial(train_step, model, opt)", LOOP.format(call="step(x)")),
    "attribute": (
        (
            "class Trainer:\n"
            "    def __init__(self, step): self.step = step\n"
            "    def fit(self, data):\n"
            "        for x in data:\n"
            "            self.step(model, opt, x)\n"
            "trainer = Trainer(train_step)"
        ),
        "trainer.fit(data)",
    ),
    "closure": (
        (
            "def made():\n"
            "    def inner(x):\n"
            "        model(x).mean().backward()\n"
            "        opt.step()\n"
            "    return inner\n"
            "step = made()"
        ),
        LOOP.format(call="step(x)"),
    ),
    "method": (
        (
            "class Learner:\n"
            "    def one_batch(self, x):\n"
            "        model(x).mean().backward()\n"
            "        opt.step()\n"
            "step = Learner().one_batch"
        ),
        LOOP.format(call="step(x)"),
    ),
}


@pytest.mark.parametrize("stored", STORED)
def test_a_stored_step_is_found(stored: str) -> None:
    texts = (STEP, *STORED[stored])
    namespace: dict[str, Any] = {"__name__": "__main__", "model": None, "opt": None}
    for text in texts[:-1]:
        exec(text, namespace)
    history = tuple(Cell(number=number, source=text) for number, text in enumerate(texts, 1))
    program = read(Cells(history=history, other_names=other_names(namespace)))
    assert len(regions(program)) == 1
    (loop,) = (one for one in training_loops(program, {}) if one.in_failing_run)
    assert loop.optimizers == ("opt",)
    assert not regions(read(Cells(history=history)))
