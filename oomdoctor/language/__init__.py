"""The language that a user reads: texts are made in English, and said in another one where they are shown.

Values, ids, JSON and tracebacks stay English: ``say`` belongs to what shows a text, and to nothing before it. A text
whose translation is not known is shown as it is. English costs a comparison; a catalogue is read when it is needed.

``auto`` means the language of the environment, else that of JupyterLab's menus. ``LANGUAGE`` is the one variable that
names nothing but the language of messages, so it decides where it is set. The others decide for Chinese alone:
``en_US.UTF-8`` and ``C.UTF-8`` are what images and servers have unless somebody has chosen, and say nothing of who
reads. Every Chinese locale takes the simplified characters that the catalogue has.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from oomdoctor.language.catalogue import Catalogue

LANGUAGES: Final = ("auto", "en", "zh")
_LOCALES: Final = ("LC_ALL", "LC_MESSAGES", "LANG")
_SETTING: Final = Path("lab", "user-settings", "@jupyterlab", "translation-extension", "plugin.jupyterlab-settings")
"""Source: ``jupyterlab_server.settings_handler`` keeps what a user has changed in a plugin's settings under this name,
as JSON with comments; ``locale`` is the key of the translation extension's schema."""
_COMMENT: Final = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LARGEST: Final = 64 << 10
_sources: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {}
_setting = "auto"


def choose(setting: str) -> None:
    """Show texts in one of ``LANGUAGES`` from now on."""
    global _setting
    _setting = setting


def is_chinese() -> bool:
    """Return whether texts are shown in Chinese; ``auto`` is decided once."""
    return (_automatic() if _setting == "auto" else _setting) == "zh"


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


@cache
def _catalogue() -> Catalogue:
    from oomdoctor.language.catalogue import Catalogue, shipped

    return Catalogue([*shipped(), *(pair for source in _sources.values() for pair in source())])


def automatic(environ: Mapping[str, str] | None = None) -> str:
    """Return ``zh`` or ``en``, for the environment and the settings that this process has.

    It is English as well where the standard output has no Chinese characters.
    """
    if not _prints_chinese():
        return "en"
    environ = os.environ if environ is None else environ
    for language in environ.get("LANGUAGE", "").split(":"):
        if language[:2].lower() in LANGUAGES:
            return language[:2].lower()
    locale = next((environ[name] for name in _LOCALES if environ.get(name)), "")
    return "zh" if _is_chinese(locale) or _is_chinese(_of_jupyterlab(environ)) else "en"


_automatic = cache(automatic)


def _prints_chinese() -> bool:
    encoding = getattr(sys.stdout, "encoding", None)
    try:
        return bool("中".encode(encoding if isinstance(encoding, str) else "utf-8"))
    except (LookupError, UnicodeError):
        return False


def _is_chinese(locale: str) -> bool:
    return re.split(r"[_.@-]", locale, maxsplit=1)[0].lower() == "zh"


def _of_jupyterlab(environ: Mapping[str, str]) -> str:
    """Return the locale of JupyterLab's menus, nothing where none was chosen or it cannot be read.

    Source: ``jupyter_core.paths.jupyter_config_dir``.
    """
    try:
        home = Path(environ.get("HOME") or "~")
        path = Path(environ.get("JUPYTER_CONFIG_DIR") or home.expanduser() / ".jupyter") / _SETTING
        if path.stat().st_size <= _LARGEST:
            found: Any = json.loads(_COMMENT.sub(lambda match: match[1] or "", path.read_text(encoding="utf-8")))
            return str(found.get("locale", "")) if isinstance(found, dict) else ""
    except (OSError, ValueError, RuntimeError):
        pass
    return ""
