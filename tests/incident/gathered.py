"""Reads the labelled messages beside this file.

Each has the wording of the report at its ``source``, with figures, names and paths of our own. ``family`` is who
refused; ``alt_families`` are other readings that the text allows; ``ambiguous`` marks a label that comes from the
report and not from the text, and ``misses`` the fields that are not read yet. ``split`` tells what a record was
for: ``seen`` while the table was written, ``held_back`` until it was, ``later`` gathered after that, and ``blind``
labelled by hand before the table had read them, and mended by them since.

``FRESH`` and ``FRESHER`` have two halves each, split by a hash of the id: ``used`` to mend the table and the rules, and
``held`` back. Those of ``FRESHER`` were labelled, split and put down before the table and the rules had read them.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).with_name("gathered.jsonl")
FRESH = Path(__file__).with_name("gathered_2026b.jsonl")
FRESHER = Path(__file__).with_name("gathered_2026c.jsonl")
CORPUS = Path(__file__).parents[3] / "shared" / "corpus" / "oom_messages.jsonl"
"""A larger set outside of the project, read where it lies."""


def records(path=FILE):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def close(found, wanted):
    unit = next((1 << power for power in (40, 30, 20, 10) if wanted >= 1 << power), 1)
    return found is not None and abs(found - wanted) <= max(0.006 * wanted, 0.01 * unit)
