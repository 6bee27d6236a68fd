from __future__ import annotations

import copy
import io
import random
from contextlib import nullcontext
from typing import Any

import live
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomdoctor import recompute
from oomdoctor.errors import OomDoctorError, UsageError
from oomdoctor.fixes import _forward

ALL, HALF = ("blocks.*",), ("blocks.0", "blocks.2", "blocks.4")


def marked(make, parts=ALL):
    """Return what makes the model with these parts marked."""

    def made() -> nn.Module:
        model = make()
        recompute(model, *parts)
        return model

    return made


class Block(nn.Module):
    def __init__(self, norm: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        out = x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))
        return out if scale is None else out * scale


class Net(nn.Module):
    def __init__(self, norm: bool = False, drop: float = 0.0, block: type[nn.Module] = Block) -> None:
        super().__init__()
        kwargs = {"norm": norm, "drop": drop} if block is Block else {}
        self.blocks = nn.ModuleList(block(**kwargs) for _ in range(6))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("parts", [ALL, HALF], ids=str)
@pytest.mark.parametrize("make", [Net, lambda: Net(norm=True), lambda: Net(drop=0.5), lambda: Net(norm=True, drop=0.3)])
def test_is_exact_and_needs_less(make, parts) -> None:
    plain = live.train(make, None, ())
    fixed = live.train(marked(make, parts), None, ())
    assert plain[0] == fixed[0]
    assert live.same(plain[1], fixed[1])
    assert plain[2] == fixed[2]
    assert fixed[3] < plain[3]


def test_all_blocks_need_less_than_half_of_them() -> None:
    peaks = [live.train(marked(Net, parts), None, ())[3] for parts in (HALF, ALL)]
    assert peaks[1] < peaks[0]


def test_running_statistics_would_count_twice_were_they_not_spared(monkeypatch) -> None:
    def make() -> nn.Module:
        return Net(norm=True)

    plain = live.train(make, None, ())
    monkeypatch.setattr(_forward, "StateWatch", lambda path, module: nullcontext())
    assert not live.same(plain[1], live.train(marked(make), None, ())[1])


def test_dropout_masks_would_differ_were_random_numbers_not_kept(monkeypatch) -> None:
    def make() -> nn.Module:
        return Net(drop=0.5)

    plain = live.train(make, None, ())
    real = _forward.checkpoint
    monkeypatch.setattr(_forward, "checkpoint", lambda *a, **k: real(*a, **{**k, "preserve_rng_state": False}))
    assert not live.same(plain[1], live.train(marked(make), None, ())[1])


def test_marks_again_what_is_asked_and_nothing_else() -> None:
    model = Net(norm=True)
    model.blocks[1].forward = own = model.blocks[1].forward  # one that something else has set before
    before = live.digest(model)
    recompute(model, *ALL)
    assert live.digest(model) != before
    recompute(model, *ALL)
    recompute(model)
    assert model.blocks[1].forward is own
    assert live.digest(model) == before


def test_state_dict_deepcopy_and_pickle_of_a_model_in_scope_are_its_own() -> None:
    model = Net()
    x = torch.randn(4, 8)
    recompute(model, *ALL)
    keys = list(model.state_dict())
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any()
    assert model(x).any()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert keys == list(Net().state_dict())
    assert not twin(x).any()
    assert torch.equal(loaded(x), model(x))


def test_a_backward_after_the_scope_still_recomputes() -> None:
    torch.manual_seed(0)
    model, x = Net(norm=True), torch.randn(4, 8)
    other = copy.deepcopy(model)
    recompute(model, *ALL)
    loss = model(x).sum()
    loss.backward()
    other(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert live.same(live.values(model), live.values(other))


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.seen += 1
        return super().forward(x)


class Listing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.kept.append(x.detach())
        return super().forward(x)


class Rolling(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.tanh(x * random.random()))


@pytest.mark.parametrize(("block", "what"), [(Counting, "seen"), (Listing, "kept"), (Rolling, "random numbers")])
def test_a_forward_that_changes_state_is_refused_when_it_would_happen_twice(block, what) -> None:
    model = Net(block=block)
    recompute(model, *ALL)
    with pytest.raises(OomDoctorError, match=what):
        model(torch.randn(4, 8)).sum().backward()


GLOBAL_GENERATOR = torch.Generator().manual_seed(0)


class OfNotebook(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.tanh(x * torch.rand(1, generator=GLOBAL_GENERATOR)))


class OfItself(Block):
    def __init__(self, made: Any = None) -> None:
        super().__init__()
        self.rng = random.Random(0) if made is None else made

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.tanh(x * self.rng.random()))


class OfNumpy(OfItself):
    def __init__(self) -> None:
        super().__init__(np.random.default_rng(0))


class OfOldNumpy(OfItself):
    def __init__(self) -> None:
        super().__init__(np.random.RandomState(0))


def _closed_over() -> type[nn.Module]:
    drawn = [torch.Generator().manual_seed(0)]
    generator = drawn[0]

    class Closed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(torch.tanh(x * torch.rand(1, generator=generator)))

    return Closed


GENERATORS = [
    (OfNotebook, "the random numbers of `GLOBAL_GENERATOR`"),
    (OfItself, r"the random numbers of `blocks.5.rng`"),
    (OfNumpy, r"the random numbers of `blocks.5.rng`"),
    (OfOldNumpy, r"the random numbers of `blocks.5.rng`"),
    (_closed_over(), "the random numbers of `generator`"),
]


@pytest.mark.parametrize(("block", "what"), GENERATORS)
def test_a_generator_of_the_users_own_is_not_drawn_from_twice(block, what) -> None:
    model = Net(block=block)
    recompute(model, *ALL)
    with pytest.raises(OomDoctorError, match=what):
        model(torch.randn(4, 8)).sum().backward()


def test_the_generators_of_torch_are_put_back_by_whatever_name(monkeypatch) -> None:
    monkeypatch.setitem(globals(), "_", torch.manual_seed(0))
    own = type("Own", (Block,), {"forward": lambda self, x: nn.functional.dropout(Block.forward(self, x), 0.5)})
    model = Net(block=own)
    model.blocks[0].rng = torch.default_generator
    recompute(model, *ALL)
    model(torch.randn(4, 8)).sum().backward()


def test_a_generator_that_no_block_draws_from_is_no_reason() -> None:
    model = Net(block=type("Plain", (Block,), {}))
    model.rng = torch.Generator()
    recompute(model, *ALL)
    loss = model(torch.randn(4, 8)).sum()
    GLOBAL_GENERATOR.manual_seed(1)
    loss.backward()


def test_inner_hooks_compiled_and_replicated_models_are_refused() -> None:
    hooked = Net()
    hooked.blocks[0].up.register_forward_hook(lambda *a: None)
    with pytest.raises(OomDoctorError, match="hooks"):
        recompute(hooked, *ALL)
    for model in (nn.DataParallel(Net()), torch.compile(Net(), backend="eager")):
        with pytest.raises(OomDoctorError, match="left as it is"):
            recompute(model, "*")


@pytest.mark.parametrize(("part", "why"), [("block", "made of blocks, head"), ("head[0:1]", "those of a Sequential")])
def test_a_wrong_name_is_told_and_changes_nothing(part, why) -> None:
    model = Net()
    before = live.digest(model)
    with pytest.raises(UsageError, match=why):
        recompute(model, "blocks.0", part)
    assert live.digest(model) == before


def _convolutional() -> nn.Sequential:
    layers = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 1))


def test_stretches_of_a_sequential_are_exact_and_need_less() -> None:
    plain = live.train(_convolutional, None, ())
    fixed = live.train(marked(_convolutional, ("[0:4]", "[4:7]")), None, ())
    assert plain[0] == fixed[0]
    assert live.same(plain[1], fixed[1])
    assert plain[2] == fixed[2]
    assert fixed[3] < plain[3]


def test_nothing_is_recomputed_without_gradients() -> None:
    model, x = Net(), torch.randn(4, 8)
    recompute(model, *ALL)
    with torch.inference_mode():
        assert model(x).shape == (4, 1)


def test_a_tensor_passed_by_keyword_is_recomputed_with_its_value() -> None:
    block, x, scale = Block(), torch.randn(4, 8), torch.full((8,), 2.0)
    model = nn.ModuleList([block, Block()])
    recompute(model, "*")
    out = block(x, scale=scale)
    scale.mul_(3)
    with pytest.raises(RuntimeError, match="inplace"):  # never a wrong gradient in silence
        out.sum().backward()


def test_works_on_tensors_without_values_as_a_forecast_needs_it() -> None:
    with FakeTensorMode():
        model, x = Net(norm=True, drop=0.3), torch.randn(16, 8)
        recompute(model, *ALL)
        out = model(x)
        out.sum().backward()
        assert out.shape[0] == 16
        assert all(parameter.grad is not None for parameter in model.parameters())
