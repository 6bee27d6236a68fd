"""Random numbers in a shadow: few integers are drawn for real, and whatever is drawn moves the generator.

Integers choose where batches begin and in which order samples come, so the program asks for their values; they are
those that the real run would draw first. That the generator moves is how a change of the cell finds out that a forward
draws. Limits: a large draw moves the generator by one number, not by as many as it has; devices that are emulated have
generators of their own, which stand still.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable

_aten = torch.ops.aten
_MOST_DRAWN: Final = 1 << 17


def _integers(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw for real where they are few; the fake mode keeps the values of what is lifted into it."""
    sizes = [value for value in args if isinstance(value, (list, tuple))] or [args[:1]]
    if prod(sizes[-1]) > _MOST_DRAWN or torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return func(*args, **kwargs)
    with _disable_current_modes():
        drawn = func(*args, **kwargs)
    return _aten.lift_fresh.default(drawn)


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """Make integers and masks for real where they are few: what is written to them is followed then."""
    dtype = kwargs.get("dtype") or (torch.float32 if len(args) < 2 else torch.tensor(args[1]).dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return func(*args, **kwargs)
    return _integers(func, [args[0], *args[1:]], kwargs)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation draws random numbers: none where nothing is dropped, as attention may be told."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p" or (argument.name == "p" and "dropout" in func.__name__):
            given = args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
            return given is None or float(given) > 0
    return True


def move_generator(generator: Any) -> None:
    """Draw one number."""
    with _disable_current_modes():
        if generator is None or generator.device.type == "cpu":
            torch.empty(()).uniform_(generator=generator)


DRAWS: Final[dict[Any, Callable[[Any, Any, Any], Any]]] = {
    getattr(packet, name): _integers
    for packet, names in (
        (_aten.randint, ("default", "generator", "low", "low_generator")),
        (_aten.randperm, ("default", "generator")),
        (_aten.arange, ("default", "start", "start_step")),
    )
    for name in names
} | {getattr(_aten, name).default: _made for name in ("zeros", "ones", "full")}
"""Operations whose integers a program is likely to ask for, and what makes them: ``(func, args, kwargs)``."""
