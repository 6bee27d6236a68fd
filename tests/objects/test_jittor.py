"""What Jittor logs of its memory, as it was recorded; what it tells live is tested in ``tests/jittor``."""

from __future__ import annotations

import pytest

from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import JittorMemory
from oomdoctor.model.sizes import GIB, KIB, MIB
from oomdoctor.objects.jittor import is_var, role_of, told
from oomdoctor.rulebook.facts import facts_of

# https://github.com/Jittor/jittor/issues/602 and others, with numbers of our own
ON_GPU = """\
=== display_memory_info ===
 total_cpu_ram: 62.81GB total_device_ram: 10.76GB
 hold_vars: 1019 lived_vars: 3060 lived_ops: 2902
 name: sfrl is_device: 1 used: 9.72GB(99.6%) unused:    41MB(0.411%) ULB:     5MB ULBO:  20MB total: 9.76GB
 name: sfrl is_device: 1 used:    0 B(-nan%) unused:    0 B(-nan%) total:    0 B
 name: sfrl is_device: 0 used:    0 B(-nan%) unused:    0 B(-nan%) total:    0 B
 name: sfrl is_device: 0 used: 550.5MB(96%) unused: 23.25MB(4%) total: 573.75MB
 name: temp is_device: 1 used:    0 B(0%) unused:  1.5KB(100%) total:  1.5KB
 cpu&gpu: 10.32GB gpu: 9.76GB cpu: 573.75MB
 free: cpu(47.77GB) gpu(24.06MB)
 swap: total(   0 B) last(   0 B)
==========================="""
ON_HOST = """\
[i 1129 02:12:33.107365 32 __init__.py:1172]
=== display_memory_info ===
 total_cpu_ram: 23.54GB total_device_ram:    0 B
 hold_vars: 4 lived_vars: 193 lived_ops: 192
 name: sfrl is_device: 0 used: 193MB(75%) unused:   64MB(25%) total:  257MB
 cpu&gpu:  257MB gpu:    0 B cpu:  257MB
 free: cpu(3.5GB) gpu(   0 B)
==========================="""
FIRST_VERSIONS = """\
=== display_memory_info ===
total_cpu_ram: 62.81GB total_cuda_ram: 10.76GB
hold_vars: 19 lived_vars: 60 lived_ops: 52
update queue: 0/0
name: sfrl is_cuda: 1 used: 1GB(50%) unused: 1GB(50%) total: 2GB
cpu&gpu: 2GB gpu: 2GB cpu: 0 B"""


@pytest.mark.parametrize(
    ("block", "memory"),
    [
        (
            ON_GPU,
            JittorMemory(
                held=1019,
                alive=3060,
                operators=2902,
                pool_used=int(9.72 * GIB),
                pool_unused=41 * MIB + int(1.5 * KIB),
                total=int(10.76 * GIB),
                host_total=int(62.81 * GIB),
                on_device=True,
            ),
        ),
        (
            ON_HOST,
            JittorMemory(
                held=4,
                alive=193,
                operators=192,
                pool_used=193 * MIB,
                pool_unused=64 * MIB,
                total=int(23.54 * GIB),
                host_total=int(23.54 * GIB),
            ),
        ),
        (
            FIRST_VERSIONS,
            JittorMemory(
                held=19,
                alive=60,
                operators=52,
                pool_used=GIB,
                pool_unused=GIB,
                total=int(10.76 * GIB),
                host_total=int(62.81 * GIB),
                on_device=True,
            ),
        ),
        ("hold_vars: 3 lived_vars: 4", None),
        ("", None),
    ],
)
def test_a_block_is_read(block: str, memory: JittorMemory | None) -> None:
    assert told(block) == memory


def test_what_a_log_shows_is_a_fact_where_nothing_else_is_known() -> None:
    incident = Incident(is_oom=True, family=Family.CUDA, format="jittor_block", message=ON_GPU)
    facts = facts_of(incident, None)["jittor"]
    assert (facts["operators"], facts["on_device"]) == (2902, True)
    assert 0 < facts["unused_ratio"] < 0.01


def test_classes_are_told_by_where_they_come_from() -> None:
    def made(home: str, name: str, *bases: type) -> type:
        return type(name, bases, {"__module__": home})

    module = made("jittor", "Module")
    assert role_of(made("__main__", "Net", module)) == "model"
    assert role_of(made("jittor.optim", "SGD", made("jittor.optim", "Optimizer"))) == "optimizer"
    assert role_of(made("torch.nn.modules.module", "Module")) is None
    assert is_var(made("jittor", "jittor_core.Var"))
    assert not is_var(made("__main__", "Var"))
