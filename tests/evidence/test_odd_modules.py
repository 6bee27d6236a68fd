"""Facts of modules that are nested deep, hold one another in a circle, or hold what no module should."""

from __future__ import annotations

from typing import Any

import torch
from observed import facts

from oomdoctor.evidence import _models
from oomdoctor.model.session import Cell, Cells

DEEP = 3000


def _nested(depth: int) -> torch.nn.Module:
    module: torch.nn.Module = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for _ in range(depth):
        module = torch.nn.Sequential(module)
    return module


def test_modules_nested_thousands_deep() -> None:
    model = _nested(DEEP)
    (facts,) = _models.models([("model", model)])
    inner = ".".join("0" * DEEP)
    assert facts.dropout == (f"{inner}.0",)
    assert facts.batch_norm == (f"{inner}.2",)
    assert facts.parameter_bytes == 4 * (4 + 2 + 2 + 2)
    assert len(_models.parameters([model])) == 4


def test_the_order_and_the_paths_are_those_of_torch() -> None:
    shared = torch.nn.Dropout(0.1)
    model = torch.nn.ModuleDict({"b": torch.nn.Sequential(shared, torch.nn.Dropout(0.2)), "a": shared, "c": _nested(2)})
    (facts,) = _models.models([("model", model)])
    expected = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Dropout)]
    assert list(facts.dropout) == expected == ["b.0", "b.1", "c.0.0.0"]


def test_a_circle_ends() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.1))
    model[0]._modules["up"] = model
    (facts,) = _models.models([("model", model)])
    assert facts.dropout == ("0",)


def test_attributes_of_other_kinds_are_passed_over_and_none_of_their_code_runs() -> None:
    ran = []

    class Odd:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            ran.append("asked for its class")
            return dict

        def __getattr__(self, name: str) -> Any:
            ran.append(name)
            raise AttributeError(name)

        __float__ = __bool__ = __len__ = __iter__ = lambda self: ran.append("used")

    class Register(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            ran.append("items")
            return ()

        values = get = items

    model = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].__dict__.update(p=Odd(), dropout=0.3)
    model[1].__dict__.update(training=Odd(), _modules=Odd(), _parameters=Register(model[1]._parameters))
    loss = torch.nn.CrossEntropyLoss()
    loss.__dict__.update(reduction=Odd(), ignore_index=Odd(), _buffers=Odd())
    (facts,) = _models.models([("model", model)])
    assert (facts.dropout, facts.batch_norm) == (("0",), ("2",))
    assert facts.parameter_bytes == 4 * (4 + 2 + 2 + 2)
    (found,) = _models.losses([("loss", loss)])
    assert (found.reduction, found.ignore_index) == (None, None)
    assert ran == []


def test_lazy_modules_have_parameters_of_no_size_as_yet() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=None)
    cells = Cells(history=(Cell(number=1, source="model(x)"),))
    found = facts(cells, {"model": model, "optimizer": optimizer}, [("model", model)], [("optimizer", optimizer)])
    assert found.models[0].parameter_bytes == 4 * (16 + 2)
    assert found.models[0].batch_norm == ("1",)
    assert found.steppers[0].parameter_bytes == found.models[0].parameter_bytes
    assert not found.half_weights
    model(torch.randn(4, 3))
    assert facts(cells, {}, [("model", model)]).models[0].parameter_bytes == 4 * (24 + 8 + 16 + 16 + 2)
