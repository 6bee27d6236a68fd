"""Reads what a program has left: every plain value that its objects lead to, each with its path."""

import array
import collections
import datetime
import decimal
import fractions
import functools
import io
import itertools
import pathlib
import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

UNREAD = torch.utils.hooks.RemovableHandle | types.BuiltinFunctionType
HOW = ("foreach", "fused")  # how an optimizer steps through its parameters is not what it leaves
PLAIN = bool | int | float | complex | str | bytes | np.ndarray | np.generic
STATES: dict[Any, Any] = {
    set | frozenset: lambda value: sorted(map(repr, value)),
    range | slice | decimal.Decimal | fractions.Fraction | datetime.timedelta: repr,
    pd.DataFrame | pd.Series: lambda value: (value.to_dict(), str(value.dtypes)),
    torch.optim.Optimizer | LRScheduler: lambda value: value.state_dict(),
    torch.Generator: lambda value: value.get_state(),
    random.Random: lambda value: value.getstate(),
    np.random.Generator: lambda value: value.bit_generator.state,
    types.MethodType: lambda value: value.__self__,
    functools.partial: lambda value: (value.args, value.keywords),
    types.CellType: lambda value: value.cell_contents,
    tqdm: lambda value: (value.n, value.total),
    collections.deque: list,
    torch.dtype | torch.device: str,
    bytearray | array.array: list,
    io.StringIO: lambda value: value.getvalue(),
    io.TextIOWrapper: lambda value: None if value.closed else value.flush(),
}


def leaves(value: Any, path: str, inside: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Give each plain value that an object leads to, with its path: arrays, numbers, texts and lengths."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense()
        yield path, (dense.float() if dense.dtype == torch.bfloat16 else dense).clone().numpy()
        yield f"{path}.dtype", str(value.dtype)
        if isinstance(value, torch.nn.Parameter):
            yield f"{path}.requires_grad", value.requires_grad
        if value.is_leaf and (value.requires_grad or value.grad is not None):
            yield from leaves(value.grad, f"{path}.grad")
    elif value is None or isinstance(value, PLAIN):
        yield path, value
    elif id(value) not in inside and len(inside) < 40 and not isinstance(value, UNREAD):
        yield f"{path}.type", type(value).__name__
        for name, child in children(value):
            yield from leaves(child, f"{path}{name}", (*inside, id(value)))


def children(value: Any) -> Iterable[tuple[str, Any]]:
    """Give what an object holds, each with the rest of its path."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(".len", len(value)), *((f"[{key!r}]", child) for key, child in items if key not in HOW)]
    if isinstance(value, types.ModuleType):  # the user's own alone, which lie in the folder of the program
        beside = pathlib.Path(getattr(value, "__file__", None) or "/none").parent == pathlib.Path.cwd()
        return [(f".{n}", v) for n, v in vars(value).items() if beside and not n.startswith("__")]
    if isinstance(value, types.FunctionType | type) and value.__module__ != "__main__":
        return []
    if isinstance(value, type):
        return [(f".{n}", v) for n, v in vars(value).items() if not n.startswith("__") and not callable(v)]
    if isinstance(value, types.FunctionType):
        closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        kept = [default for default in value.__defaults__ or () if isinstance(default, list | dict)]
        return [(".defaults", kept), *((f".{n}", v) for n, v in [*closed, *vars(value).items()] if n != "__wrapped__")]
    for kind, state in STATES.items():
        if isinstance(value, kind):
            return [("", state(value))]
    if hasattr(value, "__next__"):
        frame = getattr(value, "gi_frame", None)
        return [(".locals", dict(frame.f_locals) if frame else {}), (".rest", rest(value))]
    slots = [
        n for kind in type(value).__mro__ if kind.__module__ == "__main__" for n in vars(kind).get("__slots__", ())
    ]
    own = {**{n: getattr(value, n, None) for n in slots}, **getattr(value, "__dict__", {})}
    if isinstance(value, torch.nn.Module):
        own["distinct"] = len(list(value.parameters()))  # less than all names where weights are tied
    return [(f".{n}", v) for n, v in own.items() if "hook" not in n]


def rest(iterator: Iterator[Any]) -> Any:
    """Return what an iterator still gives, 200 items at most, or how it fails."""
    try:
        return list(itertools.islice(iterator, 200))
    except Exception as error:  # noqa: BLE001 - a coroutine may want to be sent what it works on
        return repr(error)
