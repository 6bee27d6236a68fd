"""Tensors that oomdoctor itself keeps, such as copies for the way back: no part of the user's program."""

from __future__ import annotations

from typing import Any
from weakref import ref

__all__ = ["is_apart", "keep_apart", "without_apart"]

_kept: dict[int, ref[Any]] = {}


def keep_apart(tensor: Any) -> None:
    """Have ``tensor`` left out of every count of the program's memory, as long as it lives."""
    key, kept = id(tensor), _kept  # a name of this module is None already when tensors die with the interpreter
    kept[key] = ref(tensor, lambda _: kept.pop(key, None))


def is_apart(tensor: Any) -> bool:
    """Return whether ``tensor`` is kept apart."""
    return id(tensor) in _kept


def without_apart(tensors: list[Any]) -> list[Any]:
    """Return those of ``tensors`` that are the program's."""
    return [tensor for tensor in tensors if id(tensor) not in _kept] if _kept else tensors
