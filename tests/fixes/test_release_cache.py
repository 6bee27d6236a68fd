from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import live
import pytest
import torch
from torch import nn

from oomdoctor.fixes import get
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import Family
from oomdoctor.model.session import Session
from oomdoctor.model.unavailable import Refused, Unavailable

FIX = get("release_cache")
apply, patch, propose = FIX.apply, FIX.patch, FIX.propose

CUDA = Dose.of(kind="cuda")
CUBLAS = dataclasses.replace(live.INCIDENT, family=Family.CUBLAS, requested=None)
TRAIN = """
    import torch
    from torch import nn

    # a small net
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


def evidence(**readings: Any) -> Evidence:
    base = live.evidence()
    known = {"reserved": 6 << 30, "allocated": 3 << 30, "inactive_split": 1 << 30, **readings}
    return dataclasses.replace(base, devices=(dataclasses.replace(base.device, **known),))


class Driver:
    """An accelerator with a cache, seen from the driver."""

    def __init__(self) -> None:
        self.cached = 2 << 30

    def empty_cache(self) -> None:
        self.cached = 0


def session(accelerator: Any) -> Session:
    return dataclasses.replace(live.session(), accelerator=accelerator)


def test_the_cache_is_given_back_and_the_body_may_raise() -> None:
    driver = Driver()
    seen = []

    def body() -> None:
        seen.append(driver.cached)
        raise KeyError

    with pytest.raises(KeyError), apply(session(driver), CUDA):
        body()
    assert seen == [0]


@pytest.mark.parametrize("family", [Family.CUBLAS, Family.CUDNN, Family.CUPY, Family.JAX, Family.TF])
def test_proposal_for_what_asks_the_driver(family: Family) -> None:
    (proposal,) = propose(dataclasses.replace(CUBLAS, family=family), evidence())  # type: ignore[misc]
    assert (proposal.effect, proposal.saves, proposal.dose) == (Effect.EXACT, 2 << 30, CUDA)
    assert "2.00 GiB of PyTorch's segments are wholly free" in proposal.basis


@pytest.mark.parametrize(
    ("family", "readings", "part"),
    [
        (Family.CUDA, {}, "by itself"),
        (Family.HOST, {}, "by itself"),
        (Family.CUBLAS, {"inactive_split": 3 << 30}, "wholly free"),
        (Family.CUBLAS, {"reserved": Unavailable("nobody counts")}, "not known: nobody counts"),
        (Family.CUBLAS, {"inactive_split": Unavailable("nobody counts")}, "not known: nobody counts"),
        (Family.CUBLAS, {"simulated": True}, "no cache"),
        (Family.JAX, {"name": "cpu"}, "no cache"),
    ],
)
def test_no_proposal_without_evidence(family: Family, readings: dict[str, Any], part: str) -> None:
    refused = propose(dataclasses.replace(CUBLAS, family=family), evidence(**readings))
    assert isinstance(refused, Refused)
    assert part in refused.reason


def patched(*sources: str, dose: Dose = CUDA) -> Patch | Refused:
    return patch(live.cells_of(*(textwrap.dedent(source) for source in sources)), evidence(), dose)


def test_golden_diff_and_the_same_numbers() -> None:
    made = patched(TRAIN)
    assert isinstance(made, Patch), made
    assert made.diff().splitlines()[4:9] == [
        " import torch",
        " from torch import nn",
        "+torch.cuda.empty_cache()  # room for what is allocated beside PyTorch's cache",
        " ",
        " # a small net",
    ]
    plain: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    exec(textwrap.dedent(TRAIN), plain)
    plain_rng = torch.get_rng_state()
    exec(made.edits[0].after, fixed)
    assert torch.equal(plain_rng, torch.get_rng_state())
    assert plain["losses"] == fixed["losses"]
    assert live.same(live.values(plain["model"]), live.values(fixed["model"]))
    assert isinstance(plain["model"], nn.Module)
    assert isinstance(patched(made.edits[0].after), Refused)


def test_the_patched_cell_empties_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made = patched("import torch", "x = 1")
    assert isinstance(made, Patch)
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "empty_cache", driver.empty_cache)
    exec(made.edits[0].after, {"torch": torch})
    assert driver.cached == 0


@pytest.mark.parametrize(
    ("sources", "kind", "first"),
    [
        (("import torch as th", "train()"), "cuda", "th.cuda.empty_cache()"),
        (("train()",), "xpu", "import torch\ntorch.xpu.empty_cache()"),
        (("import torch", "%matplotlib inline\ntrain()"), "cuda", "%matplotlib inline\ntorch.cuda.empty_cache()"),
    ],
)
def test_names_and_places(sources: tuple[str, ...], kind: str, first: str) -> None:
    made = patched(*sources, dose=Dose.of(kind=kind))
    assert isinstance(made, Patch), made
    assert made.edits[0].after.startswith(first)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("torch.cuda.empty_cache()\ntrain()", "already"),
        ("x = 1\nimport torch\ntrain()", "middle of the cell"),
        ("def (", "not Python"),
    ],
)
def test_patch_refuses(source: str, part: str) -> None:
    refused = patched(source)
    assert isinstance(refused, Refused)
    assert part in refused.reason


def test_it_says_what_it_does() -> None:
    assert (FIX.effect, FIX.apply) == (Effect.EXACT, apply)
