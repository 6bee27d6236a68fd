"""What the step of each optimizer is like, as its dictionaries tell."""

from __future__ import annotations

import pytest
import torch
from observed import facts

from oomdoctor.evidence import _models
from oomdoctor.model.code import OptimizerFacts
from oomdoctor.model.session import Cell, Cells

CELLS = Cells(history=(Cell(number=1, source="optimizer.step()"),))


def of(optimizer: torch.optim.Optimizer) -> OptimizerFacts:
    (found,) = facts(CELLS, {"optimizer": optimizer}, (), [("optimizer", optimizer)], loaded=()).steppers
    return found


def weights(device: str = "cpu") -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(size, device=device)) for size in (3, 5)]


def test_sizes_and_home() -> None:
    found = of(torch.optim.AdamW(weights()))
    assert (found.path, found.type_name, found.home) == ("optimizer", "AdamW", "torch.optim.adamw")
    assert (found.parameter_bytes, found.largest_bytes) == (32, 20)


@pytest.mark.parametrize(
    ("options", "foreach"),
    [({}, False), ({"foreach": True}, True), ({"foreach": False}, False), ({"fused": True}, False)],
)
def test_an_option_that_is_given_decides_on_the_cpu(options, foreach) -> None:
    assert of(torch.optim.Adam(weights(), **options)).foreach is foreach


@pytest.mark.parametrize(("options", "foreach"), [({}, True), ({"foreach": False}, False), ({"fused": True}, False)])
def test_on_some_devices_the_foreach_form_is_taken_unless_told_otherwise(monkeypatch, options, foreach) -> None:
    optimizer = torch.optim.Adam(weights("meta"))
    assert not of(optimizer).foreach
    monkeypatch.setattr(_models, "_FOREACH_DEVICES", frozenset({"meta"}))  # a device that every machine has
    optimizer.param_groups[0].update(options)
    assert of(optimizer).foreach is foreach


def test_the_devices_of_the_foreach_form_are_those_of_this_torch() -> None:
    devices = {*torch.utils._foreach_utils._get_foreach_kernels_supported_devices(), "mtia"}  # older ones lack that
    assert devices - {torch._C._get_privateuse1_backend_name()} == _models._FOREACH_DEVICES


def test_an_optimizer_without_the_option_has_no_such_form() -> None:
    assert not of(torch.optim.LBFGS(weights())).foreach
