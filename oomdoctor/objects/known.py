"""The user's objects of one moment, as detectors of practices are given them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oomdoctor.model.code import LossFacts, ModelFacts, TrainingLoop


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objects:
    """What the names of the namespace lead to. Types and dictionaries of its values are looked at, nothing is called.

    Attributes:
        modules, optimizers, loaders: ``(path, object)`` of each that was found.
        models, losses: what the modules are like.
        kinds: ``model``, ``loss``, ``optimizer`` or ``scheduler`` by the path that leads to one.
        loops: the loops of the cells that train.
        line: line of the failing cell that was running, None where it is not known.
    """

    namespace: Mapping[str, Any]
    modules: tuple[tuple[str, Any], ...] = ()
    optimizers: tuple[tuple[str, Any], ...] = ()
    loaders: tuple[tuple[str, Any], ...] = ()
    models: tuple[ModelFacts, ...] = ()
    losses: tuple[LossFacts, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    loops: tuple[TrainingLoop, ...] = ()
    line: int | None = None
