"""What an object holds elsewhere than in its ``__dict__``: slots, attributes of a class, items of an array of objects.

Put back by the object's own kind of writing, past any ``__setattr__`` of the user's.
"""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final

from oomdoctor.objects.homes import is_installed
from oomdoctor.objects.kinds import members_of, module_of, mro_of
from oomdoctor.objects.places import Place
from oomdoctor.objects.recipes import GONE, Recipe, living, revive

__all__ = ["ATTRIBUTES", "ITEMS", "SLOTS", "Parts", "class_attributes", "functions_in", "slots_of"]

_DESCRIPTORS: Final = frozenset({GetSetDescriptorType, MemberDescriptorType})
_WRAPPED: Final = frozenset({FunctionType, staticmethod, classmethod, property})


class Parts:
    """The parts of one object.

    Args:
        owner: the object, held.
        recipe: how each part is held.
        place: where they are.
    """

    __slots__ = ("_owner", "_place", "recipe")

    def __init__(self, owner: Any, recipe: Recipe, place: Place) -> None:
        self._owner, self.recipe, self._place = owner, recipe, place

    @property
    def is_there(self) -> bool:
        """Whether the object lives."""
        return living(self._owner) is not GONE

    def restore(self, memo: dict[int, Any]) -> None:
        """Put the parts back; one that cannot be written stays."""
        owner = living(self._owner)
        if owner is GONE:
            return
        now, before = self._place.read(owner), set()
        for name, held in self.recipe.pairs:
            before.add(name)
            value = revive(held, now.get(name), memo)
            if value is not GONE and now.get(name, GONE) is not value:
                with suppress(AttributeError, TypeError, ValueError):
                    self._place.write(owner, name, value)
        for name in now.keys() - before:
            with suppress(AttributeError, TypeError):
                self._place.delete(owner, name)


def slots_of(value: Any) -> dict[str, Any]:
    """Return the values of the slots of an object of the user's own classes."""
    cls, found = type(value), {}
    for base in mro_of(cls) if not is_installed(module_of(cls)) else ():
        for name, member in members_of(base).items():
            if type(member) is MemberDescriptorType:
                with suppress(AttributeError):
                    found[name] = member.__get__(value)
    return found


def class_attributes(cls: type) -> dict[str, Any]:
    """Return what a program may change in a class: its functions and its attributes, but not what Python keeps."""
    return {
        name: item
        for name, item in members_of(cls).items()
        if type(item) not in _DESCRIPTORS and name != "_abc_impl" and (name[:2] != "__" or type(item) in _WRAPPED)
    }


def functions_in(item: Any) -> list[Any]:
    """Return the functions behind an attribute of a class: of a property, of a static method and the like."""
    if type(item) is staticmethod or type(item) is classmethod:
        return [item.__func__]
    if type(item) is property:
        return [one for one in (item.fget, item.fset, item.fdel) if one is not None]
    return []


def items_of_array(array: Any) -> dict[int, Any]:
    """Return the items of an array of objects by their place."""
    return dict(enumerate(array.flat))


def _set_item(array: Any, at: int, value: Any) -> None:
    array.flat[at] = value


SLOTS: Final = Place(slots_of)
ATTRIBUTES: Final = Place(class_attributes, type.__setattr__, type.__delattr__)
ITEMS: Final = Place(items_of_array, _set_item)
