"""Pipelines of a library with switches to save memory: a stand-in for those of diffusers, which is not installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor import fixes
from oomdoctor.fixes import get
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.unavailable import Refused

SLICES = get("library_slices")
SETUP = "from pipelines import Pipeline\npipe = Pipeline()\n"
RUN = "images = pipe(torch.zeros(8, 4))\n"


class Decoder(nn.Module):
    use_slicing = False

    def enable_slicing(self) -> None:
        self.use_slicing = True

    def enable_tiling(self) -> None: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([one.exp() for one in x.split(1)]) if self.use_slicing else x.exp()


class Pipeline:
    def __init__(self) -> None:
        self.vae = Decoder()

    def enable_attention_slicing(self) -> None: ...

    def enable_model_cpu_offload(self) -> None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.vae(x)


def told(*sources: str, held: int = 1 << 20, **namespace: Any) -> Any:
    cells = live.cells_of(*sources)
    holding = Holding(bytes=held, device="cuda:0", role=Role.ACTIVATION, path="x", shape=(8, 4), dtype="float32")
    code = facts(cells, namespace, [], loaded=(), detectors=fixes.detectors())
    return cells, replace(live.evidence(holdings=(holding,)), code=code)


def test_more_and_more_of_the_switches_are_proposed() -> None:
    _, evidence = told(SETUP, RUN, pipe=Pipeline())
    found = SLICES.propose(live.INCIDENT, evidence)
    assert not isinstance(found, Refused)
    mildest = "pipe.vae.enable_slicing"
    assert str(found[0].dose) == f"switches={mildest}"
    assert str(found[1].dose) == f"switches={mildest}, pipe.enable_attention_slicing"
    assert {one.effect for one in found} == {Effect.EQUIVALENT}


def test_the_lines_stand_where_the_pipeline_is_made_and_keep_the_results() -> None:
    cells, evidence = told(SETUP, RUN, pipe=Pipeline())
    made = SLICES.patch(cells, evidence, Dose.of(switches="pipe.vae.enable_slicing, pipe.enable_attention_slicing"))
    assert isinstance(made, Patch), made
    (edit,) = made.edits
    lines = "pipe.vae.enable_slicing()\npipe.enable_attention_slicing()\n"
    assert edit.after == f"{SETUP}{lines}"
    assert edit.replay == lines
    plain, changed = ({"pipe": Pipeline(), "torch": torch} for _ in range(2))
    exec(RUN, plain)
    exec(lines + RUN, changed)
    assert changed["pipe"].vae.use_slicing
    assert torch.equal(plain["images"], changed["images"])


@pytest.mark.parametrize(
    ("sources", "namespace", "why"),
    [
        ((SETUP, "images = other(1)"), {"pipe": Pipeline()}, "calls no pipeline"),
        ((SETUP, RUN), {"pipe": Decoder.forward}, "calls no pipeline"),
    ],
)
def test_nothing_is_proposed_without_such_a_pipeline(sources, namespace, why) -> None:
    _, evidence = told(*sources, **namespace)
    found = SLICES.propose(live.INCIDENT, evidence)
    assert isinstance(found, Refused)
    assert why in found.reason


def test_what_is_switched_on_already_is_refused() -> None:
    cells, evidence = told(SETUP + "pipe.vae.enable_slicing()\n", RUN, pipe=Pipeline())
    found = SLICES.patch(cells, evidence, Dose.of(switches="pipe.vae.enable_slicing"))
    assert isinstance(found, Refused)
    assert "is called already" in found.reason
    other = SLICES.patch(cells, evidence, Dose.of(switches="pipe.enable_magic"))
    assert isinstance(other, Refused)
