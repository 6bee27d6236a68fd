"""Loops are cut, and what comes after them is seen: in every form that a training loop takes."""

from textwrap import dedent

import pytest
import torch
from forecast_lab import mlp, namespace, nothing, session
from torch import nn

from oomdoctor.forecast import price
from oomdoctor.model.session import Attempt

AFTER = 64 << 20
"""What each cell asks for after its loop: more than the rest of it needs."""

STEP = "optimizer.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); optimizer.step()"

LOOPS = {
    "range": """
        for i in range(10**9):
            STEP
        AFTER
    """,
    "while": """
        i = 0
        while i < 10**9:
            STEP
            i += 1
        AFTER
    """,
    "while with continue and break": """
        while True:
            STEP
            if loss.isnan():
                break
            continue
        AFTER
    """,
    "else of a for": """
        for i in range(10**9):
            STEP
            if loss.isnan():
                break
        else:
            AFTER
    """,
    "else of a while": """
        while not loss_is_small():
            STEP
        else:
            AFTER
    """,
    "enumerate": """
        for i, (x, y) in enumerate(loader):
            STEP
        AFTER
    """,
    "zip and islice": """
        from itertools import count, islice
        for i, (x, y) in zip(count(), islice(loader, 10**6)):
            STEP
        AFTER
    """,
    "tqdm": """
        from tqdm.auto import tqdm
        bar = tqdm(range(10**9))
        for i in bar:
            STEP
            bar.set_postfix(loss=loss.item())
        AFTER
    """,
    "an iterator that is asked for batches": """
        it = iter(loader)
        for i in range(10**9):
            try:
                x, y = next(it)
            except StopIteration:
                it = iter(loader)
                x, y = next(it)
            STEP
        AFTER
    """,
    "an iterator that was begun before": """
        it = iter(loader)
        x, y = next(it)
        for x, y in it:
            STEP
        AFTER
    """,
    "evaluation in the epoch": """
        for epoch in range(10**9):
            for x, y in loader:
                STEP
            AFTER
    """,
    "evaluation in the epoch of batches by hand": """
        for epoch in range(10**9):
            order = torch.randperm(64)
            for i in range(0, 10**9, 64):
                x, y = data[order[:64]], labels[order[:64]]
                STEP
            AFTER
    """,
    "one step in each epoch": """
        for epoch in range(10**9):
            STEP
            if epoch == 1:
                AFTER
                del late
    """,
    "a function of the cell": """
        def train(steps):
            for i in range(steps):
                x, y = data, labels
                STEP
        train(10**9)
        AFTER
    """,
    "a function of an earlier cell": """
        fit(model, optimizer, data, labels)
        AFTER
    """,
    "a method": """
        Trainer(model, optimizer).fit(data, labels)
        AFTER
    """,
    "a closure and a decorator": """
        made(model, optimizer)(data, labels)
        AFTER
    """,
    "a generator": """
        def batches():
            while True:
                yield data, labels
        for x, y in batches():
            STEP
        AFTER
    """,
    "a comprehension": """
        def step(i):
            x, y = data, labels
            STEP
            return loss.item()
        losses = [step(i) for i in range(10**9)]
        mean = sum(step(i) for i in range(10**9))
        AFTER
    """,
    "two trainings": """
        for i in range(10**9):
            STEP
        other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for i in range(10**9):
            F.cross_entropy(model(x), y).backward()
            other.step()
        assert len(other.state) == 6
        AFTER
    """,
    "the same loader twice": """
        for x, y in loader:
            STEP
        for x, y in loader:
            STEP
        AFTER
    """,
    "by hand": """
        optimizer = None
        for i in range(100):
            model(x).sum().backward()
            for p in model.parameters():
                p.grad = None
        AFTER
    """,
    "steps without a loop": """
        STEP
        STEP
        STEP
        STEP
        AFTER
    """,
    "an evaluation after": """
        for i in range(10**9):
            STEP
        model.eval()
        with torch.no_grad():
            for x, y in loader:
                model(x)
        AFTER
    """,
    "awaited": """
        import asyncio
        async def train():
            for i in range(10**9):
                x, y = data, labels
                STEP
                await asyncio.sleep(0)
        await train()
        AFTER
    """,
    "two optimizers": """
        slow = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(10**9):
            STEP
            if i % 3 == 0:
                slow.step()
        AFTER
    """,
}


def fit(model, optimizer, data, labels):
    for _ in range(10**9):
        for _ in range(10**9):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), labels).backward()
            optimizer.step()


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def fit(self, data, labels):
        step = 0
        while step < 10**9:
            nn.functional.cross_entropy(self.model(data), labels).backward()
            self.optimizer.step()
            step += 1


def timed(function):
    def inner(*args):
        return function(*args)

    return inner


def made(model, optimizer):
    @timed
    def train(data, labels):
        for _ in range(10**9):
            nn.functional.cross_entropy(model(data), labels).backward()
            optimizer.step()

    return train


@pytest.fixture(scope="module")
def forecasts():
    torch.manual_seed(0)
    here = {"fit": fit, "Trainer": Trainer, "made": made, "loss_is_small": lambda: False}
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
    ns = namespace(mlp, "adamw") | here | {"x": x, "y": y, "data": torch.randn(64, 256), "labels": y}
    attempts = [Attempt(source=cell(text)) for text in LOOPS.values()]
    found = price(session(ns, ""), attempts, budget=None, prepare=nothing, timeout_s=100)
    return dict(zip(LOOPS, found, strict=True))


def cell(text):
    return dedent(text).replace("STEP", STEP).replace("AFTER", f"late = torch.empty({AFTER // 4})")


@pytest.mark.parametrize("name", LOOPS)
def test_what_comes_after_the_loop_is_seen(forecasts, name):
    source, found = cell(LOOPS[name]), forecasts[name]
    assert found.refused is None
    assert found.peak > AFTER
    assert "late = " in source.splitlines()[found.peak_line - 1]
