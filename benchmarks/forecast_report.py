"""What the rows of ``forecast.py`` say: errors, savings, the margins that they call for, and the page of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CONVOLUTION", "NONE", "RECURRENT", "RESULTS", "error", "fix_savings", "margins", "report"]

RESULTS = Path(__file__).parent / "results"
LEAST_SAVING = 0.01
NONE, CONVOLUTION, RECURRENT = "no such kernels", "convolutions", "fused recurrent layers"

Row = dict[str, Any]


def error(row: Row) -> float:
    return row["forecast"] / row["measured"] - 1


def savings(rows: Iterable[Row]) -> Iterator[tuple[str, float, float]]:
    """Yield what the variants save: a label, the share of the peak that is saved, and the error of its forecast."""
    rows = list(rows)
    plain = {(row["family"], row["optimizer"]): row for row in rows if row["variant"] == "fp32"}
    for row in rows:
        base = plain.get((row["family"], row["optimizer"]))
        if row["variant"] != "fp32" and base is not None:
            label = f"{row['family']}, {row['optimizer']}, {row['variant']}"
            yield from _saving(label, base["forecast"], row["forecast"], base["measured"], row["measured"])


def fix_savings(rows: Iterable[Row]) -> Iterator[tuple[str, float, float]]:
    """Yield what the fixes save, as ``savings`` does."""
    for row in rows:
        if "measured" in row:
            yield from _saving(f"{row['fix']}({row['dose']}), {row['program']}", *row["forecast"], *row["measured"])


def _saving(
    label: str, before: int, after: int, truly_before: int, truly_after: int
) -> Iterator[tuple[str, float, float]]:
    saved = truly_before - truly_after
    if saved >= LEAST_SAVING * truly_before:
        yield label, saved / truly_before, (before - after) / saved - 1


def summary(errors: Sequence[float]) -> str:
    """Return the median, the 95 % quantile and the worst of the sizes of errors."""
    if not errors:
        return "no cases"
    sizes = sorted(map(abs, errors))
    quantile = sizes[math.ceil(0.95 * len(sizes)) - 1]
    worst = max(errors, key=abs)
    return f"{len(sizes)} cases: median {statistics.median(sizes):.2%}, 95 % within {quantile:.2%}, worst {worst:+.2%}"


def margins(rows: Iterable[Row]) -> dict[str, float]:
    """Return how far forecasts were too low at most, by what kernels the model has."""
    found: dict[str, float] = {}
    for row in rows:
        found[row["kernels"]] = max(found.get(row["kernels"], 0.0), 1 - row["forecast"] / row["measured"])
    return found


def report(kept: dict[str, Any]) -> str:
    """Return the results as a page."""
    rows, fixed = [row for row in kept["models"] if "why" not in row], kept["fixes"]
    lines = [
        kept["machine"],
        "",
        f"{'family':12} {'optimizer':9} {'variant':13} {'measured':>12} {'error':>8} margin  kitsune",
    ]
    for row in rows:
        real = row["model"] + row["measured"]
        other = f"{row['kitsune'] / real - 1:+8.0%}" if row["kitsune"] else f"  {row['kitsune_why']}"
        lines.append(
            f"{row['family']:12} {row['optimizer']:9} {row['variant']:13} {row['measured']:>12,} {error(row):+8.2%}"
            f" {row['margin']:6.0%} {other}"
        )
    refused = [row for row in kept["models"] if "why" in row]
    lines += [f"{row['family']:12} {row['optimizer']:9} {row['variant']:13} {row['why']}" for row in refused]
    lines += ["", f"forecast: {summary([error(row) for row in rows])}"]
    recurrent = [error(row) for row in rows if row["family"] in ("LSTM", "GRU", "RNN")]
    lines.append(f"  recurrent: {summary(recurrent)}")
    lines += [f"  {key}: at most {low:.2%} too low" for key, low in sorted(margins(rows).items())]
    found = list(savings(rows))
    lines.append(f"savings of variants: {summary([wrong for _, _, wrong in found])}")
    others = [row["kitsune"] / (row["model"] + row["measured"]) - 1 for row in rows if row["kitsune"]]
    ours = [(row["forecast"] - row["measured"]) / (row["model"] + row["measured"]) for row in rows if row["kitsune"]]
    lines.append(f"torch-kitsune, model and rise: {summary(others)}")
    lines.append(f"  the forecast in these terms: {summary(ours)}")
    lines += ["", f"{'fix':46} {'program':16} {'saves':>7} {'error of the saving':>20}"]
    for row in fixed:
        name = f"{row['fix']}({row['dose']})"
        if "why" in row:
            lines.append(f"{name:46} {row['program']:16} not forecast: {row['why']}")
        for _, share, wrong in fix_savings([row]):
            lines.append(f"{name:46} {row['program']:16} {share:7.1%} {wrong:+20.2%}")
    lines += ["", f"savings of fixes: {summary([wrong for _, _, wrong in fix_savings(fixed)])}"]
    took = sorted(row["took_s"] for row in rows)
    lines += [
        f"a forecast took {statistics.median(took):.1f} s at the median, {took[-1]:.1f} s at most" if took else ""
    ]
    return "\n".join(lines) + "\n"
