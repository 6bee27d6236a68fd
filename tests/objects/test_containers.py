"""Builtin containers are read, compared and filled again past whatever a class of the user's answers."""

from __future__ import annotations

import array
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest

from oomdoctor.objects.containers import copied, holds, is_light, length_of, refill
from oomdoctor.objects.copies import Allowance, Contents
from oomdoctor.objects.mementos import Light
from oomdoctor.retry.reachable import Reach


class Shy(dict[str, int]):
    """A mapping that answers nothing itself."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    __len__ = __iter__ = __getitem__ = __setitem__ = None  # type: ignore[assignment]


class Odd(list[int]):
    """A list that says that it is empty."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())


def ordered() -> OrderedDict[str, int]:
    made = OrderedDict(a=1, b=2, c=3)
    made.move_to_end("a")
    return made


MADE: dict[str, Any] = {
    "list": lambda: [1, 2, 3],
    "dict": lambda: {"a": 1, "b": 2, "c": 3},
    "ordered dict": ordered,
    "default dict": lambda: defaultdict(list, a=1, b=2, c=3),
    "counter": lambda: Counter(a=1, b=2, c=3),
    "set": lambda: {1, 2, 3},
    "deque": lambda: deque([1, 2, 3], maxlen=3),
    "a mapping of the user's": lambda: Shy(a=1, b=2, c=3),
    "a list of the user's": lambda: Odd([1, 2, 3]),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_container_is_copied_compared_and_filled_again(kind: str) -> None:
    container, alike = MADE[kind](), MADE[kind]()
    copy = copied(container)
    assert length_of(container) == 3
    assert holds(container, copy)
    refill(container, {} if issubclass(type(container), dict) else [])
    assert length_of(container) == 0
    assert not holds(container, copy)
    refill(container, copy)
    assert holds(container, copy)
    assert holds(alike, copy), "in the same order as one that was made anew"


def test_an_ordered_dict_that_is_put_in_another_order_is_another() -> None:
    container = ordered()
    copy = copied(container)
    container.move_to_end("b", last=False)
    container.move_to_end("a", last=False)
    assert not holds(container, copy)
    refill(container, copy)
    assert list(container) == ["b", "c", "a"]


def test_a_set_whose_order_cannot_be_made_again_is_told() -> None:
    grown = set(range(100_000))
    for item in range(99_990):
        grown.discard(item)
    light = Light()
    light.add(grown, "grown")
    code = Reach("grown.add(1)", {}, lambda name: ())
    assert [*light.lost(code)] == []
    grown.add(1)
    assert light.changed() == "changed `grown`"
    assert [*light.lost(code)] == ["a set of 10 items was changed, and its order cannot be brought back"]


@pytest.mark.parametrize("container", [[1, "a", None], {"a": 1.0}, {1, 2}, OrderedDict(a=b"")])
def test_numbers_and_texts_are_light(container: Any) -> None:
    assert is_light(container)
    assert not is_light([container])


@pytest.mark.parametrize("buffer", [bytearray(b"abc"), array.array("d", [1.0, float("nan")])])
def test_a_buffer_is_changed_when_its_bytes_are(buffer: Any) -> None:
    memento, before = Contents(buffer, buffer, "buffer", Allowance(lambda _: False)), bytes(buffer)
    assert memento.changed() is None
    buffer[0] = 7
    assert memento.changed() == f"changed a {type(buffer).__name__}"
    memento.restore({})
    assert bytes(buffer) == before
