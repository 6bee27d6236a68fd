"""The commands of README, the tutorial and the how-to pages run, and put out what the pages say."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = re.findall(r"^(\w.*?)  +#", README.split("## Install")[1].split("```")[1], re.M)


@pytest.fixture(scope="module")
def sessions() -> ModuleType:
    if str(ROOT / "tools") not in sys.path:
        sys.path.append(str(ROOT / "tools"))
    return importlib.import_module("page_sessions")


def pages() -> list[str]:
    text = (ROOT / "docs").glob("how-to/*.md")
    return ["docs/tutorial.md", *sorted(path.relative_to(ROOT).as_posix() for path in text)]


def test_the_lines_to_install_are_these() -> None:
    assert INSTALL == ["pip install .", "make demo", "make test"]


@pytest.mark.parametrize("command", [line for line in INSTALL if line.startswith("make")])
def test_make_knows_the_targets_that_the_readme_names(command: str) -> None:
    """What they do is tested where it is: the demo in tests/cli, and these tests by themselves."""
    done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"make demo": "oomdoctor demo", "make test": "pytest"}[command] in done.stdout


@pytest.mark.thorough
def test_pip_installs_the_checkout(tmp_path: Path) -> None:
    """As the README says, but that nothing is fetched, and elsewhere."""
    (command,) = [line for line in INSTALL if line.startswith("pip")]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "oomdoctor" / "__init__.py").is_file()


def test_the_session_of_the_readme_has_ten_lines(sessions: ModuleType) -> None:
    cells = [block.body for block in sessions.blocks(README) if block.language == "python"]
    assert len("".join(cells).splitlines()) == 10


@pytest.mark.slow
def test_the_session_of_the_readme_puts_out_what_it_says(sessions: ModuleType) -> None:
    assert headings(sessions, sessions.renewed(README)) == headings(sessions, README), "run: make pages"


@pytest.mark.thorough
@pytest.mark.parametrize("page", pages())
def test_a_page_puts_out_what_it_says(sessions: ModuleType, page: str) -> None:
    """What depends on how busy the machine is, such as which forecasts were made in time, is not compared."""
    text = (ROOT / page).read_text(encoding="utf-8")
    before, after = (headings(sessions, one) for one in (text, sessions.renewed(text)))
    assert after == before, "run: make pages"


def headings(sessions: ModuleType, page: str) -> list[str]:
    """Return the first line of each output of a page."""
    told = [block.body for block in sessions.blocks(page) if block.language != "python" and block.title is None]
    return [line for text in told for line in sessions.likeness(text)[:1]]


PAGE = """\
# A page

```python title="part.py"
print("from the file")
```

```python
print("one", 1)
print("two")
```

<!-- until: two -->
```text
```

<!-- not run -->
```python
raise SystemExit
```

```console
$ echo begin && python part.py
old
```
"""


def test_a_page_is_run_and_written(sessions: ModuleType) -> None:
    after = sessions.renewed(PAGE)
    assert "```text\none 1\n…\n```" in after
    assert "```console\n$ echo begin && python part.py\nbegin\nfrom the file\n```" in after
    assert sessions.renewed(after) == after


def test_a_cell_that_fails_where_the_page_does_not_say_so_is_told(sessions: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no block with its output follows:\nZeroDivisionError"):
        sessions.renewed("```python\n1 / 0\n```\n")
    assert "ZeroDivisionError: division by zero" in sessions.renewed("```python\n1 / 0\n```\n\n```text\n```\n")
