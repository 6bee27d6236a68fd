"""Random number generators of the user's own: objects that a forward may draw from besides those of the libraries.

Recomputing a forward puts back the state of torch's own generators alone, and a batch in parts draws more often. Those
of torch are no matter here, by whatever name: ``torch.manual_seed`` gives one of them to its caller. Looked at are the
attributes of modules, lists and dicts of them, the globals of the cells or files that define the modules, and what
their forward is closed over. Limits: generators that other objects hold.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

_OF_LIBRARIES: Final = ("torch", "torchvision", "torchaudio")


def marks(parts: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each generator that the modules may draw from, in words, with its state, for comparison.

    Args:
        parts: ``(path, module)``.
    """
    kinds = _kinds()
    seen = {id(one) for one in (torch.default_generator, *torch.cuda.default_generators)}
    for name, value in _within_reach(parts):
        if issubclass(type(value), kinds) and id(value) not in seen:
            seen.add(id(value))
            yield f"the random numbers of `{name}`", _state(value)


def _kinds() -> tuple[type, ...]:
    found: tuple[type, ...] = (torch.Generator, random.Random)
    numpy = sys.modules.get("numpy")
    return found if numpy is None else (*found, numpy.random.Generator, numpy.random.RandomState)


def _within_reach(parts: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    spaces: dict[int, dict[str, Any]] = {}
    for path, part in parts:
        for name, value in vars(part).items():
            if type(value) in (list, tuple, dict) and not name.startswith("_"):
                items = value.items() if type(value) is dict else enumerate(value)
                yield from ((f"{path}.{name}[{key!r}]", one) for key, one in items)
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


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        with _disable_current_modes():  # the state has values, which modes of a shadow run would not give
            return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        # One that asks the system has none, and gives other numbers whenever it is asked.
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    own = generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state(legacy=False)
    return pickle.dumps(own)
