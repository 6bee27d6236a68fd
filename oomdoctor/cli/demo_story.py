"""The words of the demo: a case in its JSON form, told in a few rows.

Made from the same dict that ``--json`` prints, so what is told is what anybody else can read. Text is rich markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.markup import escape

from oomdoctor.model.sizes import format_size

_SHOWN_FIXES: Final = 4


def cell_line(name: str, elapsed_s: float, error: str | None) -> str:
    """Return the line for a cell that ended."""
    took = f"  {escape(name):<12}{elapsed_s:>7.1f} s"
    return f"{took}  [red]failed[/red] {escape(error)}" if error else took


def case_rows(case: dict[str, Any], losses: Sequence[float], *, is_new: bool) -> list[tuple[str, str]]:
    """Return what there is to say of ``case``, as heads and texts.

    Args:
        losses: those that the notebook has kept so far.
        is_new: whether its diagnosis has not been told yet.
    """
    rows = _diagnosis(case) if is_new else []
    return rows + (_outcome(case, losses) if case["outcome"]["kind"] != "offered" else [])


def _diagnosis(case: dict[str, Any]) -> list[tuple[str, str]]:
    incident, unchanged = case["incident"], case["unchanged"]
    asked = f"{_size(incident['requested'])} asked for on {incident['device']}, which has {_size(incident['total'])}"
    rows = [("what", f"{asked}{_where(incident['cell'])}")]
    for finding in case["findings"][:1]:
        rows.append(("why", f"{escape(finding['title'])} (rule {finding['rule']})"))
        rows += [("", escape(reason)) for reason in finding["because"]]
    if unchanged["peak"] is not None:
        rows.append(("", f"As it stands, the cell needs {_forecast(unchanged)} (estimate)"))
    for number, fix in enumerate(case["fixes"][:_SHOWN_FIXES], 1):
        effect, forecast = fix["effect"].replace("_", " "), fix["forecast"]
        longer = "" if forecast["slowdown"] is None else f", about {forecast['slowdown']:.2f} times as long"
        rows.append((f"fix {number}", f"[bold]{escape(_label(fix))}[/bold], {effect}: {_forecast(forecast)}{longer}"))
    return rows


def _outcome(case: dict[str, Any], losses: Sequence[float]) -> list[tuple[str, str]]:
    outcome = case["outcome"]
    if outcome["kind"] != "healed":
        return [("result", f"[red]{outcome['kind'].replace('_', ' ')}[/red] {escape(outcome['why'])}".rstrip())]
    fixes = escape(", ".join(outcome["fixes"]))
    rows = [("result", f"[green]healed[/green] by [bold]{fixes}[/bold], state {outcome['state']}")]
    forecasts = [fix["forecast"]["peak"] for fix in case["fixes"] if _label(fix) in outcome["fixes"]]
    if outcome["peak"] is not None and forecasts and forecasts[-1] is not None:
        off = f"{(forecasts[-1] - outcome['peak']) / outcome['peak']:+.1%}"
        rows.append(("", f"forecast peak {_size(forecasts[-1])}, measured {_size(outcome['peak'])} ({off})"))
    if losses:
        rows.append(("", f"loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at step {len(losses)}"))
    return rows


def _where(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    return f", by line {cell['line']} of In[{cell['number']}]: [bold]{escape(cell['source_line'])}[/bold]"


def _forecast(forecast: dict[str, Any]) -> str:
    if forecast["peak"] is None:
        return escape(forecast["refused"] or "no forecast")
    return f"{_size(forecast['peak'])} of {_size(forecast['budget'])}, {forecast['verdict']}"


def _label(fix: dict[str, Any]) -> str:
    """Return the label that ``Candidate.label`` gives it."""
    dose = ", ".join(f"{name}={value}" for name, value in fix["dose"].items())
    return f"{fix['id']}({dose})" if dose else str(fix["id"])


def _size(size_bytes: int | None) -> str:
    return "an unknown amount" if size_bytes is None else format_size(size_bytes)
