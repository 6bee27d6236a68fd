from __future__ import annotations

import textwrap
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch.utils.data import DataLoader

from oomdoctor import fixes
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("truncate_sequence")
propose, patch = FIX.propose, FIX.patch

HALF = Dose.of(length=32)


class Tokenizer:
    """Numbers words, and pads and cuts as the tokenizers of transformers do."""

    def __call__(self, texts: list[str], padding: str, truncation: bool, max_length: int) -> dict[str, torch.Tensor]:
        rows = [[len(word) for word in text.split()][: max_length if truncation else None] for text in texts]
        longest = max_length if padding == "max_length" else max(map(len, rows))
        return {"input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows])}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.out(self.embedding(ids).tanh())


SETUP = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    texts = [" ".join("a" * (1 + (i + j) % 9) for j in range(60 + i)) for i in range(8)]
    labels = torch.arange(8) % 4
"""
TOKENS = """
    MAX_LEN = 64  # enough for most
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=MAX_LEN)
"""
LOADER = """
    loader = DataLoader(TensorDataset(encoded["input_ids"], labels), batch_size=4)
"""
CLASSIFY = """
    for ids, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(ids).mean(1), y)
        loss.backward()
        optimizer.step()
"""
COLLATE = """
    def collate(rows):
        found = tokenizer([text for text, _ in rows], padding="longest", truncation=True, max_length=64)
        return found["input_ids"], torch.tensor([label for _, label in rows])

    loader = DataLoader(list(zip(texts, labels.tolist())), batch_size=4, collate_fn=collate)
"""
LANGUAGE = """
    tokens = torch.randint(0, 16, (4, 4, 65), generator=torch.Generator().manual_seed(0))
"""
PREDICT_NEXT = """
    for rows in tokens:
        x, y = rows[:, :-1], rows[:, 1:]
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
"""
PAIRS = """
    pairs = [(rows[:, :-1], rows[:, 1:]) for rows in tokens]
"""
PREDICT_PAIRS = """
    for x, y in pairs:
        optimizer.zero_grad()
        # every token from those before it
        logits = model(x)
        loss = criterion(logits.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
"""
DICTS = """
    dicts = [{"ids": rows[:, :-1], "labels": torch.arange(4)} for rows in tokens]
"""
CLASSIFY_DICTS = """
    for batch in dicts:
        optimizer.zero_grad()
        loss = criterion(model(**batch).mean(1), batch["labels"])
        loss.backward()
        optimizer.step()
"""


def held(path: str, *shape: int, dtype: str = "int64") -> Holding:
    return Holding(bytes=1 << 10, device="cuda:0", role=Role.BATCH, path=path, dtype=dtype, shape=shape)


TEXT_BATCH = (held("ids", 4, 64), held("local `y` of fit", 4))
PAIR_BATCH = (held("x", 4, 64), held("y", 4, 64))
DICT_BATCH = (held("batch['ids']", 4, 64), held("batch['labels']", 4))
NOTEBOOKS: dict[str, tuple[tuple[str, ...], tuple[Holding, ...]]] = {
    "named": ((SETUP, TOKENS, LOADER, CLASSIFY), TEXT_BATCH),
    "collated": ((SETUP, COLLATE, CLASSIFY), TEXT_BATCH),
    "pairs": ((SETUP, LANGUAGE, PAIRS, PREDICT_PAIRS), PAIR_BATCH),
    "dicts": ((SETUP, LANGUAGE, DICTS, CLASSIFY_DICTS), DICT_BATCH),
    # A length that the failing cell needs in another way.
    "needed": ((SETUP, TOKENS, "weights = torch.ones(MAX_LEN)", LOADER,
                CLASSIFY.replace("loss = ", "scale = weights.mean()\n        loss = scale * ")), TEXT_BATCH),
}  # fmt: skip


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def run(sources: list[str], namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    space = {"Classifier": Classifier, "tokenizer": Tokenizer()} if namespace is None else namespace
    for source in sources:
        exec(compile(textwrap.dedent(source), "<cell>", "exec"), space)
    return space


def evidence(cells: Cells, *holdings: Holding) -> Evidence:
    namespace = run([cell.source for cell in cells.history[:-1]])
    kinds = (nn.Module, torch.optim.Optimizer, DataLoader)
    found = [[(name, value) for name, value in namespace.items() if isinstance(value, kind)] for kind in kinds]
    base = live.evidence(holdings=holdings)
    return Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=facts(cells, namespace, *found))


def patched(sources: tuple[str, ...], holdings: tuple[Holding, ...], dose: Dose = HALF) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells, *holdings), dose)


def changed(made: Patch, sources: tuple[str, ...]) -> tuple[str, ...]:
    texts = [textwrap.dedent(source) for source in sources]
    for edit in made.edits:
        texts[edit.cell - 1] = edit.after
    return tuple(texts)


def lengths(namespace: dict[str, Any]) -> list[int]:
    seen: list[int] = []
    namespace["model"].embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    return seen


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_retry_leaves_what_a_fresh_kernel_leaves(name: str) -> None:
    sources, holdings = NOTEBOOKS[name]
    made = patched(sources, holdings)
    assert isinstance(made, Patch), made
    texts = changed(made, sources)
    fresh = run(list(texts[:-1]))
    seen = lengths(fresh)
    run([texts[-1]], fresh)
    retried = run(list(sources[:-1]))
    seen_again = lengths(retried)
    run([edit.replay for edit in made.edits if edit.cell != len(sources)], retried)
    run([texts[-1]], retried)
    assert set(seen) == {32}
    assert seen_again == seen
    assert live.same(live.values(fresh["model"]), live.values(retried["model"]))
    assert isinstance(patched(texts, holdings), Refused)


GOLDEN_PAIRS = """\
--- In[4]
+++ In[4] fixed
@@ -2,6 +2,7 @@
 for x, y in pairs:
     optimizer.zero_grad()
     # every token from those before it
+    x, y = x[:, :32].contiguous(), y[:, :32].contiguous()
     logits = model(x)
     loss = criterion(logits.flatten(0, 1), y.flatten())
     loss.backward()
"""


def test_golden_diff() -> None:
    made = patched(*NOTEBOOKS["pairs"])
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN_PAIRS


def test_labels_of_a_dict_are_left_alone() -> None:
    made = patched(*NOTEBOOKS["dicts"])
    assert isinstance(made, Patch)
    assert (
        "{key: value[:, :32].contiguous() if value.dim() > 1 else value for key, value in batch.items()}" in made.diff()
    )


def test_peak_goes_down() -> None:
    sources, holdings = NOTEBOOKS["pairs"]
    made = patched(sources, holdings)
    assert isinstance(made, Patch)
    peaks = []
    for last in (sources[-1], changed(made, sources)[-1]):
        namespace = run(list(sources[:-1]))
        with live.Peak() as seen:
            run([last], namespace)
        peaks.append(seen.peak)
    assert peaks[1] < 0.65 * peaks[0]


@pytest.mark.parametrize(
    ("sources", "holdings", "reason"),
    [
        ((SETUP, LANGUAGE, PAIRS, "model(pairs[0][0])"), PAIR_BATCH, "no training loop"),
        ((SETUP, LANGUAGE, PAIRS, PREDICT_PAIRS), (held("x", 4, 64),), "the shape of `y` was not seen"),
        ((SETUP, LANGUAGE, PAIRS, PREDICT_PAIRS), (held("x", 4, 64), held("y", 4, 50)), "differ in their length"),
        ((SETUP, LANGUAGE, DICTS, CLASSIFY_DICTS), (held("batch['ids']", 4, 64), held("batch['labels']", 4, 9)),
         "holds tensors of other lengths"),
        ((SETUP, LANGUAGE, PREDICT_NEXT), PAIR_BATCH, "the shape of `rows` was not seen"),
    ],
)  # fmt: skip
def test_refusals(sources: tuple[str, ...], holdings: tuple[Holding, ...], reason: str) -> None:
    made = patched(sources, holdings)
    assert isinstance(made, Refused), made.diff()
    assert reason in made.reason


def proposals(*holdings: Holding, model: str = "Classifier()") -> Any:
    cells = cells_of(SETUP.replace("Classifier()", model), LANGUAGE, PAIRS, PREDICT_PAIRS)
    return propose(live.INCIDENT, evidence(cells, *holdings))


def test_proposals() -> None:
    half, quarter = proposals(*PAIR_BATCH)
    assert (half.dose, quarter.dose) == (HALF, Dose.of(length=16))
    assert half.effect is Effect.CHANGES_RESULT
    assert half.caveat == "what stands beyond 32 of 64 tokens is cut off and not learnt from"
    assert (half.saves, quarter.saves) == (65 << 19, 65 * 3 << 18)
    assert FIX.apply is None


def test_no_proposal() -> None:
    assert "no batch of token numbers" in proposals(held("x", 4, 64, dtype="float32")).reason
    assert "short already" in proposals(held("x", 4, 24)).reason
    assert "takes the batch in dimension 1" in proposals(*PAIR_BATCH, model="nn.LSTM(4, 4)").reason
