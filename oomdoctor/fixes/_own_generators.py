"""Random number generators of the user's own that a forward may draw from, with their states.

Recomputing puts back the state of torch's own generators alone. Others are looked for in the attributes of modules,
lists and dicts of them, the globals of what defines the modules, and what their forward is closed over. Limit:
generators that other objects hold.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.objects.rng import comparable, generator_state

_OF_LIBRARIES: Final = ("torch", "torchvision", "torchaudio")


def generator_marks(parts: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each generator that these modules, given by path, may draw from, in words, with its state to compare."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    kinds = (torch.Generator, random.Random, *of_numpy)
    seen = {id(generator) for generator in (torch.default_generator, *torch.cuda.default_generators)}
    for name, value in _within_reach(parts):
        if issubclass(type(value), kinds) and id(value) not in seen:
            seen.add(id(value))
            yield f"the random numbers of `{name}`", _mark(value)


def _within_reach(parts: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    spaces: dict[int, dict[str, Any]] = {}
    for path, part in parts:
        for name, value in vars(part).items():
            if type(value) in (list, tuple, dict) and not name.startswith("_"):
                items = value.items() if type(value) is dict else enumerate(value)
                yield from ((f"{path}.{name}[{key!r}]", item) for key, item in items)
            else:
                yield f"{path}.{name}", value
        if type(part).__module__.partition(".")[0] in _OF_LIBRARIES:
            continue
        forward = getattr(type(part).forward, "__wrapped__", type(part).forward)
        if type(forward) is not FunctionType:
            continue
        spaces[id(forward.__globals__)] = forward.__globals__
        for name, cell in zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # nothing is bound there as yet
                continue
    for space in spaces.values():
        yield from sorted(space.items(), key=lambda item: item[0].startswith("_"))


def _mark(generator: Any) -> Any:
    with _disable_current_modes():  # the state has values, which modes of a dry run would not give
        return comparable(generator_state(generator))
