"""What the tests of live fixes share: sessions, state digests, and a peak of storages counted on their own."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomdoctor.model.code import CodeFacts, ModelFacts, TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Fix
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import Census, DeviceMemory, Holding, HostMemory, Role
from oomdoctor.model.session import Cell, Cells, Named, Session
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.kinds import Kind

NONE = Unavailable("not read in this test")
INCIDENT = Incident(is_oom=True, family=Family.CUDA, device="cuda:0", requested=1 << 20)


class Peak(TorchDispatchMode):
    """The most bytes in storages that operations made and that were alive together, and how many operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.operations = {}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def session(cells: Iterable[str] = ("pass",), shell: Any = None, namespace: Any = None, **modules: Any) -> Session:
    return Session(
        namespace=dict(modules) if namespace is None else namespace,
        cells=cells_of(*cells),
        accelerator=None,  # type: ignore[arg-type]
        find=lambda _: {Kind.MODULE: tuple(modules.items())},
        shell=shell,
    )


def having(
    bound: Session, *, modules: Named = (), optimizers: Named = (), schedulers: Named = (), loaders: Named = ()
) -> Session:
    """Return the session with these objects found in its namespace."""
    found = {
        Kind.MODULE: modules,
        Kind.OPTIMIZER: optimizers,
        Kind.SCHEDULER: schedulers,
        Kind.LOADER: loaders,
    }
    return replace(bound, find=lambda _: found)


def cells_of(*sources: str) -> Cells:
    return Cells(history=tuple(Cell(number=number, source=text) for number, text in enumerate(sources, 1)))


def evidence(
    *models: ModelFacts,
    roles: tuple[tuple[Role, int], ...] = ((Role.ACTIVATION, 64 << 20),),
    holdings: tuple[Holding, ...] = (),
    loops: tuple[TrainingLoop, ...] = (),
    grad_disabled: bool = False,
) -> Evidence:
    device = DeviceMemory(name="cuda:0", tensor_device="cpu", total=NONE, free=NONE, allocated=NONE, reserved=NONE)
    host = HostMemory(**dict.fromkeys(HostMemory.__dataclass_fields__, NONE))
    census = Census(device="cuda:0", found=0, allocated=NONE, roles=roles, holdings=holdings)
    code = CodeFacts(models=models, loops=loops, grad_disabled=grad_disabled)
    return Evidence(devices=(device,), host=host, censuses=(census,), code=code)


def model_facts(path: str = "model", **facts: Any) -> ModelFacts:
    return ModelFacts(**{"path": path, "type_name": "Net", "training": True, "parameter_bytes": 1 << 20, **facts})


def loop(cell: int, line: int, function: str | None = None, **facts: Any) -> TrainingLoop:
    known = {"batch": ("x", "y"), "models": ("model",), "optimizers": ("optimizer",), "loader": "loader", **facts}
    return TrainingLoop(
        cell=cell, line=line, function=function, in_failing_run=True, loss="loss", loss_call=None, order=(), **known
    )


def digest(model: torch.nn.Module) -> list[Any]:
    """Everything that an ``apply`` could leave behind: attributes by identity and order, hooks, flags, values."""
    seen: list[Any] = []
    for name, part in model.named_modules():
        for key, value in vars(part).items():
            inner = [(k, id(v)) for k, v in value.items()] if isinstance(value, dict) else None
            seen.append((name, key, value if isinstance(value, bool | int | float) else id(value), inner))
    return seen


def values(model: torch.nn.Module) -> dict[str, Any]:
    """Copies in host memory: on a device they would be part of the next measurement."""
    return {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}


def train(
    make: Callable[[], torch.nn.Module],
    fix: Fix | None,
    dose: Any,
    *,
    steps: int = 5,
    shape: tuple[int, ...] = (256, 8),
    name: str = "model",
    forward: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
) -> tuple[list[float], dict[str, torch.Tensor], tuple[Any, ...], int]:
    """Train for some steps; return losses, state, where the random numbers stand, and the peak of one more step."""
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    context = fix.apply(session(**{name: model}), dose) if fix is not None and fix.apply else nullcontext()
    losses = []

    def step() -> None:
        x = torch.randn(shape)
        optimizer.zero_grad()
        loss = forward(model, x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    with context:
        for _ in range(steps):
            step()
        state, marks = values(model), (torch.get_rng_state().tolist(), random.getstate())
        with Peak() as seen:
            step()
    return losses[:steps], state, marks, seen.peak


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference over all entries, relative to the largest value of the entry."""
    return max(
        float((left[name] - right[name]).abs().max() / left[name].abs().max().clamp_min(1e-12))
        for name in left
        if left[name].is_floating_point()
    )
