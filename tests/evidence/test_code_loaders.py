"""Facts of loaders: their settings, and whether samples and their order depend on which worker makes them and when."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from observed import facts
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from oomdoctor.model.code import LoaderFacts
from oomdoctor.model.session import Cell, Cells

DATA = TensorDataset(torch.zeros(8, 2))

PREFACE = """
import os, random, math
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
images = torch.zeros(8, 4)
def scaled(x):
    return x.float() / 255
def crop(x):
    start = random.randrange(2)
    return x[start:]
"""


def read(**loaders: DataLoader[Any]) -> tuple[LoaderFacts, ...]:
    return facts(Cells(history=(Cell(number=1, source="pass"),)), loaders, (), (), loaders.items()).loaders


def made_by(*cells: str, **more: Any) -> LoaderFacts:
    """The facts of the loader ``loader`` that the cells make."""
    sources = [PREFACE, *map(textwrap.dedent, cells)]
    space: dict[str, Any] = {"__name__": "__main__", **more}
    for source in sources:
        exec(source, space)
    history = tuple(Cell(number=number, source=text) for number, text in enumerate(sources, 1))
    return facts(Cells(history=history), space, (), (), [("loader", space["loader"])]).loaders[0]


def dataset(getitem: str, init: str = "self.x = images", rest: str = "") -> str:
    text = f"class Data(Dataset):\n    def __init__(self):\n        {init}\n    def __len__(self):\n        return 8\n"
    body = textwrap.indent(textwrap.dedent(getitem).strip(), " " * 8)
    text += f"    def __getitem__(self, i):\n{body}\n"
    return f"{text}{textwrap.indent(textwrap.dedent(rest), '    ')}\nloader = DataLoader(Data(), num_workers=2)\n"


def test_settings() -> None:
    train = DataLoader(DATA, shuffle=True, num_workers=2, prefetch_factor=5, persistent_workers=True)
    plain = DataLoader(DATA, batch_size=None, pin_memory=True, collate_fn=len)
    spawned = DataLoader(DATA, num_workers=1, multiprocessing_context="spawn")
    spawned.in_order = False  # an argument from torch 2.6 on
    a, b, c = read(train=train, plain=plain, spawned=spawned)
    assert a == LoaderFacts(path="train", num_workers=2, prefetch=5, persistent=True, shuffles=True)
    assert (b.num_workers, b.prefetch, b.pin_memory, b.collates, b.shuffles) == (0, None, True, False, False)
    assert (c.spawns, c.unordered, c.prefetch) == (True, True, 2)


@pytest.mark.parametrize(
    "data",
    [
        DATA,
        Subset(DATA, [1, 2]),
        ConcatDataset([DATA, Subset(DATA, [0])]),
        [(torch.zeros(2), 1)],
        np.zeros((4, 2)),
        torch.zeros(4, 2),
    ],
)
def test_data_sets_of_torch_are_the_same_everywhere(data: Any) -> None:
    assert read(loader=DataLoader(data, num_workers=2))[0].varies is None


@pytest.mark.parametrize(
    "source",
    [
        dataset("x = scaled(self.x[i])\nreturn (x - 0.5) / 0.5"),
        dataset("return self.transform(self.x[i])", "self.x, self.transform = images, lambda x: x * 2"),
        dataset("return {'x': torch.tensor(self.x[i].tolist()), 'n': self.n}", rest="@property\ndef n(self): return 8"),
        dataset("return self.x[i]", rest="def __getitems__(self, rows):\n    return [self.x[i] for i in rows]"),
        dataset("return self.x[i]").replace("num_workers=2", "num_workers=2, collate_fn=lambda rows: rows"),
        dataset("self.seen = i\nreturn self.x[i]"),
    ],
)
def test_samples_that_two_workers_make_alike(source: str) -> None:
    assert made_by(source).varies is None


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (dataset("return self.x[i] + torch.randn(4)"), "random numbers"),
        (dataset("return crop(self.x[i])"), "random numbers"),
        (dataset("return np.float64(self.x[i][0]) * np.random.rand()"), "random numbers"),
        (dataset("return self.rng.random()", "self.rng = np.random.default_rng(0)"), "made sample 0"),
        (dataset("self.n += 1\nreturn self.x[i], self.n", "self.x, self.n = images, 0"), "made sample 0"),
        (dataset("return torch.utils.data.get_worker_info().id"), "made sample 0"),
        (dataset("return self.gone"), "making a few failed (AttributeError)"),
        (
            dataset("return self.x[i]").replace("num_workers=2", "num_workers=2, worker_init_fn=print"),
            "worker_init_fn",
        ),
    ],
)
def test_what_may_depend_on_its_worker(source: str, why: str) -> None:
    found = made_by(source).varies
    assert found is not None
    assert why in found


def test_samples_are_made_in_a_copy_alone_which_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    made: list[int] = []

    class Noting(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            made.append(index)
            print("made", index)
            return index

        def __len__(self) -> int:
            return 3

    assert read(loader=DataLoader(Noting(), num_workers=1))[0].varies is None
    assert made == []
    assert capfd.readouterr().out == ""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_order() -> None:
    class Odd(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            return iter([torch.randint(3, ()).item()])

    generator = torch.Generator()
    weights = torch.utils.data.WeightedRandomSampler(torch.ones(3).tolist(), 3)
    a, b, c, d, e, f = read(
        a=DataLoader(DATA, shuffle=True),
        b=DataLoader(DATA, sampler=weights),
        c=DataLoader(DATA, shuffle=True, generator=generator),
        d=DataLoader(DATA, sampler=Odd()),
        e=DataLoader(Stream()),
        f=DataLoader(DATA, sampler=range(3)),
    )
    assert (a.order, b.order, e.order, f.order) == (None, None, None, None)
    assert (a.shuffles, b.shuffles, f.shuffles) == (True, True, False)
    assert c.order is not None
    assert "generator of the program's" in c.order
    assert d.order is not None
    assert "`Odd`" in d.order
    assert (d.iterable, e.iterable) == (False, True)


def test_the_sharing_strategy_is_read() -> None:
    cells = Cells(history=(Cell(number=1, source="pass"),))
    strategy: Any = torch.multiprocessing
    assert facts(cells, {}).sharing_strategy == strategy.get_sharing_strategy()
