"""How data reach the device: the loaders, what is loaded or moved there as a whole, and the arrays of the failing line.

Loaders are read from their dictionaries where a name leads to one, else from the calls that make them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, Final

from oomdoctor.objects.kinds import plain_dict
from oomdoctor.program.calls import Call, calls, calls_at, text_of
from oomdoctor.program.definitions import Program
from oomdoctor.program.ground import Ground

__all__ = [
    "batch_sizes",
    "numpy_call",
    "pin_memory",
    "prefetch",
    "sequence_varies",
    "workers",
]

_PADS: Final = re.compile(r"\bpad_sequence\(|\bpack_sequence\(|\bF\.pad\(|functional\.pad\(|\.pad\(")
_LAST: Final = re.compile(r"^.*\.")
_COLLATORS: Final = re.compile(r"^DataCollator(With|For)\w+$|^dynamic_padding")


def batch_sizes(loaders: Iterable[tuple[str, Any]]) -> tuple[tuple[str, int], ...]:
    """Return the batch size of each loader; one that takes batches as its data set gives them has none."""
    sizes = ((path, (plain_dict(loader) or {}).get("batch_size")) for path, loader in loaders)
    return tuple((path, size) for path, size in sizes if type(size) is int)


def workers(ground: Ground, loaders: Iterable[tuple[str, Any]]) -> int | None:
    """Return the largest number of worker processes of a loader, None where no loader is known."""
    return max(_numbers(ground, loaders, "num_workers", 0), default=None)


def prefetch(ground: Ground, loaders: Iterable[tuple[str, Any]]) -> int | None:
    """Return how many batches each worker of a loader fetches ahead, the largest; None without workers.

    Source: torch/utils/data/dataloader.py: ``prefetch_factor`` is 2 where there are workers and it is not given.
    """
    loaders = tuple(loaders)
    if not workers(ground, loaders):
        return None
    return max(_numbers(ground, loaders, "prefetch_factor", 2), default=None)


def pin_memory(ground: Ground, loaders: Iterable[tuple[str, Any]]) -> bool:
    """Whether batches pass through page-locked memory: a loader pins them, or a cell does."""
    return any(map(bool, _numbers(ground, loaders, "pin_memory", False))) or any(
        call.receiver and call.method == "pin_memory" for call in calls(ground.basis)
    )


def _numbers(ground: Ground, loaders: Iterable[tuple[str, Any]], name: str, default: int) -> Iterator[int]:
    held = [plain_dict(loader) or {} for _, loader in loaders]
    if held:
        yield from (value for own in held if type(value := own.get(name)) is int or type(value) is bool)
        return
    for call in _loader_calls(ground):
        given = call.literals.get(name, default)
        if isinstance(given, int):
            yield given


def _loader_calls(ground: Ground) -> Iterator[Call]:
    return (call for call in calls(ground.basis) if call.tail == "DataLoader")


def sequence_varies(program: Program, ground: Ground, loaders: Iterable[tuple[str, Any]]) -> bool:
    """Whether batches are padded to the longest of their samples, so that their size is not that of the one before."""
    held = [(plain_dict(loader) or {}).get("collate_fn") for _, loader in loaders]
    given = [call.keywords["collate_fn"] for call in _loader_calls(ground) if "collate_fn" in call.keywords]
    if any(text.startswith("lambda") and _PADS.search(text) for text in given):
        return True
    names = {*map(_name_of, held), *(_LAST.sub("", text.partition("(")[0]) for text in given)}
    if any(map(_COLLATORS.match, names)):
        return True
    functions = map(program.function, names - {""})
    if any(found is not None and _PADS.search(text_of(found)) for found in functions):
        return True
    return any(map(_pads_to_longest, calls(ground.basis)))


def _name_of(collate: Any) -> str:
    """Return the name of a function, or of the class of another callable."""
    return collate.__code__.co_name if type(collate) is FunctionType else type(collate).__name__


def _pads_to_longest(call: Call) -> bool:
    """Whether it is a tokenizer's call with ``padding=True``, which pads to the longest of what it is given."""
    if "token" not in call.name.lower() and not call.name.endswith("processor"):
        return False
    return call.literals.get("padding") in (True, "longest")


def numpy_call(program: Program, line: int | None) -> str | None:
    """Return the call of NumPy in the line of the failing cell that was running."""
    running = calls_at(program, line) if line is not None else ()
    return next((call.text for call in running if call.name.startswith(("np.", "numpy."))), None)
