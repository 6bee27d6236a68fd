"""Write ``tests/slow.txt``, the tests that ``make test`` leaves to ``make test-ci``: those that took long.

After ``make test-all PYTEST_ARGS=--junitxml=times.xml``, on a machine that does nothing else:
``python tools/slow_tests.py times.xml``. Rows of tables that few others are like are marked where the tables are, by
``tests/covering.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).parents[1] / "tests" / "slow.txt"
LEAST_S = 1


def slow(file: Path) -> dict[str, int]:
    """Return the tests of a report by pytest that took long, as pytest names them, with the whole seconds of each."""
    cases = ElementTree.parse(file).getroot().iter("testcase")
    seconds = {_named(**case.attrib): int(float(case.attrib["time"])) for case in cases}
    return {name: took for name, took in seconds.items() if took >= LEAST_S}


def _named(classname: str, name: str, **_: str) -> str:
    names = classname.split(".")
    classes = [one for one in names if one.startswith("Test")]
    return "::".join(["/".join(names[: len(names) - len(classes)]) + ".py", *classes, name])


if __name__ == "__main__":
    found = dict[str, int]()
    for file in sys.argv[1:]:
        for name, took in slow(Path(file)).items():
            found[name] = max(took, found.get(name, 0))
    LIST.write_text("".join(f"{took} {name}\n" for name, took in sorted(found.items())))
