"""Every fix on every model family: it heals and keeps its promises, or it refuses with a reason.

``make test`` has every fix make its offer to every family, and takes it to a few; ``make test-all`` takes all pairs.
One table, ``settings``, says what cannot be derived; no test here is about one fix alone, save those that sabotage one
to show that the checks would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from covering import few
from models import FAMILIES
from promises import Outcome, check, offer
from settings import DEFAULT, SETTINGS
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomdoctor import fixes
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch
from oomdoctor.model.session import Cells, Session
from oomdoctor.model.unavailable import Refused


def fix_of(fix_id: str) -> Fix:
    return fixes.get(fix_id)


@cache
def outcome_of(fix_id: str, family: str) -> Outcome:
    return check(fix_of(fix_id), FAMILIES[family], SETTINGS.get(fix_id, DEFAULT))


PAIRS = [(fix_id, family) for fix_id in fixes.ids() for family in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_fix_makes_an_offer_or_refuses_with_a_reason(family: str) -> None:
    for fix_id in fixes.ids():
        offered = offer(fix_of(fix_id), FAMILIES[family])
        if isinstance(offered, Outcome):
            check_refusals(fix_id, family, offered)


@pytest.mark.parametrize(
    ("fix_id", "family"), few(PAIRS, [pair for pair in PAIRS if pair[1] in SETTINGS.get(pair[0], DEFAULT).shown])
)
def test_a_fix_heals_or_refuses_with_a_reason(fix_id: str, family: str) -> None:
    check_refusals(fix_id, family, outcome_of(fix_id, family))


def check_refusals(fix_id: str, family: str, outcome: Outcome) -> None:
    refuses, heals = SETTINGS.get(fix_id, DEFAULT).refuses, SETTINGS.get(fix_id, DEFAULT).heals
    if refuses is None:
        assert outcome.forms or family not in heals, f"{fix_id} refused: {outcome.refusals}"
        return
    expected = [part for part, families in refuses.items() if family in families]
    if not expected:
        assert outcome.forms, f"{fix_id} refused: {outcome.refusals}"
    else:
        assert not outcome.forms, f"{fix_id} was expected to refuse: {expected}"
        assert any(part in why for part in expected for why in outcome.refusals), (fix_id, outcome.refusals)


@pytest.mark.parametrize("fix_id", fixes.ids())
@pytest.mark.parametrize("tried", few(["shown", "all"], ["shown"]))
def test_a_fix_heals_a_family_or_the_table_says_why_none(fix_id: str, tried: str) -> None:
    if fix_of(fix_id).effect is Effect.ADVICE:
        return
    settings = SETTINGS.get(fix_id, DEFAULT)
    outcomes = {family: outcome_of(fix_id, family) for family in (settings.shown if tried == "shown" else FAMILIES)}
    heals = [family for family, outcome in outcomes.items() if outcome.forms]
    if settings.elsewhere:
        assert not heals, "the table says that no family can show it"
    else:
        assert heals, "\n".join(f"{family}: {' / '.join(outcome.refusals)}" for family, outcome in outcomes.items())


def test_the_table_knows_its_fixes_and_families() -> None:
    assert SETTINGS.keys() <= set(fixes.ids())
    for settings in SETTINGS.values():
        named = [family for families in (settings.refuses or {}).values() for family in families]
        assert set(named) <= FAMILIES.keys()
        assert len(named) == len(set(named)), "a family is refused for one reason"
        assert {*settings.tolerance, *settings.heals, *settings.shown} <= FAMILIES.keys()
        assert not (settings.heals and settings.refuses)


# Sabotage: what a fix could do wrong, and the check that notices ----------------------------------------------------


def sabotaged_source(fix_id: str, old: str, new: str) -> Fix:
    """Return a fix whose patch has ``new`` where ``old`` stood, and no other form."""
    fix = fix_of(fix_id)

    def patch(*args: Any) -> Patch | Refused:
        made = fix.patch(*args)
        if isinstance(made, Refused):
            return made
        assert any(old in edit.after for edit in made.edits)
        return Patch(
            edits=tuple(
                replace(edit, after=edit.after.replace(old, new), replay=edit.replay.replace(old, new))
                for edit in made.edits
            )
        )

    return replace(fix, patch=patch, apply=None, ways=())


def admitted(fix: Fix, family: str) -> None:
    outcome = check(fix, FAMILIES[family], SETTINGS.get(fix.id, DEFAULT))
    assert outcome.forms, outcome.refusals


def noticed(fix: Fix, family: str, by: str) -> None:
    with pytest.raises(AssertionError, match=by):
        admitted(fix, family)


@pytest.mark.parametrize(
    ("fix_id", "family", "old", "new", "by"),
    [
        pytest.param("micro_batch", "mlp", " * (len(micro_x) / len(x))", "", "the trial: ", id="no division"),
        pytest.param(
            *("micro_batch", "mlp", "zip(x.chunk(2), y.chunk(2), strict=True)", "[(x.chunk(2)[0], y.chunk(2)[0])]"),
            *("the trial: ",),
            id="last part",
        ),
        pytest.param(
            "checkpoint_blocks",
            "gpt",
            "model = ",
            "torch.rand(1)\nmodel = ",
            "not bit for bit the same",
            id="other draws",
        ),
        pytest.param("detach_history", "history", "val_loss.detach()", "(val_loss)", "are not enough", id="no use"),
    ],
)
def test_a_sabotaged_patch_is_noticed(fix_id: str, family: str, old: str, new: str, by: str) -> None:
    noticed(sabotaged_source(fix_id, old, new), family, by)


def test_a_patch_that_can_be_made_again_is_noticed() -> None:
    fix = fix_of("chunked_forward")

    def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
        made = fix.patch(cells, evidence, dose)
        if isinstance(made, Patch):
            return made
        source = cells.failing.source
        return Patch(edits=(Edit(cell=cells.failing.number, before=source, after=f"{source}\n", replay=source),))

    noticed(replace(fix, patch=patch, apply=None), "mlp", "patching the patched cells again")


def test_advice_that_is_not_python_is_noticed() -> None:
    fix = fix_of("chunked_forward")

    def propose(*args: Any) -> Any:
        made = fix.propose(*args)
        return (
            made if isinstance(made, Refused) else tuple(replace(one, effect=Effect.ADVICE, caveat="-") for one in made)
        )

    broken = replace(sabotaged_source("chunked_forward", "in_parts(", "in_parts("), propose=propose)
    assert check(broken, FAMILIES["mlp"], DEFAULT).forms == ()
    noticed(replace(sabotaged_source("chunked_forward", "in_parts(", "in_parts(("), propose=propose), "mlp", "Python")


Leave = Callable[[Session], Callable[[], None]]
"""Changes something and returns what undoes it."""


def forward_hook(session: Session) -> Callable[[], None]:
    return session.modules[0][1].register_forward_hook(lambda *args: None).remove


def parameter_hook(session: Session) -> Callable[[], None]:
    parameter = next(session.modules[0][1].parameters())
    return parameter.register_post_accumulate_grad_hook(lambda _: None).remove


def optimizer_hook(session: Session) -> Callable[[], None]:
    return session.optimizers[0][1].register_step_post_hook(lambda *args: None).remove


def global_hook(session: Session) -> Callable[[], None]:
    return nn.modules.module.register_module_forward_hook(lambda *args: None).remove


def flag(session: Session) -> Callable[[], None]:
    model = session.modules[0][1]
    model.recomputes = True
    return lambda: delattr(model, "recomputes")


def group(session: Session) -> Callable[[], None]:
    settings = session.optimizers[0][1].param_groups[0]
    settings["foreach"] = False
    return lambda: settings.update(foreach=None)


def loader_workers(session: Session) -> Callable[[], None]:
    loader = session.loaders[0][1]
    object.__setattr__(loader, "prefetch_factor", 1)
    return lambda: object.__setattr__(loader, "prefetch_factor", None)


def class_method(session: Session) -> Callable[[], None]:
    original = torch.Tensor.backward
    torch.Tensor.backward = lambda *args, **kwargs: original(*args, **kwargs)  # type: ignore[method-assign]
    return lambda: setattr(torch.Tensor, "backward", original)


LEFT: list[Leave] = [
    forward_hook,
    parameter_hook,
    optimizer_hook,
    global_hook,
    flag,
    group,
    loader_workers,
    class_method,
]


@contextmanager
def recomputed_in_parts(model: Any, parts: int) -> Iterator[None]:
    forward = model.forward
    model.forward = lambda x: torch.cat([checkpoint(forward, part, use_reentrant=False) for part in x.chunk(parts)])
    try:
        yield
    finally:
        del model.forward


@pytest.mark.parametrize("only_by_exception", [False, True])
@pytest.mark.parametrize("leave", LEFT)
def test_what_a_live_form_leaves_behind_is_noticed(leave: Leave, only_by_exception: bool) -> None:
    left: list[Callable[[], None]] = []

    @contextmanager
    def applied(session: Session, dose: Any) -> Iterator[None]:
        undo = leave(session)
        try:
            with recomputed_in_parts(session.modules[0][1], dose.number("chunks")):
                yield
        except BaseException:
            left.append(undo)
            raise
        if only_by_exception:
            undo()
        else:
            left.append(undo)

    refused = Refused("only the live form is looked at")
    sabotaged = replace(fix_of("chunked_forward"), apply=applied, patch=lambda *args: refused)
    try:
        noticed(sabotaged, "mlp", "OutOfMemoryError" if only_by_exception else "left normally")
    finally:
        for undo in left:
            undo()


def test_a_reason_that_is_no_sentence_is_noticed() -> None:
    noticed(replace(fix_of("micro_batch"), propose=lambda *args: Refused("no")), "mlp", "not a sentence")
