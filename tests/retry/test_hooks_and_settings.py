"""Hooks and settings that a changed cell leaves behind are taken back with the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from oomdoctor.retry import Transaction

SETUP: Final = """\
import os
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weight = model[0].weight
kept = weight.register_hook(lambda gradient: None)
"""

CELLS: Final[dict[str, tuple[str, Callable[[dict[str, Any]], Any]]]] = {
    "a step in the backward pass": (
        "for p in model.parameters(): p.register_post_accumulate_grad_hook(lambda p: None)",
        lambda names: [len(p._post_accumulate_grad_hooks or ()) for p in names["model"].parameters()],
    ),
    "hooks of gradients": (
        "for p in model.parameters(): p.register_hook(lambda gradient: None)",
        lambda names: [len(p._backward_hooks or ()) for p in names["model"].parameters()],
    ),
    "hooks of modules": (
        "model.register_forward_hook(print); model[0].register_full_backward_hook(print)",
        lambda names: (len(names["model"]._forward_hooks), len(names["model"][0]._backward_hooks)),
    ),
    "hooks of an optimizer": (
        "optimizer.register_step_pre_hook(print)",
        lambda names: len(names["optimizer"]._optimizer_step_pre_hooks),
    ),
    "a forward of its own": ("model[0].forward = print", lambda names: "forward" in vars(names["model"][0])),
    "the environment": (
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'",
        lambda names: os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    ),
    "the sharing strategy": (
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        lambda names: torch.multiprocessing.get_sharing_strategy(),
    ),
    "the matmul precision": (
        "torch.set_float32_matmul_precision('medium')",
        lambda names: torch.get_float32_matmul_precision(),
    ),
    "cudnn": ("torch.backends.cudnn.benchmark = True", lambda names: torch.backends.cudnn.benchmark),
    "attention": ("torch.backends.cuda.enable_math_sdp(False)", lambda names: torch.backends.cuda.math_sdp_enabled()),
    "threads": ("torch.set_num_threads(torch.get_num_threads() + 1)", lambda names: torch.get_num_threads()),
}


def begun(cell: str) -> tuple[dict[str, Any], Transaction]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, names)
    return names, Transaction(names, cell, lambda: 1 << 20)


@pytest.mark.parametrize("what", CELLS)
def test_what_a_cell_left_behind_is_taken_back(what: str) -> None:
    cell, look = CELLS[what]
    names, transaction = begun(cell)
    before = look(names)
    exec(cell, names)
    assert look(names) != before
    assert transaction.settle() == ()
    assert look(names) == before


def test_a_hook_of_before_stays_and_one_that_the_cell_removed_is_told() -> None:
    names, transaction = begun("model, weight, kept")
    names["weight"].register_hook(print)
    assert transaction.losses() == ()
    transaction.restore()
    assert list(names["weight"]._backward_hooks) == [names["kept"].id]
    names["kept"].remove()
    assert transaction.losses() == ("a hook of `model[0].weight` was removed by the cell, and cannot be put back",)


def test_a_setting_that_torch_will_not_tell_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    _, transaction = begun("")
    assert transaction.fault == ""
    assert transaction.settle() == ()
