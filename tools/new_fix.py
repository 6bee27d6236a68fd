"""``make new FIX=name``: the files of a new fix, ready to be filled in; with RULE=, of a rule that suggests it as well.

Their texts lie in ``tools/new_fix/``, with ``@FIX@`` and ``@RULE@`` for the names. All names are checked before the
first file is written, so a name that cannot be used changes nothing. The new tests fail until they are filled in.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TEMPLATES: Final = ROOT / "tools" / "new_fix"

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def main(argv: list[str] | None = None) -> int:
    """Write the files and say what comes next; 2 and one line on stderr where the name cannot be used."""
    parser = argparse.ArgumentParser(prog="make new", description="Scaffold a fix.")
    parser.add_argument("fix", help="name of the fix, what it does: micro_batch")
    parser.add_argument("--rule", help="family/symptom of a new rule that suggests it; none by default")
    args = parser.parse_args(argv)
    files = _files(args.fix, args.rule)
    if refusal := _refusal(args.fix, args.rule, files):
        print(f"make new: {refusal}", file=sys.stderr)
        return 2
    symptom = (args.rule or "").partition("/")[2]
    for path, template in files.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("@FIX@", args.fix).replace("@RULE@", symptom), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    if args.rule is None:
        print(f"No rule suggests it yet: add {args.fix} to `fixes` of one in rules/, or give a new one by RULE=")
    print(f"Next: fill them in until this passes: make test PYTEST_ARGS=tests/fixes/test_{args.fix}.py")
    return 0


def _files(fix: str, rule: str | None) -> dict[Path, str]:
    files = {
        ROOT / "oomdoctor" / "fixes" / f"{fix}.py": "fix.py.txt",
        ROOT / "tests" / "fixes" / f"test_{fix}.py": "test_fix.py.txt",
    }
    return files if rule is None else {**files, ROOT / "rules" / f"{rule}.yaml": "rule.yaml.txt"}


def _refusal(fix: str, rule: str | None, files: dict[Path, str]) -> str | None:
    if not fix:
        return "give the fix a name: make new FIX=micro_batch"
    if not _NAME.fullmatch(fix) or keyword.iskeyword(fix):
        return f"{fix!r} cannot name a fix: use lower-case words joined by underscores, such as micro_batch"
    if rule is not None and (not all(map(_NAME.fullmatch, rule.split("/"))) or rule.count("/") != 1):
        return f"{rule!r} cannot name a rule: write family/symptom, such as device/activations_fill_memory"
    there = [str(path.relative_to(ROOT)) for path in files if path.exists()]
    return f"{', '.join(there)} exists already; nothing was written" if there else None


if __name__ == "__main__":
    sys.exit(main())
