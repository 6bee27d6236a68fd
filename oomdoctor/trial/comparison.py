"""The unchanged program on so many rows and steps, and what changed ones leave beside it.

There is a run of the unchanged program, one of the changed one, and where they differ some of the unchanged program
begun a last digit off, which show how far rounding carries. ``runs`` makes them, ``differences`` compares their ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from oomdoctor.model.fix import Effect
from oomdoctor.model.plan import Trial
from oomdoctor.model.session import Attempt, Session
from oomdoctor.objects.leaves import ANOTHER_NAME, RANDOM, Leaf
from oomdoctor.program.compiled import Site, global_names
from oomdoctor.program.definitions import bound_in_other_loops, read
from oomdoctor.program.magics import mask
from oomdoctor.program.names import bound_names
from oomdoctor.program.regions import regions
from oomdoctor.trial.differences import (
    Difference,
    differences,
    is_blurred,
    is_setting,
    is_unsteady,
    root_of,
    rounding,
    shown,
    why_of,
)
from oomdoctor.trial.later_steps import shown as shown_sites
from oomdoctor.trial.run import End, Terms
from oomdoctor.trial.runs import Runs, Ways
from oomdoctor.trial.setup import Stage

_LARGE: Final = 20_000_000
"""Numbers in a model's parameters: a step multiplies by each several times, for every token or place."""
_ROWS_OF_LARGE: Final = 3
_FEW_STEPS: Final = 2
_MOST_STEPS: Final = 8
_FASTER: Final = 4
"""How many times as many rows, or steps of whole batches, a wider comparison takes."""
_ALL: Final = 1 << 30
_TURNS: Final = 2
"""Turns that a loop makes where later steps are looked for, so that the numbers that it counts by move."""
_SINCE: Final = 1
"""Steps after which expressions come to another value."""
_LATER_S: Final = 20.0
"""Time in which expressions are tried in later steps, one after the other."""
_UNKNOWN: Final = Trial(same=None)
_CONTROLS: Final = 3
"""How often the unchanged program is begun a last digit off, where something differs by little more than that makes."""
_FAR: Final = 1e-3
"""Relative difference that is told with what differs, though the control differs as much."""


class _NotRun(Exception):
    """A further run that would tell what a difference is could not be made."""


@dataclass(kw_only=True, eq=False)
class Comparison:
    """The unchanged program on so many rows, and what others leave beside it. For others see ``compare.compare``.

    Attributes:
        runs: makes the runs; ``ways``: the changed programs.
        rows: how many of a batch are taken; ``steps``: of an optimizer.
        large: numbers in a model's parameters above which it has to do with ``_ROWS_OF_LARGE``; None: with all.
        is_precise: whether autocast is left off.
        turned: expressions that come to another value than they had; ``since``: after so many steps.
        took_s: how long it took to compare the last one, the run of the unchanged program included.
    """

    session: Session
    stage: Stage
    runs: Runs
    ways: Ways
    before: Attempt
    effect: Effect
    leaves: tuple[str, ...]
    rows: int
    steps: int = _FEW_STEPS
    large: int | None = _LARGE
    is_precise: bool = False
    turned: frozenset[tuple[Site, Any]] = frozenset()
    since: int = 0

    def __post_init__(self) -> None:
        self.took_s = self._waited_s = 0.0
        self._known: dict[Attempt, Trial] = {}
        self.runs.forget()

    @cached_property
    def _unchanged(self) -> End:
        """What the unchanged program leaves; it is run on fewer rows where a model is large."""
        begun, end = time.monotonic(), self._ended(self.before, large=self._large)
        if end.is_large:
            self.rows = _ROWS_OF_LARGE
            self.runs.forget()
            end = self._ended(self.before)
        self._waited_s = time.monotonic() - begun
        return end

    @property
    def _large(self) -> int | None:
        return self.large if self.rows > _ROWS_OF_LARGE else None

    @cached_property
    def _lines(self) -> frozenset[str]:
        """The lines of the unchanged program, and of the user's files: its loops begin on them."""
        told = (*self.before.replays, self.before.source, *(one.source for one in self.session.cells.modules))
        return frozenset(self.stage.lines.union(line.strip() for text in told for line in text.splitlines()))

    @cached_property
    def _mentioned(self) -> set[str]:
        """The names of the notebook that a cell binds or reads."""
        history = (cell.source for cell in self.session.cells.history)
        told = [*self.before.replays, self.before.source, *history]
        return {name for text in told for name in global_names(mask(text).text)}

    @property
    def is_whole(self) -> bool:
        """Whether whole batches are taken."""
        return self.rows >= self._unchanged.rows

    def wider(self) -> Comparison | None:
        """Return one of more rows, or of more steps where the batches are whole; None where this is all there is."""
        if not self.is_whole:
            return replace(self, rows=self.rows * _FASTER, large=None)
        is_all = not self._unchanged.was_cut or self.steps >= _MOST_STEPS
        return None if is_all else replace(self, steps=min(self.steps * _FASTER, _MOST_STEPS))

    def in_later_steps(self, after: Attempt, trial: Trial) -> Trial:
        """Return what comes of a changed program that leaves the same, in steps that the trial does not come to.

        Each expression is turned by itself: one that raises, or ends a loop, hides what follows it. What another one
        lets be seen is turned beside it.
        """
        unchanged, until = self._unchanged, time.monotonic() + _LATER_S
        if not unchanged.was_cut and self.is_whole:
            return trial
        since = _SINCE if unchanged.steps > _SINCE else 0
        noted = self._ended(self.before, turns=_TURNS).still
        waiting, met = [frozenset([one]) for one in noted.items()], set(noted)
        same, unseen = list[Site](), list[Site]()
        for turned in waiting:  # it grows on the way
            later, sites = replace(self, turned=turned, since=since), [site for site, _ in turned]
            is_tried = time.monotonic() < until and later._goes_on(unchanged)
            found = later.of(after) if is_tried else _UNKNOWN
            if found.same is False:
                return replace(found, why=f"as later steps may go ({shown_sites(sites)}), {found.why}")
            (same if found.same else unseen).extend(sites)
            if found.same:
                others = [one for one in later._unchanged.still.items() if one[0] not in met]
                met.update(site for site, _ in others)
                waiting += [turned | {one} for one in others]
        told = [f"so are later steps ({shown_sites(same)})"] if same else []
        told += [f"later steps were not tried ({shown_sites(unseen)})"] if unseen else []
        return replace(trial, basis="; ".join([trial.basis, *told]))

    def _goes_on(self, first: End) -> bool:
        """Tell whether the unchanged program runs on, as in ``first``: what raises leaves half of a step."""
        return not self._unchanged.is_ours and self._unchanged.error == first.error

    @cached_property
    def _without_autocast(self) -> Comparison:
        return replace(self, is_precise=True)

    @cached_property
    def _whole(self) -> Comparison:
        return replace(self, rows=_ALL, large=None)

    def of(self, after: Attempt) -> Trial:
        """Return what comes of a changed program."""
        if after not in self._known:
            begun = time.monotonic() - self._waited_s
            try:
                self._known[after] = self._compared(after)
            except _NotRun as why:
                self._known[after] = Trial(same=None, why=str(why))
            self.took_s = time.monotonic() - begun
        return self._known[after]

    def _compared(self, after: Attempt) -> Trial:
        own = self._own(after)
        given: dict[str, Any] = {"without": own}
        self._ahead(self.before, large=self._large)
        self._ahead(after, **given, large=self._large)
        if self._known:  # one was refuted, and the next may be
            self._ahead_of_following()
        unchanged = self._unchanged
        if self.effect is not Effect.EXACT:
            self._ahead(self.before, **self._otherwise(nudged=1))
        if unchanged.error is not None and not self.is_whole:  # its batches may have to be of one size
            return self._whole.of(after)
        on_host = self.stage.copies is not None  # a kernel may be missing there
        if unchanged.error is not None and (unchanged.is_ours or not unchanged.computes or on_host):
            return Trial(same=None, why=f"the unchanged cell could not be tried: {unchanged.error}")
        changed = self._ended(after, **given, large=self._large)
        if changed.is_large:  # what it calls is not what the unchanged program calls
            changed = self._ended(after, **given)
        self.runs.until = math.inf  # from here on, what is late would be taken for a difference
        if (trial := self._of_unlike_runs(after, changed)) is not None:
            return trial
        left = {path: leaf for path, leaf in unchanged.leaves.items() if root_of(path) not in own}
        found = self._beyond_rounding(left, changed.leaves)
        if found is None:
            return Trial(same=None, why="rounding alone changes what the cell leaves")
        beside, excused = self._of_parts(after, left, found)
        found = [one for one in found if one.path not in excused]
        if any(left[one.path].is_of_library for one in found):
            self._ahead(after, **given, begins=True)
            ends = self._again(begins=True), self._tried(self._ended(after, **given, begins=True))
            begun = ends[0].begun, ends[1].begun
            excused |= {one.path for one in found if is_setting(one.path, left[one.path], *begun)}
            found = [one for one in found if one.path not in excused]
        if found:  # a clock or an id is another in each run
            self._ahead_of_following()
            again = self._again().leaves
            unsteady = {one.path for one in found if is_unsteady(one.path, left, changed.leaves, again)}
            if any(left[path].is_gradient for path in unsteady):
                return Trial(same=None, why="the cell computes other gradients each time it runs")
            excused |= unsteady
            found = [one for one in found if one.path not in excused]
        if found:
            draws = any(left[one.path].frame == RANDOM for one in found)
            return Trial(same=False, basis=self._basis(), why=why_of(found), beside=tuple(sorted(beside)), draws=draws)
        kept = {path: leaf for path, leaf in left.items() if path not in excused}
        basis = f"{self._basis()}, {self._equal(kept, changed.leaves)}"
        return Trial(same=True, basis=basis, beside=tuple(sorted(beside)))

    def _of_unlike_runs(self, after: Attempt, changed: End) -> Trial | None:
        """Return what comes of it where the two runs cannot be compared by what they leave, None where they can."""
        unchanged = self._unchanged
        if changed.is_ours or (self.stage.copies is not None and changed.error is not None):
            return Trial(same=None, why=f"the changed cell could not be tried: {changed.error}")
        is_idle = not unchanged.trains and bool(regions(read(self.session.cells)))
        has_shown = not is_idle and (unchanged.steps or not unchanged.trains)
        if unchanged.error is not None and (changed.error != unchanged.error or not has_shown):
            return Trial(same=None, why=f"the unchanged cell could not be tried: {unchanged.error}")
        if changed.error != unchanged.error:
            return Trial(same=False, basis=self._basis(), why=f"the changed cell raises {changed.error}")
        if (is_idle or changed.rows != unchanged.rows) and not self.is_whole:  # it takes others, or none so small
            return self._whole.of(after)
        if is_idle:
            return Trial(same=None, why="the cell takes no step on the batches that were tried")
        if unchanged.computes_in_16_bits and not self.is_precise and self.effect is not Effect.EXACT:
            precise = self._without_autocast.of(after)
            return precise if precise.same is False else None
        return None

    def _of_parts(
        self, after: Attempt, left: Mapping[str, Leaf], found: Sequence[Difference]
    ) -> tuple[set[str], set[str]]:
        """Return the names that are of the last part alone afterwards, and the paths that may differ for it."""
        of_part = bound_in_other_loops(after.source, self._lines)
        rows = {one.path: root_of(one.path) for one in found if one.is_rows}
        beside = {root for path, root in rows.items() if path == root or root in of_part}
        others = (leaf for path, leaf in left.items() if leaf.frame == ANOTHER_NAME and root_of(path) not in of_part)
        shared = tuple(leaf.exact.removeprefix("is ") for leaf in others)
        below = {one.path for one in found if root_of(one.path) in beside & of_part and left[one.path].is_tensor}
        of_its = {path for path in below if not path.startswith(shared)}  # what others lead to is not its own
        return beside, beside | of_its | {one.path for one in found if one.path.endswith(self.leaves)}

    def _equal(self, left: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> str:
        """Say how far two ends are the same."""
        size, path = rounding(left, after)
        if size > _FAR:  # by what is the same each time: no clock
            again = self._again().leaves
            left = {path: leaf for path, leaf in left.items() if again.get(path) == leaf}
            size, path = rounding(left, after)
        far = f" (`{shown(path)}`, which rounding alone moves as far)" if size > _FAR else ""
        return "bit for bit" if not size else f"up to {size:.1g} of the largest value{far}"

    def _beyond_rounding(self, left: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> list[Difference] | None:
        """Return what differs by more than rounding, None where that alone changes too much of what is left."""
        found, controls = list(differences(left, after, None)), list[Mapping[str, Leaf]]()
        while found and self.effect is not Effect.EXACT and len(controls) < _CONTROLS:
            if controls and not any(one.size is not None and one.size <= _FAR for one in found):
                break
            at = len(controls) + 1
            for nudged in (at, 0, at + 1)[: 2 if at == _CONTROLS else 3]:
                self._ahead(self.before, **self._otherwise(nudged=nudged))
            if controls:
                self._ahead_of_following()
            control = self._again(nudged=at)
            if is_blurred(left, control.leaves):
                return None
            controls.append(control.leaves)
            found = list(differences(left, after, controls))
        return found

    def _own(self, after: Attempt) -> frozenset[str]:
        """Return the names that the change makes and no cell mentions: an earlier retry may have left them."""
        bound = {name for text in (*after.replays, after.source) for name in bound_names(text)}
        return frozenset(bound - self._mentioned)

    def _again(self, **otherwise: Any) -> End:
        """Run the unchanged program once more, as ``_otherwise`` says.

        Raises:
            _NotRun: it could not be run.
        """
        return self._tried(self._ended(self.before, **self._otherwise(**otherwise)))

    def _tried(self, end: End) -> End:
        if end.is_ours:
            raise _NotRun(f"the cell could not be tried once more: {end.error}")
        return end

    def _otherwise(self, *, nudged: int = 0, begins: bool = False) -> dict[str, Any]:
        """Return the terms of another run of the unchanged program. See ``Terms``.

        What it is begun otherwise for is told by that alone; where that is nothing, its clock goes faster.
        """
        is_coarse, ticks = self._unchanged.computes_in_16_bits, 1 if nudged or begins else 3
        return {"is_coarse": is_coarse, "nudged": nudged, "begins": begins, "ticks": ticks}

    def _ended(self, attempt: Attempt, **given: Any) -> End:
        return self.runs.end_of(attempt, self._terms(**given))

    def _ahead(self, attempt: Attempt, **given: Any) -> None:
        self.runs.ahead(attempt, self._terms(**given))

    def _ahead_of_following(self) -> None:
        """Begin the run of the way that is tried next where this one leaves another end."""
        if self.runs.goes_ahead and (other := self.ways.following) is not None:
            self._ahead(other, without=self._own(other), large=self._large)

    def _terms(self, **given: Any) -> Terms:
        given |= {"turned": self.turned, "turns": _TURNS, "since": self.since} if self.turned else {}
        return Terms(rows=self.rows, steps=self.steps, known=self._lines, is_precise=self.is_precise, **given)

    def _basis(self) -> str:
        unchanged = self._unchanged
        steps = f"{unchanged.steps} step{'s' * (unchanged.steps != 1)}" if unchanged.steps else "a run"
        taken = min(self.rows, unchanged.rows)
        return f"{steps} of {taken} rows" if taken else steps
