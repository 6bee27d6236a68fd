"""Which folders of rules the user's settings name: those of the notebook that runs, or of IPython's default profile.

In a notebook ``OomDoctor.rule_paths`` is asked of the extension, and of the configuration where it is not loaded. The
shell command has no notebook; it reads what a new one would: ``ipython_config.py`` and ``ipython_kernel_config.py``, as
Python or JSON, of the default profile. A profile that is written in Python is run, as IPython itself runs it.
Limits: other profiles, and settings that were given on a kernel's command line, are not known to the shell command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

from oomdoctor.errors import Fault

_SECTION: Final = "OomDoctor"
_NAME: Final = "rule_paths"


def of_notebook() -> tuple[Path, ...]:
    """Return the folders that the settings of this process' notebook name; none where it is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None:
        return ()
    for one in shell.configurables:
        if type(one).__name__ == _SECTION:
            return tuple(map(Path, getattr(one, _NAME)))
    return _folders(shell.config)


def of_profile() -> tuple[tuple[Path, ...], tuple[Fault, ...]]:
    """Return the folders that the default profile's settings name, and what is wrong with those settings.

    Of several files that name some, the last counts, as in IPython.
    """
    folders: tuple[Path, ...] = ()
    faults = []
    for path in _files():
        try:
            folders = _folders(_read(path)) or folders
        except (Exception, SystemExit) as error:  # noqa: BLE001 - border: it is a program of the user's
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            faults.append(Fault(path=str(path), line=1, message=f"the settings cannot be read: {reason}"))
    return folders, tuple(faults)


def _files() -> Iterator[Path]:
    """Yield the files of settings that there are, in the order in which IPython reads them.

    Source: ``BaseIPythonApplication.init_config_files`` and ``SYSTEM_CONFIG_DIRS`` of IPython.core.application.
    """
    home = Path(os.environ.get("IPYTHONDIR") or Path("~", ".ipython")).expanduser()
    system = [Path(sys.prefix, "etc", "ipython")]
    if os.name != "nt":
        system = [Path("/etc/ipython"), Path("/usr/local/etc/ipython"), *system]
    for name in ("ipython_config", "ipython_kernel_config"):
        for folder in (*system, home / "profile_default"):
            for suffix in (".py", ".json"):
                if (path := folder / (name + suffix)).is_file():
                    yield path


def _read(path: Path) -> Any:
    from traitlets.config.loader import JSONFileConfigLoader, PyFileConfigLoader

    loader = (JSONFileConfigLoader if path.suffix == ".json" else PyFileConfigLoader)(path.name, str(path.parent))
    with redirect_stdout(sys.stderr):
        return loader.load_config()


def _folders(config: Any) -> tuple[Path, ...]:
    """Return the folders that a configuration names.

    Raises:
        TypeError: it names something else.
    """
    named = config[_SECTION].get(_NAME, []) if _SECTION in config else []
    if hasattr(named, "get_value"):  # built up with append and extend
        named = named.get_value([])
    if not isinstance(named, (list, tuple)) or not all(isinstance(one, (str, Path)) for one in named):
        raise TypeError(f"c.{_SECTION}.{_NAME} is a list of folders")
    return tuple(map(Path, named))
