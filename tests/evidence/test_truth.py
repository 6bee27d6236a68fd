"""The census against a truth that knows nothing of names, graphs or the garbage collector.

For each program and moment: at least 99 % of the bytes that live have an owner, storage by storage, and no more than
1 % is found beyond them; at least 98 % of the bytes are in the right role; and whatever holds more than 1 % of the
memory has an expression that leads to it.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from capabilities import tells_saved
from covering import each_value
from truth_notebook import Moment, Notebook, judged, unwatched
from truth_programs import GELU, MLP, PROGRAMS, TRANSFORMER

import oomdoctor
from oomdoctor.model.memory import Census, Holding, Role
from oomdoctor.objects.storages import Graphs


@pytest.fixture(autouse=True)
def _nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put away what other tests left: the census counts every tensor of the process, and these have no name here."""
    for name in ("last_value", "last_exc", "last_traceback"):
        monkeypatch.delattr(sys, name, raising=False)
    gc.collect()
    gc.freeze()  # what is frozen, the garbage collector does not list


@pytest.mark.parametrize(("name", "moment"), each_value(PROGRAMS, Moment))
@tells_saved
def test_every_byte_has_an_owner_a_role_and_a_way_to_it(name: str, moment: Moment) -> None:
    seen = judged(PROGRAMS[name], moment)
    assert seen.faults() == []
    found = unwatched(PROGRAMS[name], moment)  # what only the graph holds is no Python object there
    assert seen.live - seen.lost == pytest.approx(found, rel=0.01)


@tells_saved
def test_a_census_that_passes_over_the_graph_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = judged(GELU, Moment.FAILED_FORWARD)
    monkeypatch.setattr(Graphs, "behind", lambda self, tensor, **_: None)
    assert any("no way to it" in fault for fault in judged(GELU, Moment.FAILED_FORWARD).faults())
    assert unwatched(GELU, Moment.FAILED_FORWARD) < 0.95 * seen.live


def largest(census: Census, role: Role) -> Holding:
    return max((one for one in census.holdings if one.role is role), key=lambda one: one.bytes)


def put(census: Census, old: Holding, *new: Holding) -> Census:
    """Return the census with ``new`` in the place of ``old``, and the totals that follow from it."""
    holdings = (*(one for one in census.holdings if one is not old), *new)
    roles = dict(census.roles)
    roles[old.role] -= old.bytes
    for one in new:
        roles[one.role] = roles.get(one.role, 0) + one.bytes
    found = census.found - old.bytes + sum(one.bytes for one in new)
    return replace(census, holdings=holdings, roles=tuple(roles.items()), found=found)


def counted_twice(census: Census) -> Census:
    old = largest(census, Role.ACTIVATION)
    return put(census, old, old, old)


def left_out(census: Census) -> Census:
    return put(census, largest(census, Role.ACTIVATION))


def in_another_role(census: Census) -> Census:
    old = largest(census, Role.PARAMETER)
    return put(census, old, replace(old, role=Role.BUFFER))


def roles_exchanged(census: Census) -> Census:
    """Exchange the roles of a parameter and a state of the same size: the totals stay as they were."""
    one = largest(census, Role.PARAMETER)
    other = next(held for held in census.holdings if held.role is Role.OPTIMIZER_STATE and held.bytes == one.bytes)
    return put(put(census, one, replace(one, role=other.role)), other, replace(other, role=one.role))


def given_to_another(census: Census) -> Census:
    """Give a storage to a holder of another one, which is there as well: the totals stay as they were."""
    one = largest(census, Role.PARAMETER)
    other = next(held for held in census.holdings if held.role is Role.OPTIMIZER_STATE and held.bytes == one.bytes)
    return put(census, one, replace(one, path=other.path, expression=other.expression))


def without_a_way(census: Census) -> Census:
    old = largest(census, Role.ACTIVATION)
    return put(census, old, replace(old, expression=None))


def to_a_wrong_place(census: Census) -> Census:
    old = largest(census, Role.ACTIVATION)
    return put(census, old, replace(old, expression="model"))


DISTORTIONS = (
    *(counted_twice, left_out, in_another_role, roles_exchanged, given_to_another, without_a_way, to_a_wrong_place),
)


@pytest.mark.parametrize("distort", DISTORTIONS)
@tells_saved
def test_a_wrong_census_is_found_out(distort: Callable[[Census], Census]) -> None:
    assert judged(MLP, Moment.FAILED_BACKWARD, distort).faults()


@tells_saved
def test_a_real_failure_on_the_virtual_accelerator_is_accounted_for() -> None:
    cells = tuple(one.replace("randn(16, 48, 64)", "randn(256, 48, 64)") for one in TRANSFORMER.cells)

    def judge(notebook: Notebook, census: Census, frames: object) -> Census:
        return census

    notebook = Notebook(replace(TRANSFORMER, cells=cells), None, judge)
    with oomdoctor.simulate("64MiB") as accelerator:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            notebook.run()
        notebook.look_back(caught.value)
        allocated = accelerator.read().allocated
    notebook.close()
    census = notebook.seen
    assert census.device == accelerator.name
    assert census.allocated == allocated
    assert 0.99 * allocated <= census.found <= allocated
    assert census.bytes_of(Role.ACTIVATION) > 0.5 * allocated


def test_a_report_keeps_nothing_alive_in_the_code_that_runs() -> None:
    def step() -> tuple[bool, bool]:
        hidden = torch.ones(64)
        storage = weakref.ref(hidden.untyped_storage())
        oomdoctor.report({})
        was_there = storage() is not None
        del hidden
        return was_there, storage() is None

    gc.disable()  # memory must not wait for the garbage collector
    try:
        assert step() == (True, True)
    finally:
        gc.enable()
