from __future__ import annotations

import dataclasses
import gc
import textwrap
from typing import Any

import live
import pytest
import torch
from observed import facts, site
from torch import nn

from oomdoctor.fixes import get
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused
from oomdoctor.testing import assert_heals

FIX = get("no_grad_eval")
patch, propose = FIX.patch, FIX.propose

SETUP = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_loader = [(torch.randn(64, 8), torch.randint(0, 3, (64,))) for _ in range(3)]
    test_loader = [(torch.randn(64, 8), torch.randint(0, 3, (64,))) for _ in range(4)]
"""
NOTEBOOK = """
    # how good is it?
    model.train()  # dropout stays on, to see the spread
    total, correct, preds = 0.0, 0, []
    for x, y in test_loader:
        out = model(x)
        total += criterion(out, y).item()  # mean over the batch
        correct += (out.argmax(1) == y).sum().item()
        preds.append(out)
    print(f"loss {total / len(test_loader):.4f}")
"""
EPOCHS = """
    history = []
    for epoch in range(5):
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        score = evaluate(model, test_loader)
        history.append(score)
"""
FUNCTION = '''
    def evaluate(net, loader):
        """Return the mean loss."""
        total = 0.0
        for x, y in loader:
            total += criterion(net(x), y).item()
        return total / len(loader)
'''


def program() -> dict[str, Any]:
    torch.manual_seed(0)
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(SETUP), namespace)
    return namespace


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(cells: Cells, activation: int = 64 << 20, *, line: int | None = None, **extra: Any) -> Evidence:
    namespace = program() | extra
    modules = [(name, value) for name, value in namespace.items() if isinstance(value, nn.Module)]
    base = live.evidence(roles=((Role.ACTIVATION, activation),))
    return dataclasses.replace(base, code=facts(cells, namespace, modules, [], line=line))


def patched(*sources: str) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells), Dose())


def run(*sources: str) -> dict[str, Any]:
    namespace = program()
    for source in sources:
        exec(textwrap.dedent(source), namespace)
    return namespace


def same(left: dict[str, Any], right: dict[str, Any], *names: str) -> None:
    assert live.same(live.values(left["model"]), live.values(right["model"]))
    moments = [
        [value for state in space["optimizer"].state.values() for value in state.values()] for space in (left, right)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True))
    for name in names:
        assert str(left[name]) == str(right[name])


GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -2,9 +2,10 @@
 # how good is it?
 model.train()  # dropout stays on, to see the spread
 total, correct, preds = 0.0, 0, []
-for x, y in test_loader:
-    out = model(x)
-    total += criterion(out, y).item()  # mean over the batch
-    correct += (out.argmax(1) == y).sum().item()
-    preds.append(out)
+with torch.no_grad():
+    for x, y in test_loader:
+        out = model(x)
+        total += criterion(out, y).item()  # mean over the batch
+        correct += (out.argmax(1) == y).sum().item()
+        preds.append(out)
 print(f"loss {total / len(test_loader):.4f}")
"""


def test_a_loop_gives_the_same_bits_for_less_and_reads_well() -> None:
    made = patched(SETUP, NOTEBOOK)
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN
    with live.Peak() as before:
        plain = run(NOTEBOOK)
    plain_rng = torch.get_rng_state()
    with live.Peak() as after:
        fixed = run(made.edits[0].after)
    assert torch.equal(plain_rng, torch.get_rng_state())
    same(plain, fixed, "total", "correct")
    assert all(torch.equal(a, b) for a, b in zip(plain["preds"], fixed["preds"], strict=True))
    assert after.peak < 0.7 * before.peak
    assert isinstance(patched(SETUP, made.edits[0].after), Refused)


def test_training_with_an_evaluation_each_epoch_stays_bit_for_bit() -> None:
    made = patched(SETUP, FUNCTION, EPOCHS)
    assert isinstance(made, Patch), made
    assert "    with torch.no_grad():\n        for x, y in loader:" in made.edits[0].after
    plain = run(FUNCTION, EPOCHS)
    plain_rng = torch.get_rng_state()
    fixed = run(FUNCTION, made.edits[0].replay, EPOCHS)
    assert torch.equal(plain_rng, torch.get_rng_state())
    same(plain, fixed, "history")
    assert isinstance(patched(SETUP, made.edits[0].after, EPOCHS), Refused)


def test_a_function_that_another_cell_may_train_by_stays_as_it_is() -> None:
    gives_graph = FUNCTION.replace(".item()", "")
    made = patched(SETUP, gives_graph, EPOCHS)
    assert isinstance(made, Patch), made
    assert [edit.cell for edit in made.edits] == [3]
    assert "    with torch.no_grad():\n        score = evaluate(model, test_loader)" in made.edits[0].after
    run(gives_graph, made.edits[0].after, "evaluate(model, train_loader).backward()")


def test_a_training_step_under_no_grad_would_be_seen() -> None:
    """What the promise rests on: had the wrong loop been taken, the comparison above fails."""
    wrong = textwrap.dedent(FUNCTION).replace("def", "@torch.no_grad()\ndef") + textwrap.dedent(
        "def step(x, y):\n    return criterion(model(x), y)\n"
    )
    with pytest.raises(RuntimeError, match="does not require grad"):
        run(wrong.replace("def step", "@torch.no_grad()\ndef step"), "step(*train_loader[0]).backward()")


def test_statements_that_follow_one_another_share_one_with() -> None:
    made = patched(
        SETUP, "# both\na = model(test_loader[0][0])\nb = model(test_loader[1][0])\nprint(a.mean(), b.mean())"
    )
    assert isinstance(made, Patch), made
    assert made.edits[0].after == (
        "# both\nwith torch.no_grad():\n    a = model(test_loader[0][0])\n    b = model(test_loader[1][0])\n"
        "print(a.mean(), b.mean())"
    )


@pytest.mark.parametrize(
    ("source", "after"),
    [
        (
            "from torch import nn\npred = model(x)",
            "from torch import nn\nimport torch\n\nwith torch.no_grad():\n    pred = model(x)",
        ),
        ("import torch as th\npred = model(x)", "import torch as th\nwith th.no_grad():\n    pred = model(x)"),
        ("%time pred = model(x)", None),
        ("import torch\n%time pred = model(x)", "import torch\nwith torch.no_grad():\n    %time pred = model(x)"),
        (
            "import numpy, torch\n!nvidia-smi\npred = model(x)",
            "import numpy, torch\n!nvidia-smi\nwith torch.no_grad():\n    pred = model(x)",
        ),
    ],
)
def test_names_of_torch_and_lines_of_ipython(source: str, after: str | None) -> None:
    made = patched(source)
    if after is None:
        assert isinstance(made, Refused)
    else:
        assert isinstance(made, Patch), made
        assert made.edits[0].after == after


@pytest.mark.parametrize(
    "source",
    [
        "import torch; out = model(x)",
        "if ready: out = model(x)\nelse: out = None; loss = model(x).sum(); loss.backward()",
        "torch = None\nout = model(x)",
        "for x, y in train_loader:\n    loss = criterion(model(x), y)\n    loss.backward()",
        "for x, y in test_loader:\n    x.requires_grad_()\n    criterion(model(x), y).backward()\n    a = x + x.grad",
        "for x, y in test_loader:\n    g = torch.autograd.grad(model(x).sum(), x)",
    ],
)
def test_what_cannot_be_is_refused(source: str) -> None:
    assert isinstance(patched(source), Refused)


def test_an_earlier_top_level_loop_is_not_touched() -> None:
    made = patched(SETUP, NOTEBOOK, "print(total)")
    assert isinstance(made, Refused)


SCORED = """
    total = 0.0
    for x, y in test_loader:
        total += criterion(model(x), y).item()
"""


def test_proposal_is_exact_and_measured() -> None:
    cells = cells_of(SETUP, SCORED)
    (proposal,) = propose(live.INCIDENT, evidence(cells))  # type: ignore[misc]
    assert (proposal.effect, proposal.saves, proposal.caveat) == (Effect.EXACT, 64 << 20, None)
    assert "64.0 MiB of activations" in proposal.basis
    assert FIX.apply is None


FEATURES = """
    feats = []
    for x, _ in test_loader:
        feats.append(model(x))
    feats = torch.cat(feats)
"""


@pytest.mark.parametrize(
    ("sources", "named"),
    [
        ((SETUP, FEATURES), "`feats` will hold values without gradients"),
        ((SETUP, "x = test_loader[0][0]\nout = model(x)"), "`out` will hold values without gradients"),
        ((SETUP, "x = test_loader[0][0]\nmodel(x)"), "`Out` will hold values without gradients"),
        (
            (SETUP, "kept = {}", "kept['a'] = [model(x) for x, _ in test_loader]"),
            "`kept` will hold values without gradients",
        ),
        (
            (SETUP, "def predict(net):\n    return torch.cat([net(x) for x, _ in test_loader])", "p = predict(model)"),
            "`p` will hold values without gradients",
        ),
        (
            (SETUP, "seen = []\ndef run():\n    for x, _ in test_loader:\n        seen.append(model(x))", "run()"),
            "`seen` will hold values without gradients",
        ),
    ],
)
def test_what_outlives_the_cell_may_be_trained_on_unless_the_model_is_in_evaluation(
    sources: tuple[str, ...], named: str
) -> None:
    cells = cells_of(*sources)
    (proposal,) = propose(live.INCIDENT, evidence(cells))  # type: ignore[misc]
    assert proposal.effect is Effect.CHANGES_RESULT
    assert named in str(proposal.caveat)
    evaluated = evidence(cells, model=program()["model"].eval(), other=nn.Linear(2, 2))
    (proposal,) = propose(live.INCIDENT, evaluated)  # type: ignore[misc]
    assert proposal.effect is Effect.EXACT
    assert named in str(proposal.caveat)


@pytest.mark.parametrize("made", ["torch.ones(1, requires_grad=True)", "[torch.ones(1).requires_grad_()]"])
def test_an_input_that_requires_a_gradient_may_get_one_from_what_is_kept(made: str) -> None:
    cells = cells_of(SETUP, FEATURES)
    live_now = {"model": program()["model"].eval(), "other": nn.Linear(2, 2), "noise": eval(made)}
    (proposal,) = propose(live.INCIDENT, evidence(cells, **live_now))  # type: ignore[misc]
    assert proposal.effect is Effect.CHANGES_RESULT


@pytest.mark.parametrize("source", [FEATURES + "    feats = feats.detach()", NOTEBOOK + "    del out, preds"])
def test_what_the_cell_lets_go_of_is_trained_on_by_none(source: str) -> None:
    (proposal,) = propose(live.INCIDENT, evidence(cells_of(SETUP, source)))  # type: ignore[misc]
    assert (proposal.effect, proposal.caveat) == (Effect.EXACT, None)


def test_a_later_cell_would_train_on_what_is_kept_without_a_word() -> None:
    """What the weaker promise rests on."""
    later = "head = nn.Linear(3, 1)\nhead(feats).sum().backward()\nmoved = model[0].weight.grad is not None"
    made = patched(SETUP, FEATURES)
    assert isinstance(made, Patch), made
    assert run(FEATURES, later)["moved"]
    assert not run(made.edits[0].after, later)["moved"]


def test_what_a_comprehension_kept_is_gone_when_its_failure_is_looked_at() -> None:
    cells = cells_of(SETUP, "import torch\nouts = [model(x) for x, _ in test_loader]")
    in_layer = dataclasses.replace(live.INCIDENT, framework_frame="torch/nn/modules/linear.py:134 forward")
    (proposal,) = propose(in_layer, evidence(cells, activation=0))  # type: ignore[misc]
    assert (proposal.saves, proposal.basis) == (1 << 20, "at least the 1.00 MiB that a layer asked for")
    made = patch(cells, evidence(cells), Dose())
    assert isinstance(made, Patch), made
    assert "with torch.no_grad():\n    outs = [model(x)" in made.edits[0].after


def test_layers_with_a_fast_path_weaken_the_promise() -> None:
    cells = cells_of(SETUP, "encoded = model(x)")
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    (proposal,) = propose(live.INCIDENT, evidence(cells, model=layer))  # type: ignore[misc]
    assert proposal.effect is Effect.CHANGES_RESULT
    assert "`model` takes a fused kernel" in str(proposal.caveat)
    x = torch.randn(2, 5, 8)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    kept = layer(x, src_key_padding_mask=padded)
    with torch.no_grad():
        assert not torch.equal(kept, layer(x, src_key_padding_mask=padded))


def test_what_there_is_no_evidence_for_is_refused() -> None:
    cells = cells_of(SETUP, NOTEBOOK)
    nothing_kept = propose(live.INCIDENT, evidence(cells, activation=0))
    assert isinstance(nothing_kept, Refused)
    assert "no activations" in nothing_kept.reason
    off = cells_of(SETUP, "with torch.no_grad():\n    out = model(x)")
    disabled = propose(live.INCIDENT, evidence(off, line=2))
    assert isinstance(disabled, Refused)
    assert "off already" in disabled.reason
    training = propose(
        live.INCIDENT, evidence(cells_of(SETUP, "for x, y in train_loader:\n    model(x).sum().backward()"))
    )
    assert isinstance(training, Refused)
    assert "no model with gradients on" in training.reason


DEEP = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(10)])
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(2048, 256), torch.randn(2048, 256)) for _ in range(2)]
"""


def test_heals_an_evaluation_on_the_virtual_accelerator() -> None:
    gc.collect()
    source = "scores = []\nfor x, y in loader:\n    scores.append(criterion(model(x), y).item())\n"
    healed: dict[str, Any] = {}
    case = assert_heals("no_grad_eval", DEEP, source, budget="24MiB", namespace=healed)
    assert case.outcome.fixes == ("no_grad_eval",)
    plain: dict[str, Any] = {}
    exec(DEEP + source, plain)
    assert healed["scores"] == plain["scores"]


ACTIVATIONS = ((Role.ACTIVATION, 1 << 20),)


@pytest.mark.parametrize(
    ("path", "expression", "line", "is_refused"),
    [
        ("loss → graph", "loss", 9, True),
        ("local `input` of forward at linear.py line 134", "input", 9, True),
        ("out → graph", "out", 9, False),  # what the evaluation of the epoch before has left
        ("local `out` of evaluate at In[2] line 3", "out", 9, False),
        ("loss → graph", "loss", 4, False),  # a teacher within the loop
    ],
)
def test_activations_of_the_training_step_are_not_those_of_the_evaluation(
    path: str, expression: str, line: int, is_refused: bool
) -> None:
    held = Holding(bytes=1 << 20, device="cuda:0", role=Role.ACTIVATION, path=path, expression=expression)
    loop = dataclasses.replace(live.loop(1, 2), end_line=6)
    found = live.evidence(roles=ACTIVATIONS, holdings=(held,), loops=(loop,))
    code = dataclasses.replace(found.code, sites={"no_grad_eval": (site(f"In[1] line {line}: out = model(x)"),)})
    proposed = propose(live.INCIDENT, dataclasses.replace(found, code=code))
    assert isinstance(proposed, Refused) is is_refused, proposed
