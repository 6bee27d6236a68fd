"""A pipeline whose decoder makes images in tiles: another image, so that it is never done unasked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import live
from observed import facts
from torch import nn

from oomdoctor import fixes
from oomdoctor.fixes import get
from oomdoctor.model.fix import Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.unavailable import Refused

FIX = get("library_tiles")
SETUP, RUN = "pipe = Pipeline()\n", "image = pipe(1)\n"


class Decoder(nn.Module):
    def enable_tiling(self) -> None: ...


class Pipeline:
    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def __call__(self, x: Any) -> Any: ...


def told(pipe: Pipeline) -> Any:
    cells = live.cells_of(SETUP, RUN)
    code = facts(cells, {"pipe": pipe}, [], loaded=(), detectors=fixes.detectors())
    held = Holding(bytes=1 << 20, device="cuda:0", role=Role.ACTIVATION, path="x", shape=(8, 4), dtype="float32")
    return cells, replace(live.evidence(holdings=(held,)), code=code)


def test_tiles_are_proposed_as_another_result() -> None:
    cells, evidence = told(Pipeline(Decoder()))
    found = FIX.propose(live.INCIDENT, evidence)
    assert not isinstance(found, Refused)
    (tiles,) = found
    assert (tiles.effect, tiles.caveat) == (Effect.CHANGES_RESULT, "tiles are blended at their seams")
    made = FIX.patch(cells, evidence, tiles.dose)
    assert isinstance(made, Patch)
    assert made.edits[0].after == f"{SETUP}pipe.vae.enable_tiling()\n"
    assert isinstance(FIX.propose(live.INCIDENT, told(Pipeline(nn.Linear(1, 1)))[1]), Refused)
