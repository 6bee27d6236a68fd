"""How well failures are recognised: oomdoctor and two peers on a corpus of labelled messages.

    python benchmarks/recognition.py [oom_messages.jsonl]
    python benchmarks/recognition.py tests/incident/gathered.jsonl
    python benchmarks/recognition.py tests/incident/gathered_2026b.jsonl [--half used|held] [--misses]
    python benchmarks/recognition.py tests/incident/gathered_2026c.jsonl [--half used|held] [--misses]

The corpus is one JSON object a line, with ``text``, ``exc_type``, ``is_oom``, ``family``, ``fields`` and
``ambiguous``, and where they are known ``likely_cause`` and other families that the text allows (``alt_families``).
It is read from where it lies and is not part of this project; the messages that the project's own tests gathered have
the same shape. Ambiguous records are counted apart: their label comes from the thread that they were reported in and
not from their text.

The checks of the peers are transcriptions: what they look for, written down here from reading them, so that neither
has to be installed. They take exceptions, so each text is given to them as an exception of the class that it was, and
as a RuntimeError, the class that they ask for, where the class is not known.

Records may name the half of the set that they belong to: ``used`` to mend the formats and rules, or ``held`` back. Each
half is scored by itself, and a table tells how each family does.

A number is right within 0.6 %, or within 0.01 of the unit that it was printed in.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from oomdoctor import fixes
from oomdoctor.incident import from_text
from oomdoctor.model.incident import Incident
from oomdoctor.rulebook import load, locate

CORPUS: Final = Path(__file__).parents[2] / "shared" / "corpus" / "oom_messages.jsonl"
NUMBERS: Final = ("requested", "total", "free", "allocated", "reserved", "process_used", "device")
BUILTIN: Final = {
    "MemoryError": MemoryError,
    "OSError": OSError,
    "ValueError": ValueError,
    "KeyboardInterrupt": OSError,
}

ACCELERATE: Final = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
)
"""What accelerate's ``should_reduce_batch_size`` looks for. Source: ``accelerate/utils/memory.py``, 1.15.0."""

TOMA: Final = (
    "CUDA out of memory.",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
)
"""What toma's three checks look for. Source: ``toma/torch_cuda_memory.py`` and ``toma/cpu_memory.py``, 1.1.0."""


@dataclass(slots=True)
class Tally:
    """Right answers out of all."""

    right: int = 0
    all: int = 0

    def add(self, right: bool) -> None:
        """Count one answer."""
        self.right += right
        self.all += 1

    def __str__(self) -> str:
        return f"{self.right}/{self.all} ({self.right / self.all:.1%})" if self.all else "-"


def contains(literals: Iterable[str]) -> Callable[[dict[str, Any]], bool]:
    """Return the check that both peers make: a RuntimeError with one argument that contains a literal."""

    def check(record: dict[str, Any]) -> bool:
        error = as_exception(record)
        return (
            isinstance(error, RuntimeError) and len(error.args) == 1 and any(one in error.args[0] for one in literals)
        )

    return check


def as_exception(record: dict[str, Any]) -> BaseException:
    name = (record["exc_type"] or "RuntimeError").rpartition(".")[2]
    return BUILTIN.get(name, RuntimeError)(record["text"])


def close(found: int | None, wanted: int) -> bool:
    unit = next((1 << power for power in (40, 30, 20, 10) if wanted >= 1 << power), 1)
    return found is not None and abs(found - wanted) <= max(0.006 * wanted, 0.01 * unit)


def wanted_numbers(record: dict[str, Any]) -> dict[str, Any]:
    known = {**(record.get("derived") or {}), **record["fields"]}
    if "max_allowed" in known:  # the cap of the MPS allocator is its device's size
        known["total"] = known["max_allowed"]
    return {name: known[name] for name in NUMBERS if name in known}


def number_is_right(incident: Incident, name: str, wanted: int) -> bool:
    if name == "device":
        return str(incident.device).rpartition(":")[2] == str(wanted)
    return close(getattr(incident, name), wanted)


def main() -> int:
    """Print the scores; 1 where there is no corpus."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", nargs="?", type=Path, default=CORPUS)
    parser.add_argument("--misses", action="store_true", help="name each record that oomdoctor gets wrong")
    parser.add_argument("--half", choices=("used", "held"), help="score one half of the records alone")
    args = parser.parse_args()
    if not args.corpus.is_file():
        print(f"there is no corpus at {args.corpus}", file=sys.stderr)
        return 1
    records = [json.loads(line) for line in args.corpus.read_text(encoding="utf-8").splitlines() if line.strip()]
    console = Console(highlight=False, width=120)
    halves = sorted({record.get("half", "all") for record in records if args.half in (None, record.get("half"))})
    for half in reversed(halves):
        report([record for record in records if record.get("half", "all") == half], half, console, misses=args.misses)
    return 0


def report(records: list[dict[str, Any]], half: str, console: Console, *, misses: bool) -> None:
    """Print the scores of one half, or of all records where they name none."""
    console.print(f"{half}: {len(records)} records, {sum(record['ambiguous'] for record in records)} of them ambiguous")
    console.print(recognition_table(records))
    tallies, wrong = detail(records)
    for name, tally in tallies.items():
        console.print(f"{name:<46}{tally}")
    console.print(family_table(records))
    if misses:
        console.print("\n".join(wrong), markup=False)


def recognition_table(records: list[dict[str, Any]]) -> Table:
    checks: dict[str, Callable[[dict[str, Any]], bool]] = {
        "oomdoctor": lambda record: from_text(record["text"])[0].is_oom,
        "accelerate (transcription)": contains(ACCELERATE),
        "toma (transcription)": contains(TOMA),
    }
    table = Table("check", "OOMs recognised", "look-alikes left alone", "ambiguous, as labelled")
    for name, check in checks.items():
        cells = {key: Tally() for key in ("oom", "other", "ambiguous")}
        for record in records:
            key = "ambiguous" if record["ambiguous"] else "oom" if record["is_oom"] else "other"
            cells[key].add(check(record) == record["is_oom"])
        table.add_row(name, *map(str, cells.values()))
    return table


def family_table(records: list[dict[str, Any]]) -> Table:
    """Return how many of each family are recognised, are named rightly, and have their numbers read."""
    table = Table("family", "recognised", "family", "numbers")
    for family in sorted({record["family"] for record in records}):
        cells = [Tally(), Tally(), Tally()]
        for record in records:
            if record["family"] != family or record["ambiguous"]:
                continue
            incident = from_text(record["text"])[0]
            cells[0].add(incident.is_oom == record["is_oom"])
            cells[1].add(incident.family in (family, *record.get("alt_families", ())))
            for name, wanted in wanted_numbers(record).items():
                cells[2].add(number_is_right(incident, name, wanted))
        table.add_row(family, *map(str, cells))
    return table


def detail(records: list[dict[str, Any]]) -> tuple[dict[str, Tally], list[str]]:
    """Score family, numbers and cause of the records that are not ambiguous, and name what went wrong."""
    book = load([locate()], known_fixes=fixes.ids())
    tallies = {name: Tally() for name in ("family", "numbers", "cause, of those that are known")}
    misses = []
    for record in records:
        if record["ambiguous"]:
            continue
        incident = from_text(record["text"])[0]
        wrong = []
        is_right = incident.family in (record["family"], *record.get("alt_families", ()))
        tallies["family"].add(is_right)
        if not is_right:
            wrong.append(f"family {incident.family.value}, not {record['family']}")
        for name, wanted in wanted_numbers(record).items():
            right = number_is_right(incident, name, wanted)
            tallies["numbers"].add(right)
            if not right:
                wrong.append(f"{name} {getattr(incident, name)}, not {wanted}")
        if record["is_oom"] and record.get("likely_cause", "unknown") != "unknown":
            causes = [finding.cause.value for finding in book.match(incident, None)][:1]
            right = bool(causes) and causes[0] in (record["likely_cause"], *(record.get("alt_causes") or ()))
            tallies["cause, of those that are known"].add(right)
            if not right:
                wrong.append(f"cause {', '.join(causes) or 'none'}, not {record['likely_cause']}")
        misses += [f"{record['id']} ({record.get('format', record['family'])}): {'; '.join(wrong)}"] if wrong else []
    return tallies, misses


if __name__ == "__main__":
    sys.exit(main())
