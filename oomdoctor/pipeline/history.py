"""The cases of this process."""

from __future__ import annotations

from oomdoctor.model.case import Case

_cases: list[Case] = []


def record(case: Case) -> None:
    """Keep a case, or replace the record of the same number."""
    if case.number <= len(_cases):
        _cases[case.number - 1] = case
    else:
        _cases.append(case)


def cases() -> tuple[Case, ...]:
    """Return the cases of this process, oldest first."""
    return tuple(_cases)


def last_case() -> Case | None:
    """Return the case of the last failure, None if there was none."""
    return _cases[-1] if _cases else None
