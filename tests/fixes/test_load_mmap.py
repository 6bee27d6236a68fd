from __future__ import annotations

import textwrap
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor.fixes import get
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

FIX = get("load_mmap")
patch, propose = FIX.patch, FIX.propose

TENSORS = ((Role.USER_TENSOR, 5 << 20), (Role.PARAMETER, 5 << 20))

RESUMES = """\
import torch

torch.manual_seed(0)
model = Net(size=64)
checkpoint = torch.load(path)  # from last week
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
optimizer.load_state_dict(checkpoint['optimizer'])
start = checkpoint["epoch"] + 1
losses = []
for x in batches:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""
GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -2,7 +2,7 @@
\x20
 torch.manual_seed(0)
 model = Net(size=64)
-checkpoint = torch.load(path)  # from last week
+checkpoint = torch.load(path, map_location="cpu", mmap=True)  # from last week
 model.load_state_dict(checkpoint["model"])
 optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
 optimizer.load_state_dict(checkpoint['optimizer'])
"""


class Net(nn.Sequential):
    def __init__(self, size: int = 64) -> None:
        super().__init__(nn.Linear(size, size), nn.BatchNorm1d(size), nn.Dropout(0.2), nn.Linear(size, size))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of a model that was trained for two steps."""
    torch.manual_seed(7)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(*sources: str, roles: tuple[tuple[Role, int], ...] = TENSORS) -> Evidence:
    return replace(
        live.evidence(roles=roles), code=facts(cells_of(*sources), {}, [("model", nn.Linear(1, 1))], loaded=())
    )


def patched(*sources: str) -> Patch | Refused:
    found = evidence(*sources)
    proposals = propose(live.INCIDENT, found)
    assert not isinstance(proposals, Refused), proposals
    return patch(cells_of(*sources), found, proposals[0].dose)


def after(*sources: str) -> str:
    made = patched(*sources)
    assert isinstance(made, Patch), made
    return made.edits[-1].after


def run(source: str, path: Path, context: Any = None, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    space: dict[str, Any] = {"torch": torch, "Net": Net, "path": path, **more}
    space["batches"] = [torch.randn(8, 64, generator=generator) for _ in range(5)]
    with context or nullcontext():
        exec(source, space)
    return space | {"rng": torch.get_rng_state()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return (
        all(torch.equal(a, b) for a, b in zip(left["losses"], right["losses"], strict=True))
        and live.same(live.values(left["model"]), live.values(right["model"]))
        and torch.equal(left["rng"], right["rng"])
        and left["start"] == right["start"]
    )


def test_golden_diff_and_second_time() -> None:
    made = patched(RESUMES)
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    assert isinstance(propose(live.INCIDENT, evidence(made.edits[0].after)), Refused)
    again = patch(cells_of(made.edits[0].after), evidence(RESUMES), Dose.of(cell=1, line=5))
    assert again == Refused("there is nothing left to change")


def test_the_same_bits_after_five_more_steps_and_the_file_is_as_it_was(path) -> None:
    content = path.read_bytes()
    plain = run(RESUMES, path)
    assert same(plain, run(after(RESUMES), path))
    assert path.read_bytes() == content


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter:UserWarning")
def test_a_checkpoint_that_went_onto_the_device_stays_on_the_host(path) -> None:
    source = """
        ck = torch.load(path, map_location=device)
        with torch.device(device):
            model = Net()
        model.load_state_dict(ck["model"])
    """
    plain = run(textwrap.dedent(source), path, device="meta")
    assert all(one.is_meta for one in plain["ck"]["model"].values())
    text = after(source)
    assert 'torch.load(path, map_location="cpu", mmap=True)' in text
    fixed = run(text, path, device="meta")
    assert all(one.device.type == "cpu" for one in fixed["ck"]["model"].values())
    assert all(one.is_meta for one in fixed["model"].state_dict().values())


RENAMES = """\
ck = torch.load('a.pt')
state = ck['model']
state = {k.replace('module.', ''): v for k, v in state.items()}
model.load_state_dict(state)
del ck
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "def f(net, name):\n    net.load_state_dict(torch.load(name, device)['net'], strict=False)\nf(model, p)",
            "net.load_state_dict(torch.load(name, \"cpu\", mmap=True)['net'], strict=False)",
        ),
        (
            RENAMES,
            "ck = torch.load('a.pt', map_location=\"cpu\", mmap=True)",
        ),
        (
            "buffer = io.BytesIO(data)\nmodel.load_state_dict(torch.load(buffer))",
            'torch.load(buffer, map_location="cpu")',
        ),
        ("with open(p, 'rb') as f:\n    m.load_state_dict(torch.load(f))", 'torch.load(f, map_location="cpu")'),
        (
            "m.load_state_dict(torch.load('a.pt'))\nfit(m)\ntorch.save(m.state_dict(), 'a.pt')",
            "torch.load('a.pt', map_location=\"cpu\")",
        ),
        ("m.load_state_dict(torch.load(open('a.pt', 'rb')))", "torch.load(open('a.pt', 'rb'), map_location=\"cpu\")"),
    ],
)
def test_forms_that_are_followed(source, expected) -> None:
    text = after(source)
    assert expected in text
    compile(text, "cell", "exec")


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        (("model = torch.load('model.pt')\nmodel(x)",), "beside load_state_dict"),
        (("x = torch.load('x.pt')\ny = x * 2",), "beside load_state_dict"),
        (("ck = torch.load('x.pt')\nmodel.load_state_dict(ck['m'])\nema = ck['ema'] * 2",), "beside load_state_dict"),
        (("run(torch.load('x.pt'))",), "not followed"),
        (("ck = torch.load('x.pt')",), "goes into no load_state_dict"),
        (("class T:\n    def f(self):\n        self.m.load_state_dict(torch.load('a.pt'))", "T().f()"), "class"),
        (("model.load_state_dict(torch.load('a.pt', **options))",), "no torch.load"),
        (("model.load_state_dict(torch.load('a.pt'), assign=True)",), "`assign`"),
    ],
)
def test_patch_refuses(sources, why) -> None:
    refused = patched(*sources)
    assert isinstance(refused, Refused), refused.diff()
    assert why in refused.reason


def test_proposal_and_refusals() -> None:
    (proposal,) = propose(live.INCIDENT, evidence(RESUMES))  # type: ignore[misc]
    assert (proposal.saves, proposal.effect, proposal.dose) == (5 << 20, Effect.EXACT, Dose.of(cell=1, line=5))
    assert FIX.apply is None
    refused = propose(live.INCIDENT, evidence("x = 1"))
    assert isinstance(refused, Refused)
    assert "no torch.load" in refused.reason
    no_size = replace(live.INCIDENT, requested=None)
    assert isinstance(propose(no_size, evidence(RESUMES, roles=())), Refused)


def test_host_memory_that_ran_out_in_the_line_that_loads() -> None:
    source = "model.load_state_dict(torch.load('a.pt', map_location='cpu'))"
    line = CellLine(number=1, line=1, source_line=source)
    incident = Incident(is_oom=True, family=Family.HOST, device="cpu", requested=3 << 20, cell=line)
    (proposal,) = propose(incident, evidence(source, roles=()))  # type: ignore[misc]
    assert proposal.saves == 3 << 20
    made = patch(cells_of(source), evidence(source), proposal.dose)
    assert isinstance(made, Patch)
    assert made.edits[0].after == "model.load_state_dict(torch.load('a.pt', map_location=\"cpu\", mmap=True))"
    elsewhere = replace(incident, cell=replace(line, source_line="x = torch.zeros(n)"))
    assert isinstance(propose(elsewhere, evidence(source, roles=())), Refused)


@pytest.mark.gpu
def test_on_a_gpu_the_checkpoint_takes_no_memory_beside_the_model(path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.save({name: one.cuda() for name, one in nn.Linear(2048, 2048).state_dict().items()}, path)
    source = "model = Net()\nmodel.load_state_dict(torch.load(path))\n"
    peaks = []
    for text in (source, after(source)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run(text, path, Net=lambda: nn.Linear(2048, 2048).cuda())
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0] - (12 << 20)
