"""Programs of Jittor's users, and what was recorded of a real one when it had run: no test of these needs Jittor."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from observed import facts

from oomdoctor.model.evidence import Evidence
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import Census, DeviceMemory, HostMemory, JittorMemory
from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable

HOST = Incident(is_oom=True, family=Family.HOST, format="guard", device="cpu")
MEMORY = JittorMemory(held=25, alive=425, operators=826, pool_used=400 * MIB, pool_unused=300 * MIB, total=24 * GIB)
SETUP = """\
import jittor as jt
from jittor import nn

jt.set_global_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = nn.SGD(model.parameters(), 0.1, momentum=0.9)
x, y = jt.rand((64, 16)), (jt.rand((64,)) * 10).int32()
batches = [(x[at : at + 8], y[at : at + 8]) for at in range(0, 64, 8)]
"""
ACCUMULATES = """\
optimizer.zero_grad()
for xs, ys in batches:
    loss = nn.cross_entropy_loss(model(xs), ys) / len(batches)
    optimizer.backward(loss)  # of all of them
optimizer.step()
"""
TRAINS = """\
for xs, ys in batches:
    loss = nn.cross_entropy_loss(model(xs), ys)
    optimizer.step(loss)
"""
EVALUATES = """\
model.eval()
right = 0
for xs, ys in batches:
    out = model(xs)
    right += (out.argmax(1)[0] == ys).sum().item()
"""


def cells(*sources: str) -> Cells:
    return Cells(history=tuple(Cell(number=at, source=source) for at, source in enumerate(sources, 1)))


def evidence(*sources: str, memory: JittorMemory | None = MEMORY, **space: Any) -> Evidence:
    none = Unavailable("not read here")
    host = HostMemory(**{one.name: none for one in fields(HostMemory)})
    device = DeviceMemory(name="cpu", tensor_device="cpu", total=8 * GIB, free=GIB, allocated=0, reserved=0)
    return Evidence(
        devices=(device,),
        host=host,
        censuses=(Census(device="cpu", found=0, allocated=0),),
        code=facts(cells(*sources), space),
        jittor=memory,
    )
