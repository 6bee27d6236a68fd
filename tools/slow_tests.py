"""Write ``tests/slow.txt``, the tests that ``make test`` leaves to ``make test-all``: those that took long.

After ``make test-all PYTEST_ARGS=--junitxml=times.xml``, on a machine that does nothing else:
``python tools/slow_tests.py times.xml``. Rows of tables that few others are like are marked where the tables are, by
``tests/covering.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).parents[1] / "tests" / "slow.txt"
LEAST_S = 5.0


def slow(file: Path) -> set[str]:
    """Return the tests of a report by pytest that took long, as pytest names them."""
    cases = ElementTree.parse(file).getroot().iter("testcase")
    return {_named(**case.attrib) for case in cases if float(case.attrib["time"]) > LEAST_S}


def _named(classname: str, name: str, **_: str) -> str:
    names = classname.split(".")
    classes = [one for one in names if one.startswith("Test")]
    return "::".join(["/".join(names[: len(names) - len(classes)]) + ".py", *classes, name])


if __name__ == "__main__":
    LIST.write_text("".join(f"{one}\n" for one in sorted(set().union(*map(slow, map(Path, sys.argv[1:]))))))
