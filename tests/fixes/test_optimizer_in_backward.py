from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import get, gradients
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Session
from oomdoctor.model.unavailable import Refused
from oomdoctor.retry.transaction import Transaction

FIX = get("optimizer_in_backward")

NONE = Dose()

ZERO_FIRST = """\
losses = []
for x in batches:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
"""
ZERO_BEFORE_BACKWARD = ZERO_FIRST.replace("    optimizer.zero_grad()\n", "").replace(
    "    loss.backward()\n", "    model.zero_grad()\n    loss.backward()\n"
)
ZERO_LAST = ZERO_FIRST.replace("    optimizer.zero_grad()\n", "") + "    optimizer.zero_grad(set_to_none=True)\n"


class Tied(nn.Module):
    """Weights used twice, dropout, and one parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        self.inner[3].weight = self.inner[1].weight
        self.unused = nn.Parameter(torch.ones(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = self.drop(torch.tanh(layer(x)))
        return x


def adam(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=0.01, amsgrad=True)


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def program(make: Callable[[Any], torch.optim.Optimizer] = adam) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = make(
        [{"params": [*model.inner.parameters()], "lr": 0.02}, {"params": [model.unused], "weight_decay": 0.5}]
    )
    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        "batches": [torch.randn(4, 64) for _ in range(5)],
    }


def session_of(space: dict[str, Any], source: str = "train()") -> Session:
    optimizers = tuple((n, one) for n, one in space.items() if isinstance(one, torch.optim.Optimizer))
    modules = tuple((n, one) for n, one in space.items() if isinstance(one, nn.Module))
    return live.having(live.session((source,), namespace=space), optimizers=optimizers, modules=modules)


def run(source: str, make: Callable[[Any], torch.optim.Optimizer] = adam, *, fixed: bool) -> dict[str, Any]:
    space = program(make)
    with FIX.apply(session_of(space, source), NONE) if fixed else nullcontext():  # type: ignore[misc]
        exec(source, space)
    state = {f"{at}.{name}": one for at, each in optimizer_state(space).items() for name, one in each.items()}
    return space | {"rng": torch.get_rng_state(), "state": state}


def optimizer_state(space: dict[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
    return {
        at: {name: one for name, one in each.items() if isinstance(one, torch.Tensor)}
        for at, each in space["optimizer"].state_dict()["state"].items()
    }


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return (
        left["losses"] == right["losses"]
        and live.same(live.values(left["model"]), live.values(right["model"]))
        and live.same(left["state"], right["state"])
        and torch.equal(left["rng"], right["rng"])
        and [g["lr"] for g in left["optimizer"].param_groups] == [g["lr"] for g in right["optimizer"].param_groups]
    )


@pytest.mark.parametrize("source", [ZERO_FIRST, ZERO_BEFORE_BACKWARD, ZERO_LAST])
@pytest.mark.parametrize("make", [adam, sgd])
def test_the_same_bits_in_parameters_state_losses_and_random_numbers(source, make) -> None:
    assert same(run(source, make, fixed=False), run(source, make, fixed=True))


@pytest.mark.parametrize("name", sorted(gradients.ELEMENTWISE))
def test_every_optimizer_that_it_admits_gives_the_same_bits(name) -> None:
    def make(weights: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(weights, lr=0.01)

    assert same(run(ZERO_FIRST, make, fixed=False), run(ZERO_FIRST, make, fixed=True))


def test_the_peak_lacks_all_gradients_but_the_largest() -> None:
    peaks, most = [], []
    for fixed in (False, True):
        space = program(sgd)
        held: list[int] = []
        for weight in space["model"].parameters():
            weight.register_hook(
                lambda grad, space=space, held=held: held.append(
                    grad.nbytes + sum(p.grad.nbytes for p in space["model"].parameters() if p.grad is not None)
                )
            )
        with FIX.apply(session_of(space), NONE) if fixed else nullcontext(), live.Peak() as seen:  # type: ignore[misc]
            exec(ZERO_FIRST, space)
        peaks.append(seen.peak)
        most.append(max(held))
    gradients = 5 * 64 * 64 * 4 + 6 * 64 * 4
    assert most == [gradients, 64 * 64 * 4]
    assert peaks[1] < peaks[0] - 2 * 64 * 64 * 4


def test_a_second_life_of_the_optimizer_goes_on_from_its_state() -> None:
    plain = program()
    exec(ZERO_FIRST, plain)
    fixed = program()
    exec(ZERO_FIRST, fixed)
    torch.manual_seed(3)
    exec(ZERO_FIRST, plain)
    torch.manual_seed(3)
    with FIX.apply(session_of(fixed), NONE):  # type: ignore[misc]
        exec(ZERO_FIRST, fixed)
    assert live.same(live.values(plain["model"]), live.values(fixed["model"]))


BACKWARDS = "model(batches[0]).sum().backward()\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (BACKWARDS + BACKWARDS + "optimizer.step()", "several parts"),
        (BACKWARDS, "not followed by a step"),
        ("optimizer.step(lambda: model(batches[0]).sum())", "closure"),
        ("model(batches[0]).sum().backward(create_graph=True)", "graph of the gradients"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph:UserWarning")
def test_what_shows_itself_in_the_loop_is_refused(source, why) -> None:
    space = program()
    with pytest.raises(OomDoctorError, match=why), FIX.apply(session_of(space), NONE):  # type: ignore[misc]
        exec(source, space)


class Own(torch.optim.SGD):
    pass


Own.__module__ = "__main__"


def hooked(space: dict[str, Any]) -> None:
    space["optimizer"].register_step_pre_hook(lambda *a: None)


def taken(space: dict[str, Any]) -> None:
    space["model"].unused.register_post_accumulate_grad_hook(lambda p: None)


def shared(space: dict[str, Any]) -> None:
    space["old"] = torch.optim.Adam(space["model"].parameters())


def own(space: dict[str, Any]) -> None:
    space["optimizer"] = Own(space["model"].parameters(), lr=0.1)


def parallel(space: dict[str, Any]) -> None:
    space["wrapped"] = nn.DataParallel(space["model"])


def nothing(space: dict[str, Any]) -> None:
    del space["optimizer"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (hooked, "hooks of its own"),
        (taken, "a hook of its own for its gradient"),
        (shared, "another optimizer"),
        (own, "not known to step"),
        (parallel, "gathers gradients"),
        (nothing, "no optimizer"),
    ],
)
def test_what_can_be_seen_before_is_refused_on_entering(change, why) -> None:
    space = program()
    change(space)
    with pytest.raises(OomDoctorError, match=why), FIX.apply(session_of(space), NONE):  # type: ignore[misc]
        pass


@pytest.mark.parametrize(
    "source",
    ["norm = sum(p.grad.norm() for p in ps)", "p.grad.clamp_(-1, 1)", "clip_grad_norm_(ps, 1.0)", "s = GradScaler()"],
)
def test_code_that_reads_gradients_is_refused(source) -> None:
    with pytest.raises(OomDoctorError, match="uses gradients"), FIX.apply(session_of(program(), source), NONE):  # type: ignore[misc]
        pass
    with FIX.apply(session_of(program(), "p.grad = None; torch.no_grad(); optimizer.zero_grad()"), NONE):  # type: ignore[misc]
        pass


def everything(space: dict[str, Any]) -> list[Any]:
    optimizer = space["optimizer"]
    return [
        live.digest(space["model"]),
        {name: id(value) for name, value in vars(optimizer).items()},
        [(id(p), p._post_accumulate_grad_hooks) for p in space["model"].parameters()],
        [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups],
        torch.amp.GradScaler.step,
        nn.Module.zero_grad,
        dict(_global_optimizer_pre_hooks),
    ]


@pytest.mark.parametrize("raises", [False, True])
def test_undoes_itself(raises) -> None:
    space = program()
    before = everything(space)
    try:
        with FIX.apply(session_of(space), NONE):  # type: ignore[misc]
            assert everything(space) != before
            if raises:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert everything(space) == before


def test_an_error_of_the_cell_is_not_hidden() -> None:
    space = program()
    with pytest.raises(ZeroDivisionError), FIX.apply(session_of(space), NONE):  # type: ignore[misc]
        exec(BACKWARDS + "1 / 0", space)


def test_those_who_watch_steps_see_as_many_as_ever_and_the_first_before_anything_changes() -> None:
    space = program()
    exec("model(batches[0]).sum().backward(); optimizer.step(); optimizer.zero_grad()", space)
    before = live.values(space["model"])
    finished: list[Any] = []
    clean: list[bool] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: clean.append(live.same(live.values(space["model"]), before))),
        register_optimizer_step_post_hook(lambda one, *_: finished.append(one)),
    ]
    with FIX.apply(session_of(space), NONE):  # type: ignore[misc]
        exec(ZERO_FIRST, space)
    for handle in handles:
        handle.remove()
    assert finished == [space["optimizer"]] * 5
    assert clean == [True] + [False] * 5


def test_a_snapshot_of_the_cell_brings_back_what_was_there() -> None:
    space = program()
    exec(ZERO_FIRST, space)
    weights, state = live.values(space["model"]), optimizer_state(space)
    before = {(at, name): one.clone() for at, each in state.items() for name, one in each.items()}
    transaction = Transaction(space, ZERO_FIRST, lambda: 1 << 30)
    with FIX.apply(session_of(space), NONE), transaction.armed(strict=True):  # type: ignore[misc]
        exec(ZERO_FIRST, space)
    assert not live.same(live.values(space["model"]), weights)
    assert transaction.losses() == ()
    transaction.restore()
    assert live.same(live.values(space["model"]), weights)
    after = {(at, name): one for at, each in optimizer_state(space).items() for name, one in each.items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def evidence(source: str, space: dict[str, Any], size: int = 7 << 20) -> Evidence:
    optimizers = [(n, one) for n, one in space.items() if isinstance(one, torch.optim.Optimizer)]
    modules = [(n, one) for n, one in space.items() if isinstance(one, nn.Module)]
    base = live.evidence(roles=((Role.GRADIENT, size),))
    return replace(base, code=facts(live.cells_of(source), {}, modules, optimizers, loaded=()))


def test_proposal_and_no_patch() -> None:
    (proposal,) = FIX.propose(live.INCIDENT, evidence(ZERO_FIRST, program()))  # type: ignore[misc]
    assert proposal.effect is FIX.effect is Effect.EXACT
    assert proposal.saves == (7 << 20) - 64 * 64 * 4
    refused = FIX.patch(live.cells_of(ZERO_FIRST), evidence(ZERO_FIRST, program()), NONE)
    assert isinstance(refused, Refused)


CLIPS = ZERO_FIRST.replace("    optimizer.step()", "    clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()")
ACCUMULATES = """\
for i, x in enumerate(batches):
    model(x).mean().backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (evidence("model(x)", program()), "no training loop"),
        (evidence(CLIPS, program()), "clipped"),
        (evidence(ACCUMULATES, program()), "accumulated"),
        (evidence(ZERO_FIRST.replace("zero_grad()", "zero_grad(set_to_none=False)"), program()), "kept as zeros"),
        (
            evidence(ZERO_FIRST.replace("optimizer.step()", "scheduler.step()\n    optimizer.step()"), program()),
            "between",
        ),
        (evidence(ZERO_FIRST, {"model": Tied()}), "no gradients"),
        (evidence(ZERO_FIRST, program(), size=64), "no more than the largest"),
    ],
)
def test_propose_refuses(found, why) -> None:
    refused = FIX.propose(live.INCIDENT, found)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def run_apart(between: str, fix: bool, after: str = "pass") -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    namespace = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "copy": copy, "seen": []}
    namespace["x"] = torch.randn(4, 8)
    source = (
        "for step in range(3):\n    optimizer.zero_grad()\n    loss = model(x).square().mean()\n    loss.backward()\n"
        f"    {between}\n    optimizer.step()\n    {after}\n"
    )
    session = live.having(
        live.session(cells=[source], namespace=namespace),
        modules=(("model", model),),
        optimizers=(("optimizer", optimizer),),
    )
    with FIX.apply(session, NONE) if fix else nullcontext():
        exec(source, namespace)
    return live.values(model), optimizer


@pytest.mark.parametrize("between", ["seen.append(loss.item())", "print(f'{step}: {loss.item():.3f}')"])
def test_losses_may_be_looked_at_before_the_step(between: str) -> None:
    plain, fixed = run_apart(between, False)[0], run_apart(between, True)[0]
    assert live.same(plain, fixed)


def test_a_state_that_is_loaded_in_the_loop_goes_on() -> None:
    load = "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))"
    (plain, one), (fixed, other) = run_apart("pass", False, load), run_apart("pass", True, load)
    assert live.same(plain, fixed)
    for left, right in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(one.state[left]["exp_avg"], other.state[right]["exp_avg"])
    assert [id(one) for one in other.state] == [id(one) for one in other.param_groups[0]["params"]]
