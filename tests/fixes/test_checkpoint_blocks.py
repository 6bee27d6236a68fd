"""Where parts are recomputed: the doses, the line in the source, and the models that a function alone holds."""

from __future__ import annotations

from dataclasses import replace
from textwrap import indent
from typing import Any

import live
import pytest
import torch
from test_recompute import Net

from oomdoctor.fixes.checkpoint_blocks import patch, propose
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import ModuleMemory
from oomdoctor.model.unavailable import Refused

PARTS = tuple(f"blocks.{at}" for at in range(6))
MODEL = live.model_facts(blocks=("blocks",), segments=PARTS)
FACTS = live.evidence(MODEL)


def dose_of(*parts: str, path: str = "model") -> Dose:
    return Dose.of(modules=", ".join(f"{path}:{part}" for part in parts))


ALL, HALF = dose_of(*PARTS), dose_of(*PARTS[::2])
SWITCHED = {1: Dose.of(every=1), 2: Dose.of(every=2)}


def test_proposes_every_other_part_then_all_and_refuses_without_parts() -> None:
    proposals = propose(live.INCIDENT, FACTS)
    assert not isinstance(proposals, Refused)
    assert [proposal.dose for proposal in proposals] == [HALF, ALL]
    assert proposals[0].saves < proposals[1].saves
    assert proposals[0].slowdown < proposals[1].slowdown
    assert all("estimate" in proposal.basis and proposal.effect is Effect.EXACT for proposal in proposals)
    assert isinstance(propose(live.INCIDENT, live.evidence(live.model_facts())), Refused)
    assert isinstance(propose(live.INCIDENT, live.evidence(MODEL, grad_disabled=True)), Refused)
    in_layer = replace(live.INCIDENT, framework_frame="torch/nn/modules/linear.py:134 forward")
    assert isinstance(propose(in_layer, live.evidence(MODEL, roles=())), tuple)  # the request itself counts


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
from oomdoctor import recompute

# the model
torch.manual_seed(0)
model = Net(drop=0.5).train()
recompute(model, "blocks.*")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
"""


def test_patches_the_cell_that_makes_the_model() -> None:
    cells = live.cells_of(MAKES, TRAINS)
    found = patch(cells, FACTS, ALL)
    assert isinstance(found, Patch)
    (edit,) = found.edits
    assert (edit.cell, edit.before, edit.after) == (1, MAKES, MADE)
    assert patch(live.cells_of(edit.after, TRAINS), FACTS, ALL) == Refused("the code recomputes activations already")


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(256, 8, generator=generator) for _ in range(5)]


def _run(*sources: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    namespace = {"Net": Net, "batches": _batches()}
    *before, last = (source.replace("%time pass\n", "") for source in sources)
    for source in before:
        exec(source, namespace)
    with live.Peak() as seen:
        exec(last, namespace)
    return namespace["losses"], live.values(namespace["model"]), seen.peak


def test_the_patched_source_is_exact_in_a_fresh_namespace_and_by_replay() -> None:
    (edit,) = patch(live.cells_of(MAKES, TRAINS), FACTS, ALL).edits
    plain = _run(MAKES, TRAINS)
    for run in (
        _run(edit.after, TRAINS),
        _run(MAKES, edit.replay, TRAINS),
        _run(MAKES, edit.replay, edit.replay, TRAINS),
    ):
        assert run[0] == plain[0]
        assert live.same(run[1], plain[1])
        assert run[2] < plain[2]


def test_patches_in_the_failing_cell_where_it_makes_the_model_or_nothing_known_does() -> None:
    both = patch(live.cells_of("a = 1", MAKES + TRAINS), FACTS, ALL)
    assert isinstance(both, Patch)
    assert both.edits[0].after == both.edits[0].replay == MADE + TRAINS
    elsewhere = patch(live.cells_of("a = 1", TRAINS), FACTS, HALF)
    assert isinstance(elsewhere, Patch)
    assert elsewhere.edits[0].after.startswith("%time pass\nfrom oomdoctor import recompute\n")
    assert 'recompute(model, "blocks.0", "blocks.2", "blocks.4")' in elsewhere.edits[0].after


def test_a_name_of_the_notebook_that_a_function_binds_is_marked_in_that_function() -> None:
    main = "def main():\n    global a, model\n    model = Net().train()\n    fit()\n"
    made = patch(live.cells_of("a = 1", main, "main()"), FACTS, ALL)
    assert isinstance(made, Patch)
    (edit,) = made.edits
    assert edit.cell == 2
    assert '    model = Net().train()\n    recompute(model, "blocks.*")\n    fit()\n' in edit.after


def test_a_loop_that_sets_the_mode_of_the_model_does_not_make_it() -> None:
    loop = "for x in batches:\n    model = model.train()\n    fit(x)\nfor x in batches:\n    model = model.eval()\n"
    (edit,) = patch(live.cells_of(MAKES, loop), FACTS, ALL).edits
    assert (edit.cell, edit.after) == (1, MADE)
    main = f"def main():\n    global model\n    model = Net()\n{indent(loop, '    ')}"
    (edit,) = patch(live.cells_of("a = 1", main, "main()"), FACTS, ALL).edits
    assert '    model = Net()\n    recompute(model, "blocks.*")\n    for x' in edit.after
    moved = f"{MAKES}model = model.to(device)\n"
    (edit,) = patch(live.cells_of(moved, TRAINS), FACTS, ALL).edits
    assert 'model = model.to(device)\nrecompute(model, "blocks.*")\n' in edit.after


def test_takes_another_name_where_the_cells_have_theirs_and_marks_several_models() -> None:
    source = "recompute = 3\nactor, critic = Net(), Net()\n"
    facts = live.evidence(*(live.model_facts(path, segments=PARTS) for path in ("actor", "critic")))
    both = Dose.of(modules="actor:blocks.0, critic:blocks.1")
    found = patch(live.cells_of(source, "train(actor, critic)"), facts, both)
    assert isinstance(found, Patch)
    after = found.edits[0].after
    assert "from oomdoctor import recompute as recompute_parts" in after
    assert after.endswith('recompute_parts(actor, "blocks.0")\nrecompute_parts(critic, "blocks.1")\n')


IN_FUNCTION = """\
def build(width):
    'Build.'
    net = Net()
    net = net.train()
    return net
def run(net, batches):
    'Train.'
    for x in batches:
        net(x).sum().backward()
def main():
    run(build(3), [])
"""


@pytest.mark.parametrize(
    ("line", "after"),
    [
        (1, '    net = net.train()\n    recompute(net, "blocks.0")\n    return net\n'),
        (6, "    'Train.'\n    recompute(net, \"blocks.0\")\n    for x in batches:\n"),
    ],
)
def test_a_model_that_a_function_alone_holds_is_marked_where_it_is_bound_or_handed_over(line: int, after: str) -> None:
    local = live.model_facts("net", segments=PARTS, scope=(1, line))
    evidence = live.evidence()
    evidence = replace(evidence, code=replace(evidence.code, local_models=(local,)))
    found = patch(live.cells_of(IN_FUNCTION, "main()"), evidence, dose_of("blocks.0", path="net"))
    assert isinstance(found, Patch), found
    (edit,) = found.edits
    assert edit.cell == 1
    assert after in edit.after
    compile(edit.replay, "cell", "exec")


def row(path: str, own: int, *, cost: float = 0.01, output: int | None = None, **about: Any) -> ModuleMemory:
    known = {"runs_in_turn": False, "in_place": False, **about}
    return ModuleMemory(("Net", 1 << 20), path, own, output if output is not None else own // 4, cost, **known)


def test_where_a_dry_run_has_told_what_parts_keep_the_cheapest_that_free_enough_are_proposed() -> None:
    kept = [row("", 0, cost=0.3), row("wide", 8 << 20), row("slow", 8 << 20, cost=0.2), row("deep", 32 << 20)]
    proposals = propose(live.INCIDENT, replace(FACTS, modules=tuple(kept)))
    assert not isinstance(proposals, Refused)
    doses = [str(one.dose["modules"]).replace("model:", "") for one in proposals]
    # Where nothing lowers the peak any more, those that keep less follow.
    least = sum(one.saves < proposals[-1].saves for one in proposals)
    assert not any("slow" in dose for dose in doses[:least])
    assert [one.saves for one in proposals] == sorted(one.saves for one in proposals)


@pytest.mark.parametrize(
    ("switch", "dose", "line"),
    [
        (
            ("gradient_checkpointing_enable", False),
            SWITCHED[2],
            'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
        ),
        (
            ("bert.activation_checkpointing_enable", True),
            SWITCHED[1],
            'model.bert.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})',
        ),
        (
            ("parts.0.activation_checkpointing_enable", True),
            SWITCHED[2],
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


def test_of_several_models_the_one_that_is_trained_is_recomputed() -> None:
    facts = [live.model_facts(path, segments=PARTS) for path in ("model", "average")]
    proposals = propose(live.INCIDENT, live.evidence(*facts, loops=(live.loop(2, 1),)))
    assert not isinstance(proposals, Refused)
    assert proposals[-1].dose == ALL


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
    assert all("forward" in vars(block) for block in namespace["model"].blocks)


def test_a_model_that_one_branch_alone_makes_is_recomputed_there() -> None:
    (edit,) = patch(live.cells_of("if train:\n    model = Net()\n", TRAINS), FACTS, ALL).edits
    exec(edit.after, {"Net": Net, "train": False})
    namespace: dict[str, Any] = {"Net": Net, "train": True}
    exec(edit.after, namespace)
    assert all("forward" in vars(block) for block in namespace["model"].blocks)
