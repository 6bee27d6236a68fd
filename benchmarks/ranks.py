"""Ranks that heal together: ``benchmarks/ranks.py [--write] [--worlds 2,3,4] [CASE ...]``.

A training under ``torchrun``, with gloo on this machine, runs out of memory in one place or another, on the simulated
device or for a limit of the host's. The healed job is held against a fresh job of the changed script, with as many
ranks and the same seeds, and without oomdoctor: what every rank has left must be the same bit for bit. Told are the
times until the other ranks were out of their runs (*released*), from there until a change was agreed on (*agreed*:
forecasts and the trial, with all ranks on the processors of this machine), and from the end of a rank's run until all
had come to the end (*committed*); the longest of all ranks each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "ranks"))

from jobs import Case, changed, job, same, source_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "ranks.txt"

_IN_STEP = "    # in a step"
_SECOND = "    if rank == 0 and len(losses) == 2:\n        "
CASES = {
    "nowhere": Case(where="nowhere"),
    "forward": Case(where="forward"),
    "backward": Case(where="backward"),
    "step, half-way": Case(where="step", simulate="96MiB", settings={"HELD": "35"}),
    "two at once": Case(where="backward", ranks="0,1"),
    "after the last collective": Case(where="late", simulate="96MiB", settings={"HELD": "30"}),
    "RLIMIT_DATA, backward": Case(where="backward", simulate=None, settings={"GREED": str(2 << 20), "CAP": "1500"}),
    "a user's error on rank 0": Case(
        where="nowhere", lines={_IN_STEP: f"{_SECOND}raise ValueError('a mistake')"}, heals=False
    ),
    "rank 0 killed (-9)": Case(where="nowhere", lines={_IN_STEP: f"{_SECOND}os.kill(os.getpid(), 9)"}, heals=False),
    "rank 0 votes no": Case(
        where="backward",
        lines={"# before": "if rank == 0:\n    print('began', file=open(os.environ['OUT'] + '.log', 'a'))"},
        heals=False,
    ),
}


def row(name: str, case: Case, world: int, folder: Path) -> tuple[str, bool]:
    """Return a row of the table, and whether it is as it should be."""
    source = source_of(case)
    healed = job(folder / "healed", case, world, source)
    told = [one for one in healed.outcomes if one is not None]
    ranks = [one["ranks"] for one in told if one.get("ranks")]
    times = [max((one[what] for one in ranks if one[what] is not None), default=None) for what in TIMES]
    if case.heals:
        fresh = job(folder / "fresh", case, world, changed(source, healed.diff), with_oomdoctor=False)
        is_same = None not in fresh.left and same(healed.left, fresh.left)
        ends = f"healed by {'; '.join(told[0]['fixes'])}" if told else "nothing to heal"
        is_right = healed.status == 0 and is_same
        ends += f", {world}/{world} the same" if is_right else f", NOT the same (status {healed.status})"
    else:
        is_right = healed.status != 0 and all(one["kind"] != "healed" for one in told)
        why = next((one["why"] for one in told), "each rank has its own error")
        ends = why.replace(str(folder), "")[:60] if is_right else "NOT as it should be"
    shown = "".join(f"{'' if one is None else f'{one:.2f}':>11}" for one in times)
    return f"{name:<28}{world:>6}{shown}{healed.took_s:>9.1f}  {ends}", is_right


TIMES = ("released_s", "agreed_s", "committed_s")
HEAD = f"{'case':<28}{'ranks':>6}{'released s':>11}{'agreed s':>11}{'commit s':>11}{'job s':>9}  end"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worlds", default="2,3,4")
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    lines, is_right = [HEAD], True
    print(HEAD, flush=True)
    for world in map(int, args.worlds.split(",")):
        for name in args.cases or CASES:
            with tempfile.TemporaryDirectory() as folder:
                line, is_as_it_should = row(name, CASES[name], world, Path(folder))
            print(line, flush=True)
            lines.append(line)
            is_right = is_right and is_as_it_should
    if args.write:
        RESULTS.write_text("\n".join([(__doc__ or "").strip(), "", *lines]) + "\n", encoding="utf-8")
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
