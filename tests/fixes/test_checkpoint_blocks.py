from __future__ import annotations

import copy
import io
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import live
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _forward
from oomdoctor.fixes.checkpoint_blocks import FIX, patch, propose
from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Dose, Effect, Patch

ALL, HALF = Dose.of(every=1), Dose.of(every=2)


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


@pytest.mark.parametrize("dose", [ALL, HALF], ids=str)
@pytest.mark.parametrize("make", [Net, lambda: Net(norm=True), lambda: Net(drop=0.5), lambda: Net(norm=True, drop=0.3)])
def test_is_exact_and_needs_less(make, dose) -> None:
    plain = live.train(make, None, dose)
    fixed = live.train(make, FIX, dose)
    assert plain[0] == fixed[0]
    assert live.same(plain[1], fixed[1])
    assert plain[2] == fixed[2]
    assert fixed[3] < plain[3]


def test_all_blocks_need_less_than_half_of_them() -> None:
    peaks = [live.train(Net, FIX, dose)[3] for dose in (HALF, ALL)]
    assert peaks[1] < peaks[0]


def test_running_statistics_would_count_twice_were_they_not_spared(monkeypatch) -> None:
    def make() -> nn.Module:
        return Net(norm=True)

    plain = live.train(make, None, ALL)
    monkeypatch.setattr(_forward, "StateWatch", lambda path, module: nullcontext())
    assert not live.same(plain[1], live.train(make, FIX, ALL)[1])


def test_dropout_masks_would_differ_were_random_numbers_not_kept(monkeypatch) -> None:
    def make() -> nn.Module:
        return Net(drop=0.5)

    plain = live.train(make, None, ALL)
    real = _forward.checkpoint
    monkeypatch.setattr(_forward, "checkpoint", lambda *a, **k: real(*a, **{**k, "preserve_rng_state": False}))
    assert not live.same(plain[1], live.train(make, FIX, ALL)[1])


@pytest.mark.parametrize("raises", [False, True])
def test_undoes_itself_to_the_last_attribute(raises) -> None:
    model = Net(norm=True)
    model.blocks[1].forward = model.blocks[1].forward  # one that something else has set before
    before = live.digest(model)
    try:
        with FIX.apply(live.session(model=model), ALL):
            assert live.digest(model) != before
            model(torch.randn(4, 8)).sum().backward()
            if raises:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert live.digest(model) == before


def test_state_dict_deepcopy_and_pickle_of_a_model_in_scope_are_its_own() -> None:
    model = Net()
    x = torch.randn(4, 8)
    with FIX.apply(live.session(model=model), ALL):
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
    with FIX.apply(live.session(model=model), ALL):
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
    with FIX.apply(live.session(model=model), ALL), pytest.raises(OomDoctorError, match=what):
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
    (OfItself, r"the random numbers of `model.blocks\[5\].rng`"),
    (OfNumpy, r"the random numbers of `model.blocks\[5\].rng`"),
    (OfOldNumpy, r"the random numbers of `model.blocks\[5\].rng`"),
    (_closed_over(), "the random numbers of `generator`"),
]


@pytest.mark.parametrize(("block", "what"), GENERATORS)
def test_a_generator_of_the_users_own_is_not_drawn_from_twice(block, what) -> None:
    model = Net(block=block)
    with FIX.apply(live.session(model=model), ALL), pytest.raises(OomDoctorError, match=what):
        model(torch.randn(4, 8)).sum().backward()


def test_the_generators_of_torch_are_put_back_by_whatever_name(monkeypatch) -> None:
    monkeypatch.setitem(globals(), "_", torch.manual_seed(0))
    own = type("Own", (Block,), {"forward": lambda self, x: nn.functional.dropout(Block.forward(self, x), 0.5)})
    model = Net(block=own)
    model.blocks[0].rng = torch.default_generator
    with FIX.apply(live.session(model=model), ALL):
        model(torch.randn(4, 8)).sum().backward()


def test_a_generator_that_no_block_draws_from_is_no_reason() -> None:
    model = Net(block=type("Plain", (Block,), {}))
    model.rng = torch.Generator()
    with FIX.apply(live.session(model=model), ALL):
        loss = model(torch.randn(4, 8)).sum()
        GLOBAL_GENERATOR.manual_seed(1)
        loss.backward()


def test_inner_hooks_compiled_and_replicated_models_are_refused() -> None:
    hooked = Net()
    hooked.blocks[0].up.register_forward_hook(lambda *a: None)
    with pytest.raises(OomDoctorError, match="hooks"), FIX.apply(live.session(model=hooked), ALL):
        pass
    for model in (nn.DataParallel(Net()), torch.compile(Net(), backend="eager")):
        with pytest.raises(OomDoctorError, match="left as it is"), FIX.apply(live.session(model=model), ALL):
            pass
    with pytest.raises(OomDoctorError, match="no repeated blocks"), FIX.apply(live.session(m=nn.Linear(2, 2)), ALL):
        pass


def test_nothing_is_recomputed_without_gradients() -> None:
    model, x = Net(), torch.randn(4, 8)
    with FIX.apply(live.session(model=model), ALL), torch.inference_mode():
        assert model(x).shape == (4, 1)


def test_a_tensor_passed_by_keyword_is_recomputed_with_its_value() -> None:
    block, x, scale = Block(), torch.randn(4, 8), torch.full((8,), 2.0)
    model = nn.ModuleList([block, Block()])
    with FIX.apply(live.session(model=model), ALL):
        out = block(x, scale=scale)
        scale.mul_(3)
        with pytest.raises(RuntimeError, match="inplace"):  # never a wrong gradient in silence
            out.sum().backward()


def test_works_on_tensors_without_values_as_a_forecast_needs_it() -> None:
    with FakeTensorMode():
        model, x = Net(norm=True, drop=0.3), torch.randn(16, 8)
        with FIX.apply(live.session(model=model), ALL):
            out = model(x)
            out.sum().backward()
        assert out.shape[0] == 16
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_proposes_half_then_all_and_refuses_without_blocks() -> None:
    proposals = propose(live.INCIDENT, live.evidence(live.model_facts(blocks=("blocks",))))
    assert not isinstance(proposals, Refused)
    assert [proposal.dose for proposal in proposals] == [HALF, ALL]
    assert proposals[0].saves < proposals[1].saves
    assert proposals[0].slowdown < proposals[1].slowdown
    assert all("estimate" in proposal.basis and proposal.effect is Effect.EXACT for proposal in proposals)
    assert isinstance(propose(live.INCIDENT, live.evidence(live.model_facts())), Refused)
    facts = live.model_facts(blocks=("blocks",))
    assert isinstance(propose(live.INCIDENT, live.evidence(facts, grad_disabled=True)), Refused)
    in_layer = replace(live.INCIDENT, framework_frame="torch/nn/modules/linear.py:134 forward")
    assert isinstance(propose(in_layer, live.evidence(facts, roles=())), tuple)  # the request itself counts


MAKES = """\
import torch  # the framework

# the model
torch.manual_seed(0)
model = Net(drop=0.5).train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
"""
TRAINS = """\
%time pass
losses = []
for x in batches:  # five of them
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
MADE = """\
import torch  # the framework
from functools import partial
from torch.utils.checkpoint import checkpoint

# the model
torch.manual_seed(0)
model = Net(drop=0.5).train()
for block in model.blocks:
    if not isinstance(block.forward, partial):  # once is enough when this cell is run again
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
"""
FACTS = live.evidence(live.model_facts(blocks=("blocks",)))


def test_patches_the_cell_that_makes_the_model() -> None:
    cells = live.cells_of(MAKES, TRAINS)
    found = patch(cells, FACTS, ALL)
    assert isinstance(found, Patch)
    (edit,) = found.edits
    assert (edit.cell, edit.before, edit.after) == (1, MAKES, MADE)
    assert isinstance(patch(live.cells_of(edit.after, TRAINS), FACTS, ALL), Refused)


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(256, 8, generator=generator) for _ in range(5)]


def _run(*sources: str, fixed: bool = False) -> tuple[list[float], dict[str, torch.Tensor], int]:
    namespace = {"Net": Net, "batches": _batches()}
    *before, last = (source.replace("%time pass\n", "") for source in sources)
    for source in before:
        exec(source, namespace)
    context = FIX.apply(live.session(model=namespace["model"]), ALL) if fixed else nullcontext()
    with context, live.Peak() as seen:
        exec(last, namespace)
    return namespace["losses"], live.values(namespace["model"]), seen.peak


def test_the_patched_source_equals_the_live_change_in_a_fresh_namespace_and_by_replay() -> None:
    (edit,) = patch(live.cells_of(MAKES, TRAINS), FACTS, ALL).edits
    plain = _run(MAKES, TRAINS)
    for run in (
        _run(edit.after, TRAINS),
        _run(MAKES, edit.replay, TRAINS),
        _run(MAKES, edit.replay, edit.replay, TRAINS),
        _run(MAKES, TRAINS, fixed=True),
    ):
        assert run[0] == plain[0]
        assert live.same(run[1], plain[1])
        assert run[2] < plain[2]


def test_running_the_patch_twice_wraps_once_and_copies_are_their_own() -> None:
    (edit,) = patch(live.cells_of(MAKES, TRAINS), FACTS, ALL).edits
    namespace = {"Net": Net}
    exec(edit.after, namespace)
    exec(edit.replay, namespace)
    model = namespace["model"]
    assert all(type(block.forward.args[0]).__name__ == "method" for block in model.blocks)
    twin = copy.deepcopy(model)
    assert twin.blocks[0].forward.args[0].__self__ is twin.blocks[0]


def test_patches_in_the_failing_cell_where_it_makes_the_model_or_nothing_known_does() -> None:
    both = patch(live.cells_of("a = 1", MAKES + TRAINS), FACTS, ALL)
    assert isinstance(both, Patch)
    assert both.edits[0].after == both.edits[0].replay == MADE + TRAINS
    elsewhere = patch(live.cells_of("a = 1", TRAINS), FACTS, HALF)
    assert isinstance(elsewhere, Patch)
    assert elsewhere.edits[0].after.startswith("%time pass\nfrom functools import partial\n")
    assert "for block in model.blocks[::2]:" in elsewhere.edits[0].after


def test_takes_other_names_where_the_cells_have_theirs_and_joins_containers() -> None:
    source = "block = 3\ncheckpoint = torch.load('x.pt')\nmodel = Net()\n"
    facts = live.evidence(live.model_facts(blocks=("encoder.layers", "encoder.layers.0.mlp", "stages.1.blocks")))
    found = patch(live.cells_of(source, "train(model)"), facts, HALF)
    assert isinstance(found, Patch)
    after = found.edits[0].after
    assert "for block_2 in [*model.encoder.layers, *model.stages[1].blocks][::2]:" in after
    assert "from torch.utils.checkpoint import checkpoint as recompute" in after
    assert "partial(recompute, block_2.forward, use_reentrant=False)" in after
    compile(after, "cell", "exec")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ([live.model_facts(blocks=("blocks",), batch_norm=("blocks.0.norm",))], "twice"),
        ([live.model_facts()], "no model"),
        ([live.model_facts(blocks=("blocks",)), live.model_facts("other", blocks=("blocks",))], "several"),
    ],
)
def test_patch_refuses(facts, why) -> None:
    found = patch(live.cells_of(MAKES, TRAINS), live.evidence(*facts), ALL)
    assert isinstance(found, Refused)
    assert why in found.reason


@pytest.mark.parametrize(
    ("switch", "dose", "line"),
    [
        (
            ("gradient_checkpointing_enable", False),
            HALF,
            'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
        ),
        (
            ("bert.activation_checkpointing_enable", True),
            ALL,
            'model.bert.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})',
        ),
        (
            ("parts.0.activation_checkpointing_enable", True),
            HALF,
            (
                "model.parts[0].activation_checkpointing_enable("
                'activation_checkpointing_kwargs={"use_reentrant": False}, every_n_layers=2)'
            ),
        ),
    ],
)
def test_a_switch_is_turned_on_where_the_model_is_made(switch, dose, line) -> None:
    facts = live.evidence(live.model_facts(blocks=("blocks",), switches=(switch,)))
    found = patch(live.cells_of(MAKES, TRAINS), facts, dose)
    assert isinstance(found, Patch)
    (edit,) = found.edits
    made = "model = Net(drop=0.5).train()\n"
    assert edit.after == MAKES.replace(made, f"{made}{line}\n")
    assert edit.replay == f"{line}\n"
    assert isinstance(patch(live.cells_of(edit.after, TRAINS), facts, dose), Refused)
    counts = live.model_facts(blocks=("blocks",), switches=(switch,), batch_norm=("blocks.0", "bert.n", "parts.0.n"))
    assert isinstance(patch(live.cells_of(MAKES, TRAINS), live.evidence(counts), dose), Refused)
    proposals = propose(live.INCIDENT, facts)
    assert not isinstance(proposals, Refused)
    assert {one.effect for one in proposals} == {Effect.EQUIVALENT}
    evaluated = live.model_facts(blocks=("blocks",), switches=(switch,), training=False)
    assert isinstance(propose(live.INCIDENT, live.evidence(evaluated)), Refused)


def test_blocks_of_a_model_with_a_switch_are_left_to_it() -> None:
    own = {"supports_gradient_checkpointing": True, "gradient_checkpointing_enable": lambda self: None}
    model = nn.Sequential(type("Switched", (Net,), own)(), nn.Identity())
    with pytest.raises(OomDoctorError, match="no repeated blocks"), FIX.apply(live.session(model=model), HALF):
        pass


def test_single_layers_are_not_recomputed() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with pytest.raises(OomDoctorError, match="no repeated blocks"), FIX.apply(live.session(model=model), ALL):
        pass


def test_of_several_models_the_one_that_is_trained_is_recomputed() -> None:
    made = "model = Net()\naverage = copy.deepcopy(model)"
    trained = "for x in xs:\n    model(x).sum().backward()\n    optimizer.step()"
    facts = [live.model_facts(path, blocks=("blocks",)) for path in ("model", "average")]
    cells = live.cells_of(made, trained)
    found = patch(cells, live.evidence(*facts, loops=(live.loop(2, 1),)), ALL)
    assert isinstance(found, Patch), found
    assert "in model.blocks:" in found.edits[0].after
    assert found.edits[0].cell == 2  # an earlier cell made the copy, which would come to recompute as well
    both = patch(cells, live.evidence(*facts, loops=(live.loop(2, 1, models=("model", "average")),)), ALL)
    neither = patch(cells, live.evidence(*facts), ALL)
    why = "several models have repeated blocks: which of them to recompute is for the user to say"
    assert both == neither == Refused(why)


USED = {
    "imported from its module": "from torch.utils.checkpoint import checkpoint\nout = checkpoint(f, x)\n",
    "by another name": "import torch.utils.checkpoint as cp\nout = cp.checkpoint_sequential(net, 2, x)\n",
    "its module imported": "from torch.utils import checkpoint\nout = checkpoint.checkpoint(f, x)\n",
    "written out": "import torch.utils.checkpoint\nout = torch.utils.checkpoint.checkpoint(f, x)\n",
    "handed on": "from torch.utils.checkpoint import checkpoint as c\nrun = partial(c, use_reentrant=False)\n",
    "the switch of a model": "model.gradient_checkpointing_enable()\n",
    "the switch of timm": "model.set_grad_checkpointing()\n",
}
NOT_USED = {
    "a comment": "# TODO: model.gradient_checkpointing_enable(), or torch.utils.checkpoint\n",
    "an import": "from torch.utils.checkpoint import checkpoint\n",
    "a text": "notes = 'torch.utils.checkpoint'\n",
    "a file": "checkpoint = torch.load('checkpoint.pt')\nmodel.load_state_dict(checkpoint)\n",
    "a switch turned off": "model.set_grad_checkpointing(False)\n",
}


@pytest.mark.parametrize("name", [*USED, *NOT_USED])
def test_only_what_recomputes_already_is_left_alone(name: str) -> None:
    first, _, rest = {**USED, **NOT_USED}[name].partition("\n")
    for cells in (live.cells_of(f"{first}\n{rest}", MAKES, TRAINS), live.cells_of(first, rest + MAKES, TRAINS)):
        made = patch(cells, FACTS, ALL)
        assert isinstance(made, Refused) == (name in USED)
        bound = replace(live.session(model=Net()), cells=cells)
        refused = pytest.raises(OomDoctorError, match="already") if name in USED else nullcontext()
        with refused, FIX.apply(bound, ALL):
            pass


def test_a_cell_that_holds_the_patch_is_not_patched_again() -> None:
    (edit,) = patch(live.cells_of(MAKES, TRAINS), FACTS, ALL).edits
    assert patch(live.cells_of(edit.after, TRAINS), FACTS, ALL) == Refused("the code recomputes activations already")


BRANCHES = {
    "if": "if small:\n    model = Net(drop=0.5)\nelse:\n    model = Net()\n",
    "elif": "if small:\n    model = Net()\nelif small is None:\n    model = Net(drop=0.5)\nelse:\n    model = Net()\n",
    "try": "try:\n    assert small\n    model = Net(drop=0.5)\nexcept AssertionError:\n    model = Net()\n",
    "made anew": "model = Net()\nif small:\n    model = Net(drop=0.5)\n",
    "of an earlier cell": "if small:\n    model = Net(drop=0.5)\n",
    "on one line": "if small: model = Net(drop=0.5)\nelse: model = Net()\n",
    "made anew on one line": "model = Net()\nif small: model = Net(drop=0.5)\n",
}


@pytest.mark.parametrize("small", [True, False, None])
@pytest.mark.parametrize("name", BRANCHES)
def test_whichever_branch_makes_the_model_its_blocks_are_recomputed(name: str, small: bool | None) -> None:
    cells = live.cells_of("model = Net()\n" if "earlier" in name else "y = 1\n", BRANCHES[name] + "x = 1\n", TRAINS)
    (edit,) = patch(cells, FACTS, ALL).edits
    namespace: dict[str, Any] = {"Net": Net, "small": small}
    exec(cells.history[0].source, namespace)
    exec(edit.after, namespace)
    assert all(isinstance(block.forward, partial) for block in namespace["model"].blocks)


def test_a_model_that_one_branch_alone_makes_is_recomputed_there() -> None:
    (edit,) = patch(live.cells_of("if train:\n    model = Net()\n", TRAINS), FACTS, ALL).edits
    exec(edit.after, {"Net": Net, "train": False})
    namespace: dict[str, Any] = {"Net": Net, "train": True}
    exec(edit.after, namespace)
    assert all(isinstance(block.forward, partial) for block in namespace["model"].blocks)
