"""Rules and the notebook of the demo are found in a wheel, an unpacked sdist, an editable install and the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

LOOK = """
import json, site, sys
for folder in sys.argv[1:]:
    site.addsitedir(folder)
    sys.path.insert(0, sys.path.pop())
import oomdoctor
from oomdoctor import fixes, rulebook
from oomdoctor.cli.demo import notebook_path
rules = rulebook.locate()
rulebook.load([rules], known_fixes=fixes.ids())
files = sorted(path.relative_to(rules).as_posix() for path in rules.rglob("*.yaml"))
print(json.dumps({"package": oomdoctor.__file__, "rules": str(rules), "files": files,
                  "notebook": str(notebook_path()), "cells": len(json.loads(notebook_path().read_text())["cells"])}))
"""


def run(*command, cwd, **environment):
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip_install(*arguments, cwd):
    # Nothing is fetched: the requirements are those that run this test.
    # --ignore-installed: or pip would remove the editable install that this test may be running from.
    options = (
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--ignore-installed",
    )
    run(sys.executable, "-m", "pip", "install", *options, *arguments, cwd=cwd)


def look(cwd, *site_folders, **environment):
    """Return what a fresh interpreter finds, started where no checkout is."""
    return json.loads(run(sys.executable, "-c", LOOK, *map(str, site_folders), cwd=cwd, **environment))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the sdist and the wheel that is built from it, as those who install from the sdist do."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def checkout_files():
    return sorted(path.relative_to(ROOT / "rules").as_posix() for path in (ROOT / "rules").rglob("*.yaml"))


def test_the_checkout(tmp_path, checkout_files):
    found = look(tmp_path, PYTHONPATH=str(ROOT))
    assert found["package"] == str(ROOT / "oomdoctor" / "__init__.py")
    assert found["files"] == checkout_files != []
    assert found["notebook"] == str(ROOT / "notebooks" / "01_first_oom.ipynb")
    assert found["cells"] > 10


def test_the_wheel(tmp_path, built, checkout_files):
    pip_install("--target", str(tmp_path / "site"), str(built[1]), cwd=tmp_path)
    package = tmp_path / "site" / "oomdoctor"
    found = look(tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert found["package"] == str(package / "__init__.py")
    assert found["rules"].startswith(str(package))
    assert found["files"] == checkout_files
    assert found["notebook"].startswith(str(package))


def test_the_sdist(tmp_path, built, checkout_files):
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    found = look(tmp_path, PYTHONPATH=str(unpacked))
    assert found["package"] == str(unpacked / "oomdoctor" / "__init__.py")
    assert found["rules"].startswith(str(unpacked))
    assert found["files"] == checkout_files
    assert found["notebook"].startswith(str(unpacked))
    assert (unpacked / "Makefile").is_file()
    assert (unpacked / "constraints.txt").is_file()


def test_the_editable_install(tmp_path, checkout_files):
    pip_install("--prefix", str(tmp_path / "prefix"), "--editable", str(ROOT), cwd=tmp_path)
    (folder,) = (tmp_path / "prefix").glob("**/site-packages")
    found = look(tmp_path, folder)
    assert found["package"] == str(ROOT / "oomdoctor" / "__init__.py")
    assert found["files"] == checkout_files
    assert not (folder / "oomdoctor").exists(), "a copy would grow stale"


def test_the_wheel_holds_all_that_the_package_holds(built):
    tracked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "oomdoctor").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
    assert tracked <= names
    assert not {name for name in names if name.startswith(("tests", "rules", "notebooks"))}


def test_a_wheel_without_its_rules_would_be_seen(tmp_path, built):
    pip_install("--target", str(tmp_path / "site"), str(built[1]), cwd=tmp_path)
    shutil.rmtree(tmp_path / "site" / "oomdoctor" / "_rules")
    (tmp_path / "site" / "oomdoctor" / "_notebooks" / "01_first_oom.ipynb").unlink()
    with pytest.raises(AssertionError, match="Traceback"):
        look(tmp_path, PYTHONPATH=str(tmp_path / "site"))
