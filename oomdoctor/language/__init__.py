"""The language that a user reads: texts are made in English, and said in another one where they are shown.

Values, ids, JSON and tracebacks stay English: ``say`` belongs to what shows a text, and to nothing before it. A text
whose translation is not known is shown as it is. English costs a comparison; a catalogue is read when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Final

from oomdoctor.language.choice import LANGUAGES, automatic

if TYPE_CHECKING:
    from oomdoctor.language.catalogue import Catalogue

__all__ = ["LANGUAGES", "add", "choose", "is_chinese", "load", "say"]

_CHINESE: Final = "zh"
_sources: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {}
_setting = "auto"


def choose(setting: str) -> None:
    """Show texts in one of ``LANGUAGES`` from now on."""
    global _setting
    _setting = setting


def is_chinese() -> bool:
    """Return whether texts are shown in Chinese; ``auto`` is decided once."""
    return (_automatic() if _setting == "auto" else _setting) == _CHINESE


def say(text: str) -> str:
    """Return ``text`` in the language that was chosen, the same object where that is English."""
    if not is_chinese():
        return text
    try:
        return _catalogue().translated(text)
    except (MemoryError, OSError, SystemError):  # a failure is told in English rather than not at all
        return text


def add(name: str, source: Callable[[], Iterable[tuple[str, str]]]) -> None:
    """Have the pairs of ``source`` translated as well, in the place of what had this ``name``; it is called late."""
    _sources[name] = source
    _catalogue.cache_clear()


def load() -> None:
    """Read the catalogue now, where it is needed, while there is memory to."""
    if is_chinese():
        _catalogue()


_automatic = cache(automatic)


@cache
def _catalogue() -> Catalogue:
    from oomdoctor.language.catalogue import Catalogue, shipped

    return Catalogue([*shipped(), *(pair for source in _sources.values() for pair in source())])
