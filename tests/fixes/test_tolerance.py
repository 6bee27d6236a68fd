"""What "equal up to rounding" holds for: losses and gradients of a step, and not each parameter that Adam has moved."""

from __future__ import annotations

import textwrap
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor.fixes import get
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Patch

LR, STEPS = 1e-3, 5
PROGRAM = """
    import torch
    from torch import nn
    import torch.nn.functional as F

    for x, y in batches:
        optimizer.zero_grad()
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        first = first or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
"""
FIXES = {
    "chunked_forward": (get("chunked_forward"), Dose.of(chunks=4)),
    "micro_batch": (get("micro_batch"), Dose.of(parts=4)),
}


class Attending(nn.Module):
    """A key's bias has no influence on a softmax over keys: its gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (nn.Linear(16, width) for width in (16, 16, 16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1)
        return self.head(x + weights @ self.v(x)).mean(1)


def program(optimizer: str, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Attending().to(dtype)
    batches = [(torch.randn(32, 6, 16).to(dtype), torch.randn(32, 1).to(dtype)) for _ in range(STEPS)]
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=LR)
    return {"model": model, "batches": batches, "optimizer": stepper, "losses": [], "first": None}


def run(fix: str | None, optimizer: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[float], list[Any]]:
    namespace, source = program(optimizer, dtype), textwrap.dedent(PROGRAM)
    if fix is not None:
        module, dose = FIXES[fix]
        cells, base = live.cells_of(source), live.evidence()
        read = facts(cells, namespace, [("model", namespace["model"])], [("optimizer", namespace["optimizer"])])
        found = Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=read)
        made = module.patch(cells, found, dose)
        assert isinstance(made, Patch), made
        source = made.edits[-1].after
    exec(compile(source, "<cell>", "exec"), namespace)
    return live.values(namespace["model"]), namespace["losses"], namespace["first"]


def furthest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference as a share of the largest value of all."""
    largest = max(one.abs().max().item() for one in expected)
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True)) / largest


@pytest.mark.parametrize("fix", FIXES)
def test_losses_and_gradients_of_a_step_are_within_the_tolerance(fix: str) -> None:
    plain, changed = run(None, "Adam", torch.float32), run(fix, "Adam", torch.float32)
    tolerance = FIXES[fix][0].tolerance
    assert furthest(changed[2], plain[2]) <= tolerance
    assert changed[1][0] == pytest.approx(plain[1][0], rel=tolerance)


@pytest.mark.parametrize("fix", FIXES)
def test_what_sgd_has_moved_is_within_the_tolerance(fix: str) -> None:
    plain, changed = run(None, "SGD", torch.float32), run(fix, "SGD", torch.float32)
    assert furthest([*changed[0].values()], [*plain[0].values()]) <= FIXES[fix][0].tolerance
    assert changed[1] == pytest.approx(plain[1], rel=FIXES[fix][0].tolerance)


@pytest.mark.parametrize("fix", FIXES)
def test_adam_moves_by_its_learning_rate_what_has_no_gradient_but_rounding(fix: str) -> None:
    plain, changed = run(None, "Adam", torch.float32), run(fix, "Adam", torch.float32)
    apart = {name: (changed[0][name] - value).abs().max().item() for name, value in plain[0].items()}
    assert FIXES[fix][0].tolerance < apart.pop("k.bias") <= 2 * LR * STEPS
    assert max(apart.values()) <= FIXES[fix][0].tolerance * max(one.abs().max().item() for one in plain[0].values())
    plain, changed = run(None, "Adam", torch.float64), run(fix, "Adam", torch.float64)
    assert furthest([*changed[0].values()], [*plain[0].values()]) <= 1e-9
