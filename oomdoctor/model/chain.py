"""The exceptions that one exception comes from."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["chained"]


def chained(exc: BaseException | None) -> Iterator[BaseException]:
    """Yield ``exc``, its causes, its contexts and the members of its groups, each once."""
    seen: set[int] = set()
    todo = [exc]
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        members = found.exceptions if isinstance(found, BaseExceptionGroup) else ()
        todo += [found.__cause__, found.__context__, *members]
