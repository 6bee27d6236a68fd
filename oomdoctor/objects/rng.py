"""The random number generators of python, numpy and torch, saved and set back. CUDA is never initialised by it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

from oomdoctor.objects import jittor
from oomdoctor.objects.alive import keep_apart
from oomdoctor.objects.kinds import module_of, mro_of, name_of
from oomdoctor.objects.mementos import Code, Memento

_SOURCES: Final = frozenset(
    {("numpy.random.bit_generator", "BitGenerator"), ("numpy.random.bit_generator", "SeedSequence")}
)
_OF_LIBRARIES: Final = ("torch", "torchvision", "torchaudio")
_DEFAULT_SEED: Final = 67280421310721
"""What torch's generators begin with. Source: ``default_rng_seed_val`` in c10/core/GeneratorImpl.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The state of every global generator that was loaded when it was taken."""

    python: Any
    numpy: Any
    torch_cpu: Any
    cuda: tuple[Any, ...]
    jittor: int | None = None

    @classmethod
    def take(cls) -> RandomState:
        """Save the global generators."""
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        return cls(
            python=random.getstate(),
            numpy=numpy.get_state() if numpy is not None else None,
            torch_cpu=_apart(torch.get_rng_state()) if torch is not None else None,
            cuda=tuple(torch.cuda.get_rng_state_all()) if torch is not None and torch.cuda.is_initialized() else (),
            jittor=None if (engine := jittor.engine()) is None else engine.value,
        )

    def has_moved(self) -> bool:
        """Return whether a global generator was drawn from since, or set."""
        return _told(self) != _told(RandomState.take())

    def restore_host(self) -> None:
        """Set those of Python and NumPy back."""
        random.setstate(self.python)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)

    def restore(self) -> None:
        """Set the global generators back."""
        self.restore_host()
        torch = sys.modules.get("torch")
        if torch is not None and self.torch_cpu is not None:
            torch.set_rng_state(self.torch_cpu)
        elif torch is not None:  # the cell itself imported it
            torch.default_generator.manual_seed(_DEFAULT_SEED)
        if torch is not None and self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        if self.jittor is not None and (engine := jittor.engine()) is not None:
            engine.value = self.jittor


def _told(states: RandomState) -> tuple[Any, ...]:
    """Return the states as what can be compared; a module that was only loaded meanwhile has drawn nothing."""
    numpy = None if states.numpy is None else (states.numpy[0], states.numpy[1].tobytes(), *states.numpy[2:])
    devices = tuple(state.numpy().tobytes() for state in states.cuda)
    torch = None if states.torch_cpu is None else states.torch_cpu.numpy().tobytes()
    return states.python, numpy, torch, devices, states.jittor


def _apart(state: Any) -> Any:
    keep_apart(state)
    return state


def generator_state(generator: Any) -> Any:
    """Return the state of one generator object, None where it draws from the system and has none."""
    if isinstance(generator, random.SystemRandom):
        return None
    for read in ("get_state", "getstate"):
        if hasattr(generator, read):
            state = getattr(generator, read)()
            return _apart(state.clone()) if hasattr(state, "clone") else state
    return getattr(generator, "bit_generator", generator).state if not _is_seed(generator) else None


def comparable(state: Any) -> Any:
    """Return what ``generator_state`` returned as what is equal only where the state is the same."""
    return state.numpy().tobytes() if hasattr(state, "numpy") else repr(state)


def is_random(cls: type) -> bool:
    """Return whether a class is of numpy's sources of random bits or of their seeds."""
    return any((module_of(base), name_of(base)) in _SOURCES for base in mro_of(cls))


def _spawned(generator: Any) -> int:
    """Return how many seeds were taken from that of a generator of numpy's; nothing sets that back."""
    seed = generator if _is_seed(generator) else None
    if seed is None:
        seed = getattr(getattr(generator, "bit_generator", generator), "seed_seq", None)
    count = getattr(seed, "n_children_spawned", 0)
    return count if type(count) is int else 0


def _is_seed(generator: Any) -> bool:
    return hasattr(generator, "n_children_spawned")


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.SystemRandom):
        return
    for write in ("set_state", "setstate"):
        if hasattr(generator, write):
            getattr(generator, write)(state)
            return
    if not _is_seed(generator):
        getattr(generator, "bit_generator", generator).state = state


def generator_marks(parts: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each generator of the user's own that a forward of these modules may draw from, with its state to compare.

    They are looked for in attributes, lists and dicts, the globals of what defines the modules, given by path, and what
    their forward is closed over. Limit: generators that other objects hold.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules["torch"]
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    kinds = (torch.Generator, random.Random, *of_numpy)
    seen = {id(generator) for generator in (torch.default_generator, *torch.cuda.default_generators)}
    for name, value in _within_reach(parts):
        if issubclass(type(value), kinds) and id(value) not in seen:
            seen.add(id(value))
            with sys.modules["torch.utils._python_dispatch"]._disable_current_modes():  # a dry run's give no values
                mark = comparable(generator_state(value))
            yield f"the random numbers of `{name}`", mark


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


class Stream(Memento):
    """The state of one generator object, and how many seeds were taken from its own."""

    def __init__(self, generator: Any, path: str) -> None:
        self._generator, self._state, self.path = generator, generator_state(generator), path
        self._spawned = _spawned(generator)

    def restore(self, memo: dict[int, Any]) -> None:
        """Set it back."""
        _set_state(self._generator, self._state)

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence if seeds were taken meanwhile."""
        if _spawned(self._generator) != self._spawned:
            yield "seeds were taken from the seed of a generator of numpy's, which cannot be undone"

    def changed(self) -> str | None:
        """Return whether it was drawn from, or set."""
        return (
            None if comparable(generator_state(self._generator)) == comparable(self._state) else "drawn random numbers"
        )
