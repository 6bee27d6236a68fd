"""What ``OomDoctor.language = "auto"`` means: the language of the environment, else that of JupyterLab's menus.

``LANGUAGE`` is the one variable that names nothing but the language of messages, so it decides where it is set. The
others decide for Chinese alone: ``en_US.UTF-8`` and ``C.UTF-8`` are what images and servers have unless somebody has
chosen, and say nothing of who reads. Every Chinese locale takes the simplified characters that the catalogue has.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

LANGUAGES: Final = ("auto", "en", "zh")
_LOCALES: Final = ("LC_ALL", "LC_MESSAGES", "LANG")
_SETTING: Final = Path("lab", "user-settings", "@jupyterlab", "translation-extension", "plugin.jupyterlab-settings")
"""Source: ``jupyterlab_server.settings_handler`` keeps what a user has changed in a plugin's settings under this name,
as JSON with comments; ``locale`` is the key of the translation extension's schema."""
_COMMENT: Final = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LARGEST: Final = 64 << 10


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


def _prints_chinese() -> bool:
    encoding = getattr(sys.stdout, "encoding", None)
    try:
        return bool("中".encode(encoding if isinstance(encoding, str) else "utf-8"))
    except (LookupError, UnicodeError):
        return False


def _is_chinese(locale: str) -> bool:
    return re.split(r"[_.@-]", locale, maxsplit=1)[0].lower() == "zh"


def _of_jupyterlab(environ: Mapping[str, str]) -> str:
    """Return the locale of JupyterLab's menus, nothing where none was chosen or it cannot be read."""
    for folder in _folders(environ):
        try:
            path = folder / _SETTING
            if path.stat().st_size <= _LARGEST:
                found: Any = json.loads(_COMMENT.sub(lambda match: match[1] or "", path.read_text(encoding="utf-8")))
                return str(found.get("locale", "")) if isinstance(found, dict) else ""
        except (OSError, ValueError, RecursionError):
            continue
    return ""


def _folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield where settings of JupyterLab may be. Source: ``jupyter_core.paths.jupyter_config_dir``."""
    if named := environ.get("JUPYTER_CONFIG_DIR"):
        yield Path(named)
    else:
        yield Path(environ.get("HOME") or "~").expanduser() / ".jupyter"
