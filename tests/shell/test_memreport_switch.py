"""``%memreport --diff`` in a real kernel where the simulated device is switched on and off between the reports."""

from __future__ import annotations

import json

from kernels import Kernel

CHANGED = "cuda:0 (simulated) was switched on, off or to another size"
HELD = "import torch\nheld = torch.ones(60 << 18)"


def _shown(kernel: Kernel, line: str) -> str:
    return " ".join(kernel.run(line, ok=True).data("text/plain")[0].split())


def test_a_switch_between_two_reports_is_no_growth(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run(HELD, ok=True)
    kernel.run("%memreport", ok=True)
    kernel.run("%oomdoctor simulate 512MiB", ok=True)
    on = _shown(kernel, "%memreport --diff")
    assert f"Since the report of In[3]: {CHANGED}: its tensors and those of the host are" in on
    assert "+60.0 MiB" not in on
    same = _shown(kernel, "%memreport --diff")
    assert CHANGED not in same
    assert "Since the report of In[5]: cuda:0 (simulated) +0 B allocated" in same
    kernel.run("%oomdoctor simulate 1GiB", ok=True)
    assert CHANGED in _shown(kernel, "%memreport --diff")
    kernel.run("%oomdoctor simulate off", ok=True)
    kernel.run("%oomdoctor simulate 1GiB", ok=True)
    assert CHANGED in _shown(kernel, "%memreport --diff")
    assert CHANGED not in _shown(kernel, "%memreport --diff")
    kernel.run("%oomdoctor simulate off", ok=True)
    off = _shown(kernel, "%memreport --diff")
    assert CHANGED in off
    for wrong in ("+60.0 MiB", "-60.0 MiB", "`held`, new", "`held`, gone"):
        assert wrong not in off
    kernel.run("more = torch.ones(20 << 18)", ok=True)
    assert "+20.0 MiB your tensors: `more`, new" in _shown(kernel, "%memreport --diff")


def test_one_device_alone_is_no_switch_and_the_json_says_the_same(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run("%oomdoctor simulate 512MiB", ok=True)
    kernel.run(HELD, ok=True)
    kernel.run("%memreport", ok=True)
    for name in ("cpu", "cuda"):
        assert CHANGED not in _shown(kernel, f"%memreport --diff --device {name}")
    growth = json.loads(kernel.run("%memreport --diff --json --device cpu", ok=True).stdout)["growth"]
    assert (growth["switched"], [device["device"] for device in growth["devices"]]) == (None, ["cpu"])
    kernel.run("%oomdoctor simulate off", ok=True)
    growth = json.loads(kernel.run("%memreport --diff --json --device cpu", ok=True).stdout)["growth"]
    assert growth["switched"] == "cuda:0"
    assert growth["devices"] == []
