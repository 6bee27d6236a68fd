"""What an exception comes from, read past classes that say something else about it."""

from __future__ import annotations

from typing import Any

import pytest

from oomdoctor.objects.frames import chained

RAN: list[str] = []


def _runs(name: str) -> Any:
    def run(*_: object, **__: object) -> Any:
        RAN.append(name)
        raise SystemExit(name)

    return run


class Meta(type):
    """A metaclass that notes whatever is asked of it."""

    __eq__ = _runs("Meta.__eq__")
    __hash__ = type.__hash__
    __instancecheck__ = _runs("Meta.__instancecheck__")
    __subclasscheck__ = _runs("Meta.__subclasscheck__")
    __mro__ = property(_runs("Meta.__mro__"))  # type: ignore[assignment]


class _Odd:
    __cause__ = property(_runs("__cause__"))
    __context__ = property(_runs("__context__"))
    __traceback__ = property(_runs("__traceback__"))
    exceptions = property(_runs("exceptions"))
    __eq__ = _runs("__eq__")
    __hash__ = _runs("__hash__")
    __bool__ = _runs("__bool__")
    __len__ = _runs("__len__")
    __iter__ = _runs("__iter__")
    __class__ = property(_runs("__class__"))  # type: ignore[assignment]
    __getattribute__ = _runs("__getattribute__")


Odd: Any = Meta("Odd", (_Odd, Exception), {})
OddGroup: Any = Meta("OddGroup", (_Odd, ExceptionGroup), {})


def _come_from(exc: BaseException, cause: BaseException | None, context: BaseException | None) -> None:
    """Set what the interpreter itself would have noted."""
    vars(BaseException)["__cause__"].__set__(exc, cause)
    vars(BaseException)["__context__"].__set__(exc, context)


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    RAN.clear()


def _ids(found: BaseException) -> list[int]:
    return sorted(map(id, chained(found)))


def test_the_causes_contexts_and_members_of_odd_classes_are_found_and_no_code_of_theirs_runs() -> None:
    cause, context, first, second = ValueError("cause"), Odd("context"), Odd("first"), KeyError("second")
    group = OddGroup("both", [first, second])
    odd = Odd("odd")
    _come_from(odd, group, context)
    _come_from(first, cause, None)
    assert _ids(odd) == sorted(map(id, (odd, group, context, first, second, cause)))
    assert RAN == []


def test_what_a_class_claims_is_not_taken_for_what_it_comes_from() -> None:
    class Claims(Exception):
        __cause__ = ValueError("claimed")  # type: ignore[assignment]
        __context__ = "no exception at all"  # type: ignore[assignment]
        exceptions = (KeyError("claimed"),)

    found = Claims()
    assert list(chained(found)) == [found]


def test_exceptions_that_are_equal_are_told_apart_and_a_circle_ends() -> None:
    class Same(Exception):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = Exception.__hash__

    first, second = Same("first"), Same("second")
    _come_from(first, second, second)
    _come_from(second, first, None)
    assert _ids(first) == sorted(map(id, (first, second)))


def test_a_chain_of_thousands_and_groups_in_groups() -> None:
    last: BaseException = ValueError("innermost")
    for at in range(5000):
        outer: BaseException = BaseExceptionGroup("nested", [last]) if at % 2 else KeyError(at)
        if not at % 2:
            _come_from(outer, None, last)
        last = outer
    assert len(list(chained(last))) == 5001
    assert list(chained(None)) == []
