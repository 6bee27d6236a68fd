from __future__ import annotations

from dataclasses import replace
from typing import Any

import live
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (as the cells under test have it)
from observed import facts, site
from torch import nn

from oomdoctor import chunked_loss
from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import get
from oomdoctor.fixes.chunks import TOLERANCE
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.unavailable import Refused

FIX = get("chunked_loss")
patch, propose = FIX.patch, FIX.propose

FOUR = Dose.of(chunks=4)
WORDS = 50


class Words(nn.Module):
    """A language model of the least kind."""

    def __init__(self, words: int = WORDS, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(8, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.embed(x))))


def batches(words: int = WORDS, rows: int = 6, length: int = 7, count: int = 5) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randint(0, words, (rows, length), generator=generator) for _ in range(2 * count)]
    for y in draw[1::2]:
        y[:, -2:] = 0  # padding, more of it in some chunks than in others
        y[0] = 0
    return list(zip(draw[::2], draw[1::2], strict=True))


SETUP = """\
import torch
import torch.nn.functional as F
torch.manual_seed(0)
model = Words(drop=0.1)
weight = torch.rand(50) + 0.5
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
"""
LOOP = """\
%time pass
losses = []
for x, y in loader:   # a comment
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits.view(-1, 50), y.view(-1), ignore_index=0)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
LOOP_FIXED = """\
%time pass
from oomdoctor import chunked_loss

losses = []
for x, y in loader:   # a comment
    optimizer.zero_grad()
    logits = model(x)
    loss = chunked_loss(F.cross_entropy, 4)(logits.view(-1, 50), y.view(-1), ignore_index=0)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def run(*sources: str, **more: Any) -> dict[str, Any]:
    """Run the cells, and return their namespace with the peak of the last."""
    namespace: dict[str, Any] = {"Words": Words, "loader": batches(), "nn": nn, **more}
    *before, last = (source.replace("%time pass\n", "") for source in sources)
    for source in before:
        exec(source, namespace)
    with live.Peak() as seen:
        exec(last, namespace)
    return namespace | {"peak": seen.peak, "rng": torch.get_rng_state().tolist()}


def alike(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two runs of five steps agree within the tolerance, and left the random numbers in one place."""
    close = left["losses"] == pytest.approx(right["losses"], rel=TOLERANCE)
    params = live.furthest(live.values(left["model"]), live.values(right["model"])) < TOLERANCE
    return close and params and left["rng"] == right["rng"]


def told(*sources: str, **namespace: Any) -> tuple[Any, Evidence]:
    """Return cells and what evidence tells of them."""
    cells = live.cells_of(*sources)
    modules = [(name, value) for name, value in namespace.items() if isinstance(value, nn.Module)]
    return cells, replace(live.evidence(), code=facts(cells, namespace, modules, loaded=()))


def patched(*sources: str, dose: Dose = FOUR, **namespace: Any) -> Patch | Refused:
    cells, evidence = told(*sources, **namespace)
    return patch(cells, evidence, dose)


@pytest.mark.parametrize(
    "options",
    [
        "",
        ", ignore_index=0",
        ", ignore_index=0, label_smoothing=0.2",
        ", weight=weight",
        ", weight, ignore_index=0, label_smoothing=0.2",
        ", reduction='sum'",
        ", weight=weight, reduction='sum', label_smoothing=0.1, ignore_index=0",
    ],
)
@pytest.mark.parametrize("chunks", [2, 5, 16])
def test_the_source_is_equivalent_whatever_the_options(options, chunks) -> None:
    loop = LOOP.replace(", ignore_index=0", options)
    if "sum" in options:
        loop = loop.replace("loss.backward()", "(loss / 50).backward()")
    made = patched(SETUP, loop, dose=Dose.of(chunks=chunks), model=Words())
    assert isinstance(made, Patch), made
    plain = run(SETUP, loop)
    assert alike(plain, run(SETUP, made.edits[0].after))
    assert FIX.effect is Effect.EQUIVALENT
    assert FIX.tolerance == TOLERANCE


def test_golden_and_second_time() -> None:
    made = patched(SETUP, LOOP, model=Words())
    assert isinstance(made, Patch)
    (edit,) = made.edits
    assert edit.after == edit.replay == LOOP_FIXED
    again = patched(SETUP, edit.after, model=Words())
    assert isinstance(again, Refused)
    assert "already" in again.reason


MODULE_LOOP = """\
criterion = nn.CrossEntropyLoss(weight=weight, ignore_index=0, label_smoothing=0.1)
losses = []
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(
        model(x).transpose(1, 2),
        y,  # words
    )
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def test_a_loss_module_is_asked_for_its_options() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(WORDS), ignore_index=0, label_smoothing=0.1)
    made = patched(SETUP, MODULE_LOOP, model=Words(), criterion=criterion)
    assert isinstance(made, Patch)
    assert alike(run(SETUP, MODULE_LOOP), run(SETUP, made.edits[0].after))


FUNCTION = """\
import torch

def train(net, loss_fn, losses):
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(net(x).view(-1, 50), y.view(-1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

model = 1
"""


def test_several_losses_are_all_rewritten() -> None:
    loop = LOOP.replace(
        "    loss.backward()", "    loss = loss + F.cross_entropy(model(y)[:, 0], x[:, 0])\n    loss.backward()"
    )
    made = patched(SETUP, loop, model=Words())
    assert isinstance(made, Patch)
    assert made.edits[0].after.count("chunked_loss(") == 2
    assert alike(run(SETUP, loop), run(SETUP, made.edits[0].after))


def test_a_function_of_an_earlier_cell_is_replayed_alone() -> None:
    setup = SETUP + "criterion = nn.CrossEntropyLoss(ignore_index=0)\n"
    call = "losses = []\ntrain(model, criterion, losses)\n"
    made = patched(FUNCTION, setup, call, model=Words(), criterion=nn.CrossEntropyLoss(ignore_index=0))
    assert isinstance(made, Patch), made
    (edit,) = made.edits
    assert edit.cell == 1
    assert "from oomdoctor import chunked_loss" in edit.replay
    assert "model = 1" not in edit.replay
    plain = run(FUNCTION, setup, call)
    assert alike(plain, run(edit.after, setup, call))
    assert alike(plain, run(FUNCTION, setup, edit.replay, call))


def test_a_loss_that_a_function_makes_itself_is_found() -> None:
    made_in = "    loss_fn = nn.CrossEntropyLoss(ignore_index=0).to('cpu')\n    for x, y"
    function = (
        FUNCTION.replace("loss_fn, ", "")
        .replace("import torch", "from torch import nn")
        .replace("    for x, y", made_in)
    )
    call = "losses = []\ntrain(model, losses)\n"
    made = patched(function, SETUP, call, model=Words())
    assert isinstance(made, Patch), made
    (edit,) = made.edits
    assert "chunked_loss(loss_fn" in edit.after
    assert alike(run(function, SETUP, call), run(edit.after, SETUP, call))


def test_needs_less() -> None:
    setup = SETUP.replace("Words(drop=0.1)", "Words(4000)").replace("rand(50)", "rand(4000)")
    loop = LOOP.replace("50", "4000")
    loader = batches(4000, 4, 32, count=2)
    logits_bytes = 4 * 32 * 4000 * 4
    made = patched(setup, loop, model=Words(4000), dose=Dose.of(chunks=8))
    assert isinstance(made, Patch)
    plain = run(setup, loop, loader=loader)["peak"]
    source = run(setup, made.edits[0].after, loader=loader)["peak"]
    assert plain - source > 0.5 * logits_bytes
    assert plain - source >= propose_saves(logits_bytes, 8) * 0.6


def propose_saves(size: int, chunks: int) -> int:
    found = propose(live.INCIDENT, evidence_of(CodeFacts(sites=PLACE, classes=(4000,)), shape=(128, 4000)))
    assert not isinstance(found, Refused)
    (one,) = [proposal for proposal in found if proposal.dose == Dose.of(chunks=chunks)]
    assert one.saves == size * (chunks - 1) // chunks
    return one.saves


@pytest.mark.parametrize(
    ("logits", "target", "options", "why"),
    [
        (torch.randn(4, 3), torch.rand(4, 3), {}, "probabilities"),
        (torch.randn(3), torch.tensor(1), {}, "rows of classes"),
        (torch.randn(4, 3).half(), torch.arange(4) % 3, {}, "half precision"),
        (torch.randn(4, 3), torch.arange(4) % 3, {"weight": torch.rand(3, requires_grad=True)}, "learns"),
        (torch.randn(4, 3), torch.arange(4) % 3, {"size_average": False}, "of the past"),
    ],
)
def test_what_would_be_taken_wrongly_is_refused_as_it_runs(logits, target, options, why) -> None:
    taken = chunked_loss(F.cross_entropy, 2)
    assert taken(torch.randn(4, 3), torch.arange(4) % 3).ndim == 0
    with torch.autocast("cpu", torch.bfloat16):
        taken(torch.randn(4, 3).bfloat16(), torch.arange(4) % 3)
    with pytest.raises(OomDoctorError, match=why):
        taken(logits, target, **options)
    with pytest.raises(OomDoctorError, match="not torch's"):
        chunked_loss(F.mse_loss, 2)(logits, target)


IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ((IMPORTS + "loss = F.mse_loss(model(x), y)",), "takes a cross-entropy"),
        (("import mylib as F\nloss = F.cross_entropy(model(x), y)",), "torch's cross_entropy"),
    ],
)
def test_what_cannot_be_written_is_refused(sources, why) -> None:
    found = patched(*sources, model=Words())
    assert isinstance(found, Refused)
    assert why in found.reason


def test_losses_in_half_precision_are_left_alone() -> None:
    cells, evidence = told(SETUP, LOOP, model=Words())
    half = replace(evidence, code=replace(evidence.code, half_weights=True))
    assert isinstance(patch(cells, half, FOUR), Refused)


PLACE = {
    "chunked_loss": (
        site("In[1] line 1: F.cross_entropy(x, y)", "cross_entropy", "F.cross_entropy", "F.cross_entropy"),
    )
}


def evidence_of(
    code: CodeFacts, shape: tuple[int, ...] | None = None, dtype: str = "float32", found: int = 0
) -> Evidence:
    holdings = (
        ()
        if shape is None
        else (Holding(bytes=1, device="cuda:0", role=Role.ACTIVATION, path="loss", shape=shape, dtype=dtype),)
    )
    base = live.evidence(holdings=holdings)
    return replace(base, code=code, censuses=(replace(base.census, found=found),))


def test_proposals() -> None:
    found = propose(live.INCIDENT, evidence_of(CodeFacts(sites=PLACE, classes=(100,)), (6, 100)))
    assert not isinstance(found, Refused)
    assert [one.dose.number("chunks") for one in found] == [2, 4]
    assert [one.saves for one in found] == [1200, 1800]
    cast = propose(
        live.INCIDENT,
        evidence_of(CodeFacts(sites=PLACE, classes=(100,), autocast=True), (6, 100), dtype="bfloat16"),
    )
    assert not isinstance(cast, Refused)
    assert cast[0].saves == 1200
    frame = replace(live.INCIDENT, framework_frame="torch/nn/functional.py:3104 cross_entropy")
    asked = propose(frame, evidence_of(CodeFacts(sites=PLACE)))
    assert not isinstance(asked, Refused)
    assert asked[-1].saves == (1 << 20) * 15 // 16
    model = live.model_facts(type_name="GPT2LMHeadModel")
    library = evidence_of(CodeFacts(models=(model,), classes=(100,)), (6, 7, 100))
    refused = propose(live.INCIDENT, library)
    assert isinstance(refused, Refused)
    assert "takes a cross-entropy" in refused.reason
    library = replace(library, code=replace(library.code, models=(replace(model, takes_loss=True),)))
    head = propose(live.INCIDENT, library)
    assert not isinstance(head, Refused)
    assert [one.saves for one in head] == [2 * 6 * 7 * 100 * 4 * (chunks - 1) // chunks for chunks in (2, 4, 8, 16)]


def asking(requested: int, classes: tuple[int, ...], frame: str = "torch/nn/modules/linear.py:134 forward") -> Any:
    """Propose where a layer asked for this much, with targets for 6 x 7 rows."""
    held = Holding(bytes=336, device="cuda:0", role=Role.BATCH, path="y", shape=(6, 7), dtype="int64")
    known = evidence_of(CodeFacts(sites=PLACE, classes=classes))
    known = replace(known, censuses=(replace(known.census, holdings=(held,)),))
    return propose(replace(live.INCIDENT, requested=requested, framework_frame=frame), known)


@pytest.mark.parametrize("requested", [42 * 1000 * 4, 42 * 1000 * 4 + 344, 2 << 20, 20 << 20])
def test_logits_that_were_asked_for_are_as_large_as_what_the_loss_takes(requested) -> None:
    found = asking(requested, classes=(3, 1000))
    assert not isinstance(found, Refused)
    assert found[0].saves == 42 * 1000 * 4 // 2


def test_other_requests_are_not_taken_for_logits() -> None:
    for found in (
        asking(42 * 1000 * 4 - 4, classes=(1000,)),
        asking(2 << 20, classes=(1000,), frame="torch/nn/modules/sparse.py:190 forward"),
    ):
        assert isinstance(found, Refused)
        assert "no logits" in found.reason


@pytest.mark.parametrize("shape", [(6, 4, 100, 100), (2, 2, 100, 100)])
def test_scores_over_as_many_positions_as_classes_are_no_logits(shape) -> None:
    found = propose(live.INCIDENT, evidence_of(CodeFacts(sites=PLACE, classes=(100,)), shape))
    assert isinstance(found, Refused)
    assert "no logits" in found.reason


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (evidence_of(CodeFacts(classes=(100,)), (6, 100)), "takes a cross-entropy"),
        (evidence_of(CodeFacts(sites=PLACE, classes=(100,)), (6, 99)), "no logits"),
        (evidence_of(CodeFacts(sites=PLACE, classes=(100,)), (1, 100)), "one row"),
        (
            evidence_of(CodeFacts(sites=PLACE, classes=(100,), compiles="torch.compile(m)"), (6, 100)),
            "compile",
        ),
        (
            evidence_of(
                CodeFacts(
                    classes=(100,),
                    sites={
                        **PLACE,
                        "drop_retain_graph": (site("line 1: l.backward(create_graph=True)", "create_graph"),),
                    },
                ),
                (6, 100),
            ),
            "gradients",
        ),
        (evidence_of(CodeFacts(sites=PLACE, classes=(100,)), (6, 100), found=1 << 20), "take 2.34 KiB of"),
    ],
)
def test_proposes_nothing_where_it_would_not_help(evidence, why) -> None:
    found = propose(live.INCIDENT, evidence)
    assert isinstance(found, Refused)
    assert why in found.reason


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return -grads[0]


def _masked(head: nn.Linear, x: torch.Tensor, fill: float) -> torch.Tensor:
    hidden = torch.zeros(len(x), 50, dtype=torch.bool)
    hidden[3, 49] = hidden[9, 48] = True
    return head(x).masked_fill(hidden, fill)


@pytest.mark.parametrize(
    "logits_of",
    [
        lambda head, x: _masked(head, x, float("-inf")),
        lambda head, x: _masked(head, x, -1e9),
        lambda head, x: head(x).index_fill(1, torch.tensor([49, 48]), float("-inf")),
        lambda head, x: Reversed.apply(head(x)),
        lambda head, x: F.linear(x, head.weight, -head.bias),
        lambda head, x: F.linear(x, head.weight, head.bias.flip(0)),
        lambda head, x: head(x).double(),
    ],
    ids=["masked", "masked by a number", "filled", "reversed", "other sign", "flipped", "cast"],
)
def test_what_stands_between_the_layer_and_the_loss_is_followed_or_the_layer_is_left_alone(logits_of: Any) -> None:
    torch.manual_seed(0)
    head, x, target = nn.Linear(16, 50), torch.randn(64, 16), torch.randint(0, 45, (64,))
    nn.init.zeros_(head.bias)
    found = []
    for loss in (F.cross_entropy, chunked_loss(F.cross_entropy, 4)):
        given = x.clone().requires_grad_()
        head.zero_grad()
        out = loss(logits_of(head, given), target)
        out.backward()
        found.append([out, given.grad, *(one.grad for one in head.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
