from __future__ import annotations

import dataclasses
import os
import textwrap
from typing import Any

import live
import pytest
import torch

from oomdoctor import fixes
from oomdoctor.allocator.virtual import simulate
from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import process_settings
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.unavailable import Refused, Unavailable

FIX = fixes.get("expandable_segments")
apply, patch, propose = FIX.apply, FIX.patch, FIX.propose

DOSE = Dose.of(variable="PYTORCH_CUDA_ALLOC_CONF")
INCIDENT = dataclasses.replace(live.INCIDENT, requested=512 << 20)
IMPORTS = """
    # what we need
    import numpy as np
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
"""


def evidence(cuda_graphs: str | None = None, **readings: Any) -> Evidence:
    base = live.evidence()
    known = {"inactive_split": 900 << 20, **readings}
    code = dataclasses.replace(base.code, cuda_graphs=cuda_graphs)
    return dataclasses.replace(base, devices=(dataclasses.replace(base.device, **known),), code=code)


class Allocator:
    """Settings as torch's allocator keeps them: each time parsed as a whole, what is not said again is forgotten."""

    def __init__(self, settings: str = "") -> None:
        self.settings = settings

    def set(self, settings: str) -> None:
        if "nonsense" in settings:
            raise RuntimeError("Unrecognized CachingAllocator option: nonsense\nmore")
        self.settings = settings


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.set, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: made.settings, raising=False)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.mark.parametrize(
    ("before", "within", "after"),
    [
        ("", "expandable_segments:True", "expandable_segments:False"),
        (
            "max_split_size_mb:512",
            "max_split_size_mb:512,expandable_segments:True",
            "max_split_size_mb:512,expandable_segments:False",
        ),
        (
            "roundup_power2_divisions:[256:1,512:2], expandable_segments:False",
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
            "roundup_power2_divisions:[256:1,512:2], expandable_segments:False",
        ),
    ],
)
def test_set_at_run_time_beside_the_other_settings_and_put_back(
    allocator: Allocator, before: str, within: str, after: str
) -> None:
    allocator.settings = before
    seen = []

    def body() -> None:
        seen.append(allocator.settings)
        raise KeyError

    with pytest.raises(KeyError), apply(live.session(), DOSE):
        body()
    assert seen == [within]
    assert allocator.settings == after


def test_settings_of_the_environment_are_said_again(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    with apply(live.session(), DOSE):
        assert allocator.settings == "max_split_size_mb:128,expandable_segments:True"


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell them")
def test_the_function_of_the_torch_that_is_here() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        with apply(live.session(), DOSE):
            assert "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()
        assert "expandable_segments:False" in torch._C._accelerator_getAllocatorSettings()
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_what_the_allocator_does_not_take_is_said(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator.settings = "expandable_segments:True"
    with pytest.raises(OomDoctorError, match="expand already"), apply(live.session(), DOSE):
        pass
    allocator.settings = "nonsense:1"
    with pytest.raises(OomDoctorError, match="Unrecognized"), apply(live.session(), DOSE):
        pass
    monkeypatch.setattr(process_settings, "_setter", lambda: None)
    allocator.settings = ""
    with pytest.raises(OomDoctorError, match="by PYTORCH_CUDA_ALLOC_CONF"), apply(live.session(), DOSE):
        pass


def test_an_older_torch_has_the_function_elsewhere(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", allocator.set)
    with apply(live.session(), DOSE):
        assert allocator.settings == "expandable_segments:True"


@pytest.mark.parametrize(
    ("installed", "variable"),
    [
        ("2.4.1", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.1+cu128", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.11.0", "PYTORCH_ALLOC_CONF"),
        ("3.0.0a0+git1", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_variable_is_the_one_that_this_torch_reads(
    monkeypatch: pytest.MonkeyPatch, installed: str, variable: str
) -> None:
    monkeypatch.setattr(process_settings, "version", lambda _: installed)
    (proposal,) = propose(INCIDENT, evidence())  # type: ignore[misc]
    assert proposal.dose == Dose.of(variable=variable)


def test_proposal_is_measured_and_advice_where_it_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    (proposal,) = propose(INCIDENT, evidence())  # type: ignore[misc]
    assert (proposal.effect, proposal.saves) == (Effect.EXACT, 900 << 20)
    assert "900 MiB are unused in segments" in proposal.basis
    monkeypatch.setattr(process_settings, "_setter", lambda: None)
    (advice,) = propose(INCIDENT, evidence())  # type: ignore[misc]
    assert advice.effect is Effect.ADVICE
    assert advice.caveat == "it holds when the kernel is started again: this torch cannot set it at run time"
    assert FIX.guard is FIX.apply


@pytest.mark.parametrize(
    ("requested", "given", "part"),
    [
        (1 << 30, {}, "not fragmented"),
        (None, {}, "not fragmented"),
        (2 << 20, {}, "not fragmented"),
        (512 << 20, {"largest_free_block": 600 << 20}, "one of its free blocks"),
        (512 << 20, {"inactive_split": Unavailable("nobody counts")}, "not known: nobody counts"),
    ],
)
def test_it_saves_nothing_by_itself_without_evidence(requested: int | None, given: dict[str, Any], part: str) -> None:
    (proposal,) = propose(dataclasses.replace(INCIDENT, requested=requested), evidence(**given))  # type: ignore[misc]
    assert proposal.saves == 0
    assert part in proposal.basis


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"name": "mps"}, "no CUDA allocator"),
        ({"cuda_graphs": "In[1] line 2: torch.cuda.graph(g)"}, "CUDA graphs"),
    ],
)
def test_no_proposal_where_there_are_no_such_segments(given: dict[str, Any], part: str) -> None:
    refused = propose(INCIDENT, evidence(**given))
    assert isinstance(refused, Refused)
    assert part in refused.reason


def test_on_the_simulated_device_its_own_allocator_is_set() -> None:
    with simulate("1GiB") as device:
        session = dataclasses.replace(live.session(), accelerator=device)
        with apply(session, DOSE):
            device.set_per_process_memory_fraction(0.5)
            assert device.allocator.settings.expandable_segments
        assert not device.allocator.settings.expandable_segments
        assert device.allocator.settings.per_process_memory_fraction == 0.5


def test_other_systems_have_no_such_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_settings.sys, "platform", "win32")
    refused = propose(INCIDENT, evidence())
    assert isinstance(refused, Refused)
    assert "Linux" in refused.reason


def patched(*sources: str) -> Patch | Refused:
    return patch(live.cells_of(*(textwrap.dedent(source) for source in sources)), evidence(), DOSE)


GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -1,5 +1,9 @@
|
 # what we need
+import os
+
+os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
+
 import numpy as np
 import torch
 from torch import nn
""".replace("|", " ")


def test_the_variable_is_set_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    made = patched(IMPORTS, "out = model(torch.ones(2, 4))")
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN
    assert made.edits[0].replay == 'import os\n\nos.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"\n'
    plain: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    exec(textwrap.dedent(IMPORTS), plain)
    with monkeypatch.context() as environment:
        environment.setattr(os, "environ", dict(os.environ))
        exec(made.edits[0].after, fixed)
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert live.same(live.values(plain["model"]), live.values(fixed["model"]))
    assert isinstance(patched(made.edits[0].after, "train()"), Refused)


def test_where_no_cell_names_torch_it_is_set_before_what_may_bring_it() -> None:
    made = patched(
        "%matplotlib inline\nfrom __future__ import annotations\nimport os\nfrom trainer import fit", "fit()"
    )
    assert isinstance(made, Patch), made
    assert made.edits[0].after == (
        "%matplotlib inline\nfrom __future__ import annotations\nimport os\n\n"
        'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"\n\nfrom trainer import fit'
    )


def test_an_import_of_os_is_used_and_ipython_lines_stay() -> None:
    made = patched("%matplotlib inline\nimport os\nimport torch\nx = 1")
    assert isinstance(made, Patch), made
    assert made.edits[0].after == (
        "%matplotlib inline\nimport os\n\n"
        'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"\n\nimport torch\nx = 1'
    )
    assert made.edits[0].replay == made.edits[0].after


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (
            "import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'max_split_size_mb:64'\nimport torch",
            "settings of the allocator",
        ),
        ("x = 1", "no cell imports what may bring torch"),
        ("import torch\ndef (", "no cell imports what may bring torch"),
        ("import os\ndel os\nimport torch", "`os` stands for something else"),
        ("import torch\nos = 'linux'", "`os` stands for something else"),
        ("try:\n    import torch\nexcept ImportError:\n    pass", "imported under a condition"),
    ],
)
def test_patch_refuses(source: str, part: str) -> None:
    refused = patched(source)
    assert isinstance(refused, Refused)
    assert part in refused.reason
