"""What of a notebook the failing cell rests on, and what belongs to other experiments in it."""

from __future__ import annotations

import ast
import textwrap

import pytest
from observed import facts

from oomdoctor.model.code import CodeFacts
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program.definitions import read
from oomdoctor.program.dependencies import ground


def cells(*sources: str) -> Cells:
    history = (Cell(number=n, source=textwrap.dedent(text).strip()) for n, text in enumerate(sources, 1))
    return Cells(history=tuple(history))


def basis(*sources: str) -> str:
    """All that the last cell rests on."""
    scopes = ground(read(cells(*sources))).basis
    return "\n".join(ast.unparse(node) for scope in scopes for node in scope.body)


def of(*sources: str) -> CodeFacts:
    return facts(cells(*sources), {}, loaded=())


ATTENTION = """
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.softmax(q @ k.mT, -1) @ v
"""
HOOK = "def keep(m, i, o):\n    seen.append(o)"


@pytest.mark.parametrize(
    ("earlier", "rests"),
    [
        ("model = Net(width)", True),
        ("model.half()", True),
        ("model.fc.register_forward_hook(f)", True),
        ("freeze(model)", True),
        ("model.fc = nn.Linear(2, 2)", True),
        ("opts['a'] = model", True),
        ("if big:\n    model = Net(9)", True),
        ("other = Net()", False),
        ("other.half()", False),
        ("import torch", False),
        ("print('model')", False),
    ],
)
def test_what_made_or_changed_a_name_that_is_used(earlier: str, rests: bool) -> None:
    assert (earlier in basis(earlier, "train(model, opts)")) == rests


def test_names_are_followed_backwards_and_a_new_binding_ends_the_search() -> None:
    found = basis("width = 9", "model = Old()", "old_depth = 3\nmodel.half()", "model = Net(width)", "model(x)")
    assert "width = 9" in found
    assert "Old" not in found
    assert "half" not in found
    assert "old_depth" not in found


def test_a_binding_that_uses_the_name_itself_does_not_end_it() -> None:
    found = basis("model = Net()", "model = nn.DataParallel(model)", "model(x)")
    assert "Net()" in found
    assert "DataParallel" in found


def test_functions_and_classes_are_reached_by_the_names_that_lead_to_them() -> None:
    source = """
        class Base(nn.Module):
            def norm(self, x):
                return x / 2
        class Net(Base):
            def forward(self, x):
                return helper(self.norm(x))
        def helper(x):
            return deeper(x)
        def deeper(x):
            return x + 41
        def stranger(x):
            return x + 42
    """
    found = basis(source, "model = Net()", "model(x)")
    assert all(text in found for text in ("x / 2", "helper(self.norm(x))", "deeper(x)", "x + 41"))
    assert "42" not in found.replace(source, "")


def test_the_reach_has_methods_and_no_function_that_only_prepared() -> None:
    net = "class Net:\n    def forward(self, x):\n        return x + 1\ndef make():\n    return Net()"
    found = ground(read(cells(net, "model = make()", "model(x)")))
    assert {scope.name for scope in found.reach if scope.function} == {"Net.forward"}
    assert {scope.name for scope in found.basis if scope.function} == {"Net.forward", "make"}


@pytest.mark.parametrize(
    ("cell", "fact"),
    [
        (ATTENTION, "sites"),
        (HOOK + "\nold.register_forward_hook(keep)", "hooks"),
        ("images = images.to(device)\nfor i in idx:\n    old(images[i])", "sites"),
        ("old = torch.compile(old)", "compiles"),
        ("old = nn.DataParallel(old)", "data_parallel"),
        ("old = FSDP(old)", "distributed"),
        ("args = TrainingArguments('out', fp16=True)", "autocast"),
        ("old_loader = DataLoader(ds, num_workers=8, pin_memory=True)", "num_workers"),
        ("def step(z):\n    old(z).backward(retain_graph=True)\nstep(z)", "sites"),
        (ATTENTION + "    old = Attention()\n    for x in loader:\n        out = old(x)", "sites"),
    ],
)
def test_other_experiments_of_the_notebook_are_left_out(cell: str, fact: str) -> None:
    own = ("model = nn.Linear(2, 2)", "out = model(x)\nout.backward()")
    assert getattr(of(cell, *own), fact) == getattr(of("", *own), fact)


def test_a_notebook_whose_cells_do_not_parse_rests_on_nothing() -> None:
    assert basis("def (", "model(") == ""
