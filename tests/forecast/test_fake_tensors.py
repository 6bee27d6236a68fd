"""What the fake mode makes again from a note is what it worked out the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from oomdoctor.forecast import fake_tensors
from oomdoctor.forecast.fake_tensors import Fakes


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensors, "_noted", {})
    monkeypatch.setattr(fake_tensors, "_own", [])


def made_in(mode: FakeTensorMode, function: Callable[[Any, Any], Any]) -> list[Any]:
    with mode:
        x, y = torch.empty(4, 6), torch.empty(6, 4)
        found: Any = function(x, y)
    several = found if isinstance(found, (tuple, list)) else [found]
    return [described(one, (x, y)) for one in several]


def described(result: Any, given: tuple[Any, ...]) -> Any:
    if not isinstance(result, FakeTensor):
        return result
    storage = result.untyped_storage()
    shared = [at for at, one in enumerate(given) if one.untyped_storage()._cdata == storage._cdata]
    same = [at for at, one in enumerate(given) if one is result]
    return (
        *(result.shape, result.stride(), result.storage_offset(), result.dtype, result.device, result.layout),
        *(storage.nbytes(), shared, same, result.requires_grad),
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x @ y,
        lambda x, y: x.t(),
        lambda x, y: x[1:, 2:4],
        lambda x, y: x.view(2, 12),
        lambda x, y: x.expand(3, 4, 6),
        lambda x, y: x.add_(1),
        lambda x, y: x.split(2),
        lambda x, y: torch.empty_strided((4, 6), (1, 4)),
        lambda x, y: x.t() + y,
        lambda x, y: F.layer_norm(x, (6,)),
        lambda x, y: torch.native_dropout(x, 0.5, True),
        lambda x, y: torch.ops.aten._fused_sdp_choice(*[x.view(1, 1, 4, 6)] * 3),
        lambda x, y: x.to(torch.float64),
        lambda x, y: x.bool(),
        lambda x, y: x.sum(),
        lambda x, y: torch.mm(x, y, out=torch.empty(4, 4)),
        lambda x, y: torch.mm(x, y, out=torch.empty(0)),
        lambda x, y: x.resize_(2, 3),
        lambda x, y: x.t_(),
        lambda x, y: x.detach(),
        lambda x, y: torch.arange(0.0, 3.0, 0.5),
        lambda x, y: torch.full((3,), True),
        lambda x, y: torch.full((3,), 1),
        lambda x, y: torch.full((3,), 1.0),
        lambda x, y: torch.complex(x, x).imag,
        lambda x, y: torch.complex(x, x).conj().imag,
        lambda x, y: torch.empty(0, 3),
        lambda x, y: torch.zeros(4, 6, device="cuda"),
    ],
)
def test_what_is_made_again_is_what_was_worked_out(function: Callable[[Any, Any], Any]) -> None:
    expected = made_in(FakeTensorMode(), function)
    assert [made_in(Fakes(), function) for _ in range(3)] == [expected] * 3


def test_the_second_time_nothing_is_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Any, y: Any) -> Any:
        return F.gelu(x @ y).transpose(0, 1).sum(0)

    made_in(Fakes(), step)
    calls = []
    worked_out: Any = Fakes._worked_out
    monkeypatch.setattr(Fakes, "_worked_out", lambda self, func, *of: calls.append(func) or worked_out(self, func, *of))
    made_in(Fakes(), step)
    assert {func for func in calls if func.namespace == "aten"} == set()


def test_notes_are_passed_on() -> None:
    made_in(Fakes(), lambda x, y: x @ y)
    noted = fake_tensors.taken_down()
    assert noted
    fake_tensors._noted.clear()
    fake_tensors.learn(noted)
    assert fake_tensors._noted == noted


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


@pytest.mark.usefixtures("without_gradients")
def test_without_gradients_views_and_results_are_made_too() -> None:
    expected = made_in(FakeTensorMode(), lambda x, y: (x @ y).view(2, 8))
    assert [made_in(Fakes(), lambda x, y: (x @ y).view(2, 8)) for _ in range(2)] == [expected] * 2
