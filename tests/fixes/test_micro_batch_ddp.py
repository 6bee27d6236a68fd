"""A batch in parts under DDP: the same training, and gradients are exchanged once for each batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ddp_ranks
import live
import pytest
import torch

from oomdoctor import batch_parts
from oomdoctor.errors import UsageError
from oomdoctor.fixes import get
from oomdoctor.model.fix import Dose, Patch
from oomdoctor.model.unavailable import Refused

FIX = get("micro_batch")
SETUP = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(){layer}, nn.Linear(64, 5)){settings})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(rank)
"""
LOOP = """\
losses = []
for step in range(4):
    x, y = torch.randn({rows}, 16), torch.randint(0, 5, ({rows},))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
LOOK = """{
    "code": code,
    "losses": torch.tensor(losses),
    "state": torch.cat([one.flatten() for one in _state(model).values()]),
    "random": torch.get_rng_state(),
    "exchanges": dist.group.WORLD._get_sequence_number_for_group(),
}"""


def ranks(*sources: str) -> list[Any]:
    return ddp_ranks.run([*sources], LOOK)


def changed(setup: str, loop: str, code: Any, parts: int = 4) -> str | Refused:
    evidence = replace(live.evidence(), code=code)
    made = FIX.patch(live.cells_of(setup, loop), evidence, Dose.of(parts=parts))
    return made.edits[-1].after if isinstance(made, Patch) else made


@pytest.mark.parametrize(
    ("layer", "settings", "rows"),
    [
        (", nn.Dropout(0.3)", "", "12"),
        ("", ", find_unused_parameters=True, gradient_as_bucket_view=True", "13"),
        ("", "", "(3 if rank else 11)"),  # the ranks' batches come apart into another number of parts
    ],
)
def test_it_is_the_same_training_with_as_many_exchanges(layer: str, settings: str, rows: str) -> None:
    setup, loop = SETUP.format(layer=layer, settings=settings), LOOP.format(rows=rows)
    plain = ranks(setup, loop)
    text = changed(setup, loop, plain[0]["code"])
    assert isinstance(text, str)
    assert "in batch_parts(4, x, y, ddp=model):" in text
    for before, after in zip(plain, ranks(setup, text), strict=True):
        torch.testing.assert_close(after["losses"], before["losses"], rtol=FIX.tolerance, atol=1e-6)
        torch.testing.assert_close(after["state"], before["state"], rtol=FIX.tolerance, atol=1e-6)
        assert torch.equal(after["random"], before["random"])
        assert after["exchanges"] == before["exchanges"]


def test_a_model_that_is_wrapped_in_the_function_of_its_loop_is_known_too() -> None:
    head, body = SETUP.format(layer="", settings="").replace("model", "net").split("\n\n")
    lines = [*body.splitlines(), *LOOP.format(rows="12").replace("model", "net").splitlines(), "return net, losses"]
    loop = "\n    ".join(["def main():", *lines]) + "\n\n\nmodel, losses = main()\n"
    plain = ranks(head, loop)
    text = changed(head, loop, plain[0]["code"])
    assert isinstance(text, str)
    assert "in batch_parts(4, x, y, ddp=net):" in text
    for before, after in zip(plain, ranks(head, text), strict=True):
        torch.testing.assert_close(after["state"], before["state"], rtol=FIX.tolerance, atol=1e-6)
        assert after["exchanges"] == before["exchanges"]


def test_a_static_graph_exchanges_with_each_part() -> None:
    setup, loop = SETUP.format(layer="", settings=", static_graph=True"), LOOP.format(rows="12")
    plain = ranks(setup, loop)
    text = changed(setup, loop, plain[0]["code"])
    assert isinstance(text, str)
    for before, after in zip(plain, ranks(setup, text), strict=True):
        torch.testing.assert_close(after["state"], before["state"], rtol=FIX.tolerance, atol=1e-6)
        assert after["exchanges"] > before["exchanges"]


def test_targets_that_do_not_count_are_refused_because_a_part_may_have_none() -> None:
    setup = SETUP.format(layer="", settings="")
    loop = LOOP.format(rows="12").replace("(model(x), y)", "(model(x), y, ignore_index=-100)")
    loop = loop.replace("    optimizer.zero_grad()\n", "    y[:2] = -100\n    optimizer.zero_grad()\n")
    (code, *_) = (one["code"] for one in ranks(setup, loop))
    assert changed(setup, loop, code) == Refused(
        "a part without targets that count exchanges nothing, and other ranks would wait for it"
    )


def test_what_ddp_does_not_wrap_is_an_error() -> None:
    with pytest.raises(UsageError, match="a model that DistributedDataParallel wraps, not a Linear"):
        next(batch_parts(2, torch.ones(4, 2), ddp=torch.nn.Linear(2, 2)))
