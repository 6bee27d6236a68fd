from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oomdoctor.fixes.autocast import FIX, patch, propose
from oomdoctor.model.code import CodeFacts, LossFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

BF16, FP16 = Dose.of(dtype="bfloat16"), Dose.of(dtype="float16")

SETUP = """
    import torch
    from torch import nn
    from torch.nn.utils import clip_grad_norm_
"""
PLAIN = """
    for x, y in loader:
        optimizer.zero_grad()
        # the whole network
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
BETWEEN = """
    for i, (x, y) in enumerate(loader):
        logits = model(x)
        loss = criterion(logits, y)

        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
"""
ACCUMULATING = """
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        (loss / 2).backward()
        if (i + 1) % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
"""
FUNCTION = """
    # one epoch
    def train(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
"""
HELPER = """
    def compute_loss(net, x, y):
        return criterion(net(x), y)
"""
BY_HELPER = """
    for x, y in loader:
        optimizer.zero_grad()
        loss = compute_loss(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
SHARED_LINES = """
    for step, (x, y) in enumerate(loader):
        logits = model(x); loss = criterion(logits, y); loss.backward()  # as ever
        if step % 2: nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
"""
SHARED_BRANCH = """
    for step, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss.backward(); losses.append(loss.item())
        if step % 2:
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
"""
UNNAMED = """
    for x, y in loader:
        optimizer.zero_grad()
        # the whole step
        criterion(model(x), y).backward()  # at once
        optimizer.step()
        losses.append(model[2].weight.detach().abs().mean().item())
"""
NOTEBOOKS = {
    "unnamed": (SETUP, UNNAMED),
    "shared lines": (SETUP, SHARED_LINES),
    "shared branch": (SETUP, SHARED_BRANCH),
    "plain": (SETUP, PLAIN),
    "between": (SETUP, BETWEEN),
    "accumulating": (SETUP, ACCUMULATING),
    "function": (SETUP, FUNCTION, "for epoch in range(2):\n    train(model, loader, optimizer)\n"),
    "helper": (SETUP, HELPER, BY_HELPER),
}


def program(**other: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "criterion": nn.CrossEntropyLoss(),
        "loader": DataLoader(TensorDataset(x, y), batch_size=16),
        "losses": [],
        **other,
    }


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def read(cells: Cells, namespace: dict[str, Any]) -> CodeFacts:
    kinds = (nn.Module, torch.optim.Optimizer, DataLoader)
    found = [[(name, value) for name, value in namespace.items() if isinstance(value, kind)] for kind in kinds]
    return facts(cells, namespace, *found)


def evidence(*sources: str, **code: Any) -> Evidence:
    base = live.evidence()
    known = replace(read(cells_of(*sources), program()), **code)
    return Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=known)


def patched(*sources: str, dose: Dose = BF16) -> Patch | Refused:
    return patch(cells_of(*sources), evidence(*sources), dose)


def run(sources: list[str], namespace: dict[str, Any]) -> dict[str, Any]:
    for source in sources:
        exec(compile(textwrap.dedent(source), "<cell>", "exec"), namespace)
    return namespace


def after(made: Patch, sources: tuple[str, ...], *, retried: bool = False) -> list[str]:
    texts = list(sources)
    for edit in made.edits:
        texts[edit.cell - 1] = edit.replay if retried else edit.after
    return texts


def outputs(model: nn.Module) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))  # type: ignore[index, operator]
    return seen


@pytest.mark.parametrize("dose", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_patched_step_computes_in_16_bits_and_learns_as_before(name: str, dose: Dose) -> None:
    sources = NOTEBOOKS[name]
    made = patched(*sources, dose=dose)
    assert isinstance(made, Patch), made
    plain, fixed, retried = program(), program(), program()
    dtypes = outputs(fixed["model"])
    run(list(sources), plain)
    run(after(made, sources), fixed)
    run(after(made, sources, retried=True), retried)
    assert set(dtypes) == {getattr(torch, str(dose["dtype"]))}
    assert all(parameter.dtype is torch.float32 for parameter in fixed["model"].parameters())
    assert len(fixed["losses"]) == len(plain["losses"])
    assert fixed["losses"] == pytest.approx(plain["losses"], rel=0.02)
    assert fixed["losses"] != plain["losses"]
    assert live.furthest(live.values(plain["model"]), live.values(fixed["model"])) < 0.05
    assert live.same(live.values(fixed["model"]), live.values(retried["model"]))
    assert fixed["scheduler"].last_epoch == plain["scheduler"].last_epoch
    assert isinstance(patched(*after(made, sources), dose=dose), Refused)


BF16_DIFF = """\
--- In[2]
+++ In[2] fixed
@@ -2,8 +2,9 @@
 for x, y in loader:
     optimizer.zero_grad()
     # the whole network
-    logits = model(x)
-    loss = criterion(logits, y)
+    with torch.autocast("cpu", dtype=torch.bfloat16):
+        logits = model(x)
+        loss = criterion(logits, y)
     loss.backward()
     optimizer.step()
     losses.append(loss.item())
"""
FP16_DIFF = """\
--- In[2]
+++ In[2] fixed
@@ -1,11 +1,17 @@
\x20
+scaler = torch.amp.GradScaler("cpu")
 for i, (x, y) in enumerate(loader):
-    logits = model(x)
-    loss = criterion(logits, y)
+    with torch.autocast("cpu", dtype=torch.float16):
+        logits = model(x)
+        loss = criterion(logits, y)
\x20
     optimizer.zero_grad()
-    loss.backward()
+    scaler.scale(loss).backward()
+    scaler.unscale_(optimizer)
     clip_grad_norm_(model.parameters(), 0.1)
-    optimizer.step()
-    scheduler.step()
+    scaler.step(optimizer)
+    scale = scaler.get_scale()
+    scaler.update()
+    if scaler.get_scale() >= scale:  # no step was taken if the gradients overflowed
+        scheduler.step()
     losses.append(loss.item())
"""


@pytest.mark.parametrize(("name", "dose", "diff"), [("plain", BF16, BF16_DIFF), ("between", FP16, FP16_DIFF)])
def test_golden_diffs(name: str, dose: Dose, diff: str) -> None:
    made = patched(*NOTEBOOKS[name], dose=dose)
    assert isinstance(made, Patch)
    assert made.diff() == diff


@pytest.mark.parametrize("dose", [BF16, FP16], ids=str)
def test_the_type_of_the_device_is_written_out(dose: Dose) -> None:
    loop = PLAIN.replace("model(x)", "model(x.to(device))").replace("losses.append(loss.item())", "pass")
    sources = (SETUP, "device = torch.device('cpu', 0)", loop)
    made = patched(*sources, dose=dose)
    assert isinstance(made, Patch)
    assert 'torch.autocast("cpu", dtype=' in made.edits[-1].after
    assert run(after(made, sources), program())["logits"].dtype is getattr(torch, str(dose["dtype"]))


def test_bce_under_another_name_is_refused() -> None:
    found = patched(SETUP, "from torch.nn.functional import binary_cross_entropy as bce", PLAIN)
    assert isinstance(found, Refused)
    assert "BCELoss" in found.reason


def test_a_scaler_for_a_function_is_made_once_before_it() -> None:
    made = patched(*NOTEBOOKS["function"], dose=FP16)
    assert isinstance(made, Patch)
    lines = made.edits[0].after.splitlines()
    assert lines[1:5] == ["# one epoch", 'scaler = torch.amp.GradScaler("cpu")', "", ""]
    assert made.edits[0].replay.endswith('\n\nscaler = torch.amp.GradScaler("cpu")')
    assert "# one epoch" not in made.edits[0].replay


def test_a_step_that_overflows_moves_neither_weights_nor_schedule() -> None:
    sources = NOTEBOOKS["between"]
    made = patched(*sources, dose=FP16)
    assert isinstance(made, Patch)
    namespace = program(criterion=lambda out, y: out.float().pow(2).mean() * 1e36)
    weight = namespace["model"][0].weight.clone()
    run(after(made, sources), namespace)
    assert torch.equal(namespace["model"][0].weight, weight)
    assert namespace["scheduler"].last_epoch == 0


def test_gradients_are_clipped_after_they_are_unscaled() -> None:
    sources = NOTEBOOKS["between"]
    made = patched(*sources, dose=FP16)
    assert isinstance(made, Patch)
    namespace = program()
    namespace["loader"] = list(namespace["loader"])[:1]
    weights = live.values(namespace["model"])
    run(after(made, sources), namespace)
    moved = [weights[name] - now for name, now in live.values(namespace["model"]).items()]
    norm = torch.cat([one.flatten() for one in moved]).norm() / 0.1
    assert float(norm) == pytest.approx(0.1, rel=1e-3)


CLIP = "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
REFUSED_IN_SOURCE = {
    "two losses": (("for x, y in loader:\n    loss = model(x).sum()\n    loss.backward()\n    loss.backward()\n    "
                   "optimizer.step()\n"), BF16, "backward 2 times"),
    "accelerator": (PLAIN.replace("loss.backward()", "accelerator.backward(loss)"), BF16, "its own settings"),
    "autocast": (PLAIN.replace("logits = model(x)", "with torch.autocast('cuda'):\n            logits = model(x)"),
                 BF16, "cell 2 has to do with mixed precision already"),
    "scaler": ("scaler = torch.cuda.amp.GradScaler()\n" + textwrap.dedent(PLAIN), BF16, "mixed precision already"),
    "bce": (PLAIN.replace("criterion(", "nn.BCELoss()("), BF16, "BCEWithLogitsLoss"),
    "functional bce": (PLAIN.replace("criterion(", "F.binary_cross_entropy("), BF16, "BCEWithLogitsLoss"),
    "numpy": (PLAIN + "        losses.append(logits.detach().numpy())\n", BF16, "a precision that NumPy has"),
    "gradients read": (PLAIN.replace("optimizer.step()", "print(model[0].weight.grad)\n        optimizer.step()"),
                       FP16, "is read while gradients are scaled"),
    "closure": (PLAIN.replace("optimizer.step()", "optimizer.step(lambda: loss)"), FP16, "one plain call"),
    "clipped twice": (BETWEEN.replace("optimizer.step()", "clip_grad_norm_(model[0].parameters(), 1.0)\n        "
                                      "optimizer.step()"), FP16, "unscaled more than once"),
    "schedule apart": (ACCUMULATING.replace("            scheduler.step()\n", "") + "        scheduler.step()\n",
                       FP16, "does not follow the step"),
    "clipped apart": (ACCUMULATING.replace(CLIP, "").replace("        if (i", f"    {CLIP.strip()}\n        if (i")
                      .replace("    nn.utils.clip", "        nn.utils.clip"), FP16, "unscaled more than once"),
    "no training": ("model(torch.randn(2, 8))", BF16, "no training loop"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_IN_SOURCE)
def test_what_is_not_safe_in_source_is_refused(name: str) -> None:
    source, dose, reason = REFUSED_IN_SOURCE[name]
    made = patched(SETUP, source, dose=dose)
    assert isinstance(made, Refused), made.diff()
    assert reason in made.reason


def test_torch_unknown_by_name_is_refused() -> None:
    made = patched("from torch import nn", PLAIN)
    assert isinstance(made, Refused)
    assert "do not import `torch`" in made.reason


def proposed(*, device: str = "cpu", activations: int = 64 << 20, **code: Any) -> Any:
    known = evidence(SETUP, PLAIN, **code)
    seen = replace(known.devices[0], tensor_device=device)
    census = replace(known.censuses[0], roles=((Role.ACTIVATION, activations),))
    return propose(live.INCIDENT, replace(known, devices=(seen,), censuses=(census,)))


def test_proposal_takes_the_precision_of_the_device() -> None:
    (made,) = proposed()
    assert (made.dose, made.effect) == (BF16, Effect.CHANGES_RESULT)
    assert "8 significant bits" in made.caveat
    weights = sum(p.numel() * 4 for p in program()["model"].parameters())
    assert made.saves == (32 << 20) - weights // 2
    assert "half of 64.0 MiB" in made.basis
    assert proposed(device="cuda:0", native_bfloat16=True)[0].dose == BF16
    (old,) = proposed(device="cuda:0", native_bfloat16=False)
    assert old.dose == FP16
    assert "overflow" in old.caveat
    assert FIX.effect is Effect.CHANGES_RESULT


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"autocast": True}, "in force already"),
        ({"half_weights": True}, "2 bytes already"),
        ({"grad_disabled": True}, "autograd is off"),
        ({"models": ()}, "no model"),
        ({"losses": (LossFacts(path="criterion", type_name="BCELoss", reduction="mean"),)}, "BCEWithLogitsLoss"),
        ({"device": "mps:0"}, "16 bits on mps"),
        ({"float32_only": ("LSTM",)}, "no kernel for LSTM in bfloat16"),
        ({"device": "cuda:0"}, "is not known"),
        ({"device": "cuda:0", "native_bfloat16": False, "loops": ()}, "no training loop"),
        ({"activations": 1000}, "16-bit copies"),
    ],
)
def test_no_proposal(given: dict[str, Any], reason: str) -> None:
    made = proposed(**given)
    assert isinstance(made, Refused)
    assert reason in made.reason
