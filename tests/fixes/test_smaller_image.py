from __future__ import annotations

import textwrap
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from oomdoctor import fixes
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("smaller_image")
propose, patch = FIX.propose, FIX.patch

HALF = Dose.of(size=32)


class Transforms:
    """What the cells use of torchvision's transforms, on tensors."""

    def Resize(self, size: Any) -> Any:  # noqa: N802
        sides = (size, size) if isinstance(size, int) else tuple(size)
        return lambda image: functional.interpolate(image[None], size=sides, mode="nearest")[0]

    def CenterCrop(self, size: int) -> Any:  # noqa: N802
        def crop(image: torch.Tensor) -> torch.Tensor:
            top = (image.shape[1] - size) // 2
            return image[:, top : top + size, top : top + size]

        return crop

    def Compose(self, steps: list[Any]) -> Any:  # noqa: N802
        def run(image: torch.Tensor) -> torch.Tensor:
            for step in steps:
                image = step(image)
            return image

        return run


class Datasets:
    def ImageFolder(self, root: str, transform: Any) -> list[tuple[torch.Tensor, int]]:  # noqa: N802
        images = torch.randn(8, 3, 100, 100, generator=torch.Generator().manual_seed(len(root)))
        return [(transform(image), index % 4) for index, image in enumerate(images)]


SETUP = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
"""
DATA = """
    IMG_SIZE = 64
    tf = transforms.Compose([transforms.Resize(80), transforms.CenterCrop(IMG_SIZE)])
    train_set = datasets.ImageFolder("photos", transform=tf)
    loader = DataLoader(train_set, batch_size=4)
"""
LITERAL = """
    tf = transforms.Compose([
        transforms.Resize((64, 64)),  # as the model was trained
    ])
    loader = DataLoader(datasets.ImageFolder("photos", transform=tf), batch_size=4)
"""
TENSORS = """
    loader = [(torch.randn(4, 3, 64, 64), torch.arange(4)) for _ in range(2)]
"""
LOOP = """
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
"""


def held(path: str, *shape: int, dtype: str = "float32") -> Holding:
    return Holding(bytes=1 << 10, device="cuda:0", role=Role.BATCH, path=path, dtype=dtype, shape=shape)


BATCH = (held("images", 4, 3, 64, 64), held("labels", 4, dtype="int64"))
NOTEBOOKS = {
    "named": (SETUP, DATA, LOOP),
    "literal": (SETUP, LITERAL, LOOP),
    "tensors": (SETUP, TENSORS, LOOP),
    # A size that the failing cell needs in another way.
    "needed": (SETUP, DATA, "area = torch.tensor(IMG_SIZE)", LOOP.replace("loss =", "area + 1\n        loss =")),
}


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def run(sources: list[str], namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    space = {"transforms": Transforms(), "datasets": Datasets()} if namespace is None else namespace
    for source in sources:
        exec(compile(textwrap.dedent(source), "<cell>", "exec"), space)
    return space


def evidence(cells: Cells, *holdings: Holding) -> Evidence:
    namespace = run([cell.source for cell in cells.history[:-1]])
    kinds = (nn.Module, torch.optim.Optimizer, DataLoader)
    found = [[(name, value) for name, value in namespace.items() if isinstance(value, kind)] for kind in kinds]
    base = live.evidence(holdings=holdings)
    return Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=facts(cells, namespace, *found))


def patched(*sources: str, holdings: tuple[Holding, ...] = BATCH) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells, *holdings), HALF)


def changed(made: Patch, sources: tuple[str, ...]) -> tuple[str, ...]:
    texts = [textwrap.dedent(source) for source in sources]
    for edit in made.edits:
        texts[edit.cell - 1] = edit.after
    return tuple(texts)


def shapes(namespace: dict[str, Any]) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    namespace["model"].register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    return seen


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_retry_leaves_what_a_fresh_kernel_leaves(name: str) -> None:
    sources = NOTEBOOKS[name]
    made = patched(*sources)
    assert isinstance(made, Patch), made
    texts = changed(made, sources)
    fresh = run(list(texts[:-1]))
    seen = shapes(fresh)
    run([texts[-1]], fresh)
    retried = run(list(sources[:-1]))
    seen_again = shapes(retried)
    run([edit.replay for edit in made.edits if edit.cell != len(sources)], retried)
    run([texts[-1]], retried)
    assert set(seen) == {(4, 3, 32, 32)}
    assert seen_again == seen
    assert live.same(live.values(fresh["model"]), live.values(retried["model"]))
    assert isinstance(patched(*texts), Refused)


GOLDEN_TENSORS = """\
--- In[3]
+++ In[3] fixed
@@ -1,6 +1,7 @@
\x20
 for images, labels in loader:
     optimizer.zero_grad()
+    images = nn.functional.interpolate(images, size=(32, 32), mode="bilinear", antialias=True)
     loss = criterion(model(images), labels)
     loss.backward()
     optimizer.step()
"""


def test_golden_diff() -> None:
    made = patched(*NOTEBOOKS["tensors"])
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN_TENSORS


def test_peak_goes_down() -> None:
    sources = NOTEBOOKS["tensors"]
    made = patched(*sources)
    assert isinstance(made, Patch)
    peaks = []
    for last in (sources[-1], changed(made, sources)[-1]):
        namespace = run(list(sources[:-1]))
        with live.Peak() as seen:
            run([last], namespace)
        peaks.append(seen.peak)
    assert peaks[1] < 0.5 * peaks[0]


FIXED_SIZE = SETUP.replace(
    "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)", "nn.Flatten(), nn.Linear(8 * 62 * 62, 4)"
)


@pytest.mark.parametrize(
    ("sources", "holdings", "reason"),
    [
        ((FIXED_SIZE, TENSORS, LOOP), BATCH, "may take its own size alone"),
        ((SETUP, TENSORS, LOOP.replace("model(", "net(")), BATCH, "not among the notebook's objects"),
        ((SETUP, TENSORS, "model(loader[0][0])"), BATCH, "no training loop"),
        ((SETUP, TENSORS, LOOP), (*BATCH, held("labels", 4, 64, 64)), "the targets have the size of the images"),
        ((SETUP, TENSORS, LOOP), (held("images", 4, 3, 64, 48),), "not squares of one size"),
        ((SETUP, TENSORS, LOOP), (held("images", 4, 64),), "no batch of images"),
        ((SETUP, TENSORS, LOOP), (held("pictures", 4, 3, 64, 64),), "which name of the loop"),
    ],
)  # fmt: skip
def test_refusals(sources: tuple[str, ...], holdings: tuple[Holding, ...], reason: str) -> None:
    made = patched(*sources, holdings=holdings)
    assert isinstance(made, Refused), made.diff()
    assert reason in made.reason


def test_proposals() -> None:
    cells = cells_of(*NOTEBOOKS["tensors"])
    made = propose(live.INCIDENT, evidence(cells, *BATCH))
    assert not isinstance(made, Refused)
    assert [one.dose["size"] for one in made] == [48, 32]
    assert all(one.effect is Effect.CHANGES_RESULT for one in made)
    assert [one.saves for one in made] == [int((65 << 20) * 7 / 16), int((65 << 20) * 3 / 4)]
    assert made[1].caveat == (
        "the model sees images of 32 x 32 pixels and no longer of 64 x 64: small things are lost, and results do not "
        "compare with those of the larger size"
    )
    assert FIX.apply is None
    small = propose(live.INCIDENT, evidence(cells, held("images", 4, 3, 32, 32)))
    assert isinstance(small, Refused)
    assert "small already" in small.reason
