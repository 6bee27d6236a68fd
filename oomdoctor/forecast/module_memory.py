"""What the forward of each module keeps until the backward pass, from the ledger of a shadow run.

Every allocation is noted with the module whose forward was running. What is looked at is the moment at which forwards
hold most: when the last graph is whole. Source of what such figures are for: Chen et al., arXiv:1604.06174.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_iter

from oomdoctor.model.memory import ModuleMemory

if TYPE_CHECKING:
    from oomdoctor.forecast.tracker import Tracker

_is_wrapped: Final = torch._C._functorch.is_functorch_wrapped_tensor
_IN_TURN: Final = torch.nn.Sequential.forward


@dataclass(frozen=True, slots=True)
class _Place:
    """A module by its path below the model that was called, ``(type name, bytes of parameters)``."""

    model: tuple[str, int]
    path: str


class ModuleCalls:
    """Notes which module's forward is running, and what each gives out; in a process that is thrown away."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._places: Any = weakref.WeakKeyDictionary()
        self._about: dict[_Place, tuple[bool, bool]] = {}
        self._costs: dict[_Place, float] = defaultdict(float)
        self._within: list[_Place] = []

    def follow(self, models: Iterable[tuple[str, Any]]) -> None:
        """Have all modules tell of their calls.

        Args:
            models: ``(path, module)`` of those that names lead to: a part that is called by itself belongs to them.
        """
        for _, model in models:
            self._name(model)
        plain: Any = torch.nn.Module._call_impl

        def followed(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module not in self._places:
                self._name(module)
            place, before = self._places[module], self._tracker.meter.cost
            self._costs[place] += 0.0
            self._within.append(place)
            self._tracker.ledger.within = place
            try:
                out = plain(module, *args, **kwargs)
            finally:
                self._within.pop()
                self._tracker.ledger.within = self._within[-1] if self._within else None
            self._costs[place] += self._tracker.meter.cost - before
            for one in tree_iter(out):
                is_plain = isinstance(one, torch.Tensor) and not _is_wrapped(one)  # functorch's have no storage
                note = self._tracker.note_of(one) if is_plain else None
                if note is not None:
                    note.out_of = note.out_of | {place}
            return out

        cls: Any = torch.nn.Module
        cls._call_impl = followed

    def _name(self, model: Any) -> None:
        """Name the parts of a model that were not named as those of another one."""
        made = (one for one in model.parameters() if not is_lazy(one))
        size = sum(one.numel() * one.element_size() for one in made)
        for path, part in model.named_modules():
            if part not in self._places:
                self._places[part] = place = _Place((type(model).__name__, size), path)
                runs_in_turn = type(part).forward is _IN_TURN
                self._about[place] = (runs_in_turn, getattr(part, "inplace", None) is True)

    def told(self) -> tuple[ModuleMemory, ...]:
        """Return what each module keeps, in the order of the first calls."""
        ledger = self._tracker.ledger
        live: dict[int, int] = {}
        held = most = at = 0
        for index, event in enumerate(ledger.events):
            if event[0] == "alloc":
                live[event[1]] = event[2]
                held += event[2] if ledger.note(event[1]).within is not None else 0
            else:
                size = live.pop(event[1])
                held -= size if ledger.note(event[1]).within is not None else 0
            if held > most:
                most, at = held, index + 1
        own, output = Counter[_Place](), Counter[_Place]()
        for number, size in ledger.alive_after(at).items():
            note = ledger.note(number)
            if note.within is not None:
                own[note.within] += size
                output.update(dict.fromkeys(note.out_of, size))
        whole = self._tracker.meter.cost or 1.0
        return tuple(
            ModuleMemory(
                *(place.model, place.path, own[place], output[place], round(cost / whole, 6)), *self._about[place]
            )
            for place, cost in self._costs.items()
        )
