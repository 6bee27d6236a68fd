from __future__ import annotations

import dataclasses
import textwrap
import weakref
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomdoctor.fixes.offload_predictions import FIX, patch, propose
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

NOTEBOOK = """
    model.eval()
    preds, labels = [], []
    with torch.no_grad():
        for x, y in loader:
            preds.append(model(x))  # logits
            labels.append(y)
    preds = torch.cat(preds)
    labels = torch.cat(labels)
    accuracy = (preds.argmax(1) == labels).float().mean()
    print(f"accuracy {accuracy.item():.3f}")
"""
PREDICT = """
    @torch.no_grad()
    def predict(net, loader):
        outputs = []
        for x, _ in loader:
            outputs.append(net(x).softmax(1))
        return torch.cat(outputs)
"""
HELD = Holding(bytes=5 << 20, device="cuda:0", role=Role.USER_TENSOR, path="preds[0:40]")


def program() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "torch": torch,
        "model": nn.Linear(8, 3),
        "loader": [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(5)],
    }


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(cells: Cells, *holdings: Holding, device: str = "cuda:0") -> Evidence:
    namespace = program()
    base = live.evidence(holdings=holdings)
    memory = dataclasses.replace(base.device, tensor_device=device)
    code = facts(cells, namespace, [("model", namespace["model"])], [])
    return dataclasses.replace(base, devices=(memory,), code=code)


def patched(*sources: str, holdings: tuple[Holding, ...] = (HELD,)) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells, *holdings), Dose())


def run(*sources: str) -> dict[str, Any]:
    namespace = program()
    for source in sources:
        exec(textwrap.dedent(source), namespace)
    return namespace


class OnDevice(TorchDispatchMode):
    """The most bytes on the fake device that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                storage = leaf.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


GATHER = "preds = []\nwith torch.no_grad():\n    for x, y in loader:\n        preds.append(model(x))\n"


def peak_on_device(source: str) -> int:
    with FakeTensorMode(), OnDevice() as seen:
        weight = torch.empty(8, 64, device="cuda")
        batches = [(torch.empty(256, 8, device="cuda"), None) for _ in range(8)]
        exec(source, {"torch": torch, "model": lambda x: x @ weight, "loader": batches})
    return seen.peak


GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -3,8 +3,8 @@
 preds, labels = [], []
 with torch.no_grad():
     for x, y in loader:
-        preds.append(model(x))  # logits
-        labels.append(y)
+        preds.append(model(x).cpu())  # logits
+        labels.append(y.cpu())
 preds = torch.cat(preds)
 labels = torch.cat(labels)
 accuracy = (preds.argmax(1) == labels).float().mean()
"""


def test_labels_move_along_and_the_results_are_the_same() -> None:
    made = patched(NOTEBOOK)
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN
    plain, fixed = run(NOTEBOOK), run(made.edits[0].after)
    assert torch.equal(plain["preds"], fixed["preds"])
    assert torch.equal(plain["accuracy"], fixed["accuracy"])
    assert isinstance(patched(made.edits[0].after), Refused)


def test_the_peak_on_the_device_falls() -> None:
    made = patched(GATHER)
    assert isinstance(made, Patch), made
    before, after = peak_on_device(GATHER), peak_on_device(made.edits[0].after)
    outputs = 8 * 256 * 64 * 4
    assert before - after >= outputs * 6 / 8


def test_a_function_of_an_earlier_cell_and_what_its_caller_does() -> None:
    call = "p = predict(model, loader)\nnp_p = p.numpy()\nbest = p.argmax(dim=1).tolist()"
    made = patched(PREDICT, call, holdings=())
    assert isinstance(made, Patch), made
    (edit,) = made.edits
    assert "outputs.append(net(x).softmax(1).cpu())" in edit.replay
    plain, fixed = run(PREDICT, call), run(PREDICT, edit.replay, call)
    assert torch.equal(plain["p"], fixed["p"])
    assert plain["best"] == fixed["best"]


@pytest.mark.parametrize(
    ("use", "part"),
    [
        ("loss = criterion(torch.cat(preds), y)", "criterion"),
        ("again = [model(p) for p in preds]", "model"),
        ("best = torch.cat(preds) - offset", "`offset`"),
        ("hits = torch.cat(preds).argmax(1) == targets", "`targets`"),
        ("hits = torch.cat(preds).argmax(1) == y", "`y`"),
        ("for p, t in zip(preds, targets):\n    print(p == t)", "`t`"),
        ("top = torch.cat(preds).topk(2)", "topk"),
        ("ranked = torch.cat(preds).sort()", "sort"),
        ("drawn = torch.multinomial(torch.cat(preds), 2)", "multinomial"),
        ("joined = torch.cat(preds, out=buffer)", "out=buffer"),
        ("preds[0].relu_()", "relu_"),
    ],
)
def test_uses_that_need_the_device_are_refused(use: str, part: str) -> None:
    made = patched(GATHER + use)
    assert isinstance(made, Refused)
    assert part in made.reason


@pytest.mark.parametrize(
    "use",
    [
        "torch.cat(preds).softmax(1)",
        "mean = torch.cat(preds).mean()",
        "half = torch.cat(preds) / 3",
        "metric.update(preds)",
        "def show():\n    return torch.cat(preds).exp()",
    ],
)
def test_what_may_round_otherwise_on_the_host_is_allowed(use: str) -> None:
    made = patched(GATHER + use)
    assert isinstance(made, Patch), made
    (proposal,) = propose(live.INCIDENT, evidence(cells_of(GATHER + use), HELD))  # type: ignore[misc]
    assert proposal.effect is Effect.EQUIVALENT


@pytest.mark.parametrize(
    "use",
    [
        "out = torch.cat(preds).cpu().numpy()",
        "out = torch.cat(preds).to(device)",
        "out = np.concatenate([p.numpy() for p in preds])",
        "n = len(preds)\nprint(preds[0].shape)",
        "hits = (torch.cat(preds) > 0.5).sum().item()",
        "classes = torch.cat(preds).max(dim=1)[1]\nprint(classes)",
        "for p in preds:\n    print(p.size(0), p[0].tolist())",
        "for p, name in zip(preds, names):\n    print(name, p.shape)",
        "kept = [p[:, 1] for p in preds]\nall_of_them = torch.cat(kept)",
        "",
    ],
)
def test_uses_that_are_the_same_anywhere_are_allowed(use: str) -> None:
    made = patched(GATHER + use)
    assert isinstance(made, Patch), made
    assert made.edits[0].after == GATHER.replace("model(x)", "model(x).cpu()") + use
    (proposal,) = propose(live.INCIDENT, evidence(cells_of(GATHER + use), HELD))  # type: ignore[misc]
    assert proposal.effect is Effect.EQUIVALENT


@pytest.mark.parametrize("write", ["out.relu_()", "out += 1", "out[0] = 0"])
def test_what_is_written_to_after_it_was_collected_is_refused(write: str) -> None:
    made = patched(f"preds = []\nfor x, y in loader:\n    out = model(x)\n    preds.append(out)\n    {write}\n")
    assert isinstance(made, Refused)
    assert "in place" in made.reason


def test_a_later_cell_of_an_earlier_run_counts() -> None:
    assert isinstance(patched(GATHER, "torch.cat(preds).topk(1)", GATHER), Refused)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("kept = []\nfor x, y in loader:\n    kept.append((model(x), y))", "more than one tensor"),
        ("kept = {}\nfor i, (x, y) in enumerate(loader):\n    kept[i] = model(x)", "append them to a list"),
        ("out = torch.empty(0)\nfor x, y in loader:\n    out = torch.cat([out, model(x)])", "append them to a list"),
        ("def f(kept):\n    for x, y in loader:\n        kept.append(model(x))\nf(held)", "made elsewhere"),
    ],
)
def test_other_ways_to_collect_are_refused(source: str, part: str) -> None:
    made = patched(source)
    assert isinstance(made, Refused)
    assert part in made.reason


def test_a_graph_is_detached_where_that_is_certain_to_be_right_and_refused_elsewhere() -> None:
    graph = Holding(bytes=1 << 20, device="cuda:0", role=Role.GRAPH_KEPT_ALIVE, path="preds[0:40] → graph")
    source = "preds = []\nfor x, y in loader:\n    preds.append(model(x))\nprint(len(preds))"
    made = patched(source, holdings=(HELD, graph))
    assert isinstance(made, Patch), made
    assert "preds.append(model(x).detach().cpu())" in made.edits[0].after
    returned = (
        "def f():\n    preds = []\n    for x, y in loader:\n        preds.append(model(x))\n    return preds\nf()"
    )
    refused = patched(returned, holdings=(HELD, graph))
    assert isinstance(refused, Refused)
    assert "autograd graph" in refused.reason


def test_proposal_is_measured_and_says_where_they_are_afterwards() -> None:
    (proposal,) = propose(live.INCIDENT, evidence(cells_of(NOTEBOOK), HELD))  # type: ignore[misc]
    assert (proposal.effect, proposal.saves) == (Effect.EQUIVALENT, 5 << 20)
    assert "`preds` is in host memory then" in str(proposal.caveat)
    assert FIX.apply is None


@pytest.mark.parametrize(
    ("source", "device", "holdings", "part"),
    [
        ("print(1)", "cuda:0", (HELD,), "no loop"),
        (NOTEBOOK, "cpu", (HELD,), "in host memory already"),
        (NOTEBOOK, "cuda:0", (), "found nothing"),
    ],
)
def test_no_proposal_without_evidence(source: str, device: str, holdings: tuple[Holding, ...], part: str) -> None:
    refused = propose(live.INCIDENT, evidence(cells_of(source), *holdings, device=device))
    assert isinstance(refused, Refused)
    assert part in refused.reason
