"""Fixes made through the settings of trainers: the text of the change, its promise, and the trainers themselves.

``transformers.Trainer`` needs accelerate: where that is not installed, the settings are those that it had when this was
written, and the text of the change is what is tested.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import live
import pytest
import torch

from oomdoctor import fixes
from oomdoctor.forecast.attempts import attempt_with
from oomdoctor.model.code import OptimizerFacts, TrainerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch, Proposal
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.unavailable import Refused
from oomdoctor.testing import assert_heals

MODEL = live.model_facts(
    "model", type_name="GPT2LMHeadModel", blocks=("transformer.h",), segments=("transformer.h.0", "transformer.h.1")
)
ADAM = OptimizerFacts(
    path="trainer.optimizer",
    type_name="AdamW",
    home="torch.optim.adamw",
    parameter_bytes=8 << 20,
    largest_bytes=1 << 20,
    foreach=False,
)
IN_FORCE: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "activation_checkpointing": False,
    "eval_accumulation_steps": None,
    "dataloader_drop_last": False,
    "bf16": False,
    "fp16": False,
    "optim": "adamw_torch_fused",
    "use_cpu": True,
}
ARGS = """\
from transformers import Trainer, TrainingArguments

args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=32,  # as in the paper
    learning_rate=2e-5,
    num_train_epochs=3,
)
"""
TRAINER = "trainer = Trainer(model=model, args=args, train_dataset=rows)\n"
RUN = "trainer.train()\n"
CELLS = (ARGS, TRAINER, RUN)


def facts(**given: Any) -> TrainerFacts:
    settings = {**IN_FORCE, **given.pop("settings", {})}
    known = {
        "library": "transformers",
        "phase": "train",
        "cell": 1,
        "line": 3,
        "call": "TrainingArguments",
        "settings": tuple(settings.items()),
        "model": MODEL,
        "optimizer": ADAM,
        "recomputes": True,
        "weighs": "items",
    }
    return TrainerFacts(**{**known, **given})


def evidence(trainer: TrainerFacts, on: str = "cpu", **code: Any) -> Evidence:
    found = live.evidence(MODEL, **{key: code.pop(key) for key in ("loops", "holdings") if key in code})
    device = replace(found.device, tensor_device=on)
    return replace(found, devices=(device,), code=replace(found.code, trainers=(trainer,), **code))


def proposals(fix: str, trainer: TrainerFacts, **given: Any) -> tuple[Proposal, ...]:
    found = fixes.get(fix).propose(live.INCIDENT, evidence(trainer, **given))
    assert isinstance(found, tuple), found
    return found


def refusal(fix: str, trainer: TrainerFacts, **given: Any) -> str:
    found = fixes.get(fix).propose(live.INCIDENT, evidence(trainer, **given))
    assert isinstance(found, Refused), found
    return found.reason


def patch(fix: str, trainer: TrainerFacts, dose: Dose, *cells: str, **given: Any) -> Patch | Refused:
    return fixes.get(fix).patch(live.cells_of(*(cells or CELLS)), evidence(trainer, **given), dose)


def diff(fix: str, trainer: TrainerFacts, dose: Dose, *cells: str, **given: Any) -> str:
    made = patch(fix, trainer, dose, *cells, **given)
    assert isinstance(made, Patch), made
    again = [next((e.after for e in made.edits if e.cell == n), text) for n, text in enumerate(cells or CELLS, 1)]
    assert isinstance(patch(fix, trainer, dose, *again, **given), Refused)
    changed = made.diff().splitlines()
    return "\n".join(line for line in changed if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def same(text: str, *lines: str) -> None:
    assert text == "\n".join(lines)


FOUR = Dose.of(parts=4, through="transformers")


def test_parts_of_a_batch() -> None:
    made = patch("micro_batch", facts(), FOUR)
    assert isinstance(made, Patch)
    assert made.diff().splitlines() == [
        "--- In[1]",
        "+++ In[1] fixed",
        "@@ -2,7 +2,8 @@",
        " ",
        " args = TrainingArguments(",
        '     output_dir="out",',
        "-    per_device_train_batch_size=32,  # as in the paper",
        "+    per_device_train_batch_size=8,  # as in the paper",
        "+    gradient_accumulation_steps=4,",
        "     learning_rate=2e-5,",
        "     num_train_epochs=3,",
        " )",
    ]


def test_the_trainer_is_made_anew_from_its_new_settings() -> None:
    made = patch("micro_batch", facts(), FOUR)
    assert isinstance(made, Patch)
    old = object()
    ran: dict[str, Any] = {"model": 1, "rows": 2, "args": old, "trainer": old}
    ran |= {"TrainingArguments": lambda **given: given, "Trainer": lambda **given: given}
    for edit in made.edits:
        exec(edit.replay, ran)
    assert ran["trainer"]["args"]["per_device_train_batch_size"] == 8
    assert ran["trainer"]["args"]["gradient_accumulation_steps"] == 4


def test_all_in_the_failing_cell() -> None:
    made = patch("micro_batch", facts(), FOUR, ARGS + TRAINER + RUN)
    assert isinstance(made, Patch)
    (edit,) = made.edits
    assert edit.replay == edit.after


def test_settings_within_a_function() -> None:
    source = (
        "def main():\n    args = TrainingArguments('out', per_device_train_batch_size=32)\n    Trainer(args).train()\n"
    )
    lines = diff("micro_batch", facts(line=2), FOUR, source, "main()\n")
    same(
        lines,
        "-    args = TrainingArguments('out', per_device_train_batch_size=32)",
        "+    args = TrainingArguments('out', per_device_train_batch_size=8, gradient_accumulation_steps=4)",
    )


def test_a_named_size_is_divided_where_it_is_used() -> None:
    source = "SIZE = 32\nACC = 2\nargs = TrainingArguments('out', per_device_train_batch_size=SIZE, "
    source += "gradient_accumulation_steps=ACC)\n" + TRAINER + RUN
    lines = diff("micro_batch", facts(settings={"gradient_accumulation_steps": 2}), FOUR, source)
    assert lines.endswith("per_device_train_batch_size=SIZE // 4, gradient_accumulation_steps=ACC * 4)")


def test_the_default_is_written_out() -> None:
    source = "args = TrainingArguments(\n    'out'\n)\n" + TRAINER + RUN
    trainer = facts(line=1, settings={"per_device_train_batch_size": 8})
    same(
        diff("micro_batch", trainer, FOUR, source),
        "-    'out'",
        "+    'out',",
        "+    per_device_train_batch_size=2,",
        "+    gradient_accumulation_steps=4",
    )


def test_a_comment_stays_with_its_argument() -> None:
    source = "args = TrainingArguments(\n    'out',\n    bf16=False,  # no tensor cores\n)\n" + TRAINER + RUN
    same(
        diff("checkpoint_blocks", facts(line=1), Dose.of(every=1), source),
        "+    activation_checkpointing=True,",
    )


@pytest.mark.parametrize(
    ("fix", "dose", "added", "given"),
    [
        ("autocast", Dose.of(dtype="bfloat16"), "bf16=True", {}),
        ("autocast", Dose.of(dtype="float16"), "fp16=True", {"on": "cuda:0"}),
        ("checkpoint_blocks", Dose.of(every=1), "activation_checkpointing=True", {}),
        ("optimizer_8bit", Dose.of(library="bitsandbytes"), 'optim="adamw_8bit"', {}),
        ("optimizer_8bit", Dose.of(library="torchao"), 'optim="adamw_torch_8bit"', {}),
        ("lighter_optimizer", Dose.of(optimizer="Adafactor"), 'optim="adafactor"', {}),
    ],
)
def test_switches(fix: str, dose: Dose, added: str, given: dict[str, Any]) -> None:
    same(diff(fix, facts(), dose, **given), f"+    {added},")


def test_the_older_name_of_recomputing_is_not_reentrant() -> None:
    settings = {name: value for name, value in IN_FORCE.items() if name != "activation_checkpointing"}
    older = {**settings, "gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}
    trainer = facts(settings={})
    trainer = replace(trainer, settings=tuple(older.items()))
    same(
        diff("checkpoint_blocks", trainer, Dose.of(every=1)),
        "+    gradient_checkpointing=True,",
        '+    gradient_checkpointing_kwargs={"use_reentrant": False},',
    )


def test_a_smaller_batch() -> None:
    same(
        diff("smaller_batch", facts(), Dose.of(batch_size=8)),
        "-    per_device_train_batch_size=32,  # as in the paper",
        "+    per_device_train_batch_size=8,  # as in the paper",
    )


EVALUATE = ("args = TrainingArguments('out', per_device_eval_batch_size=64)\n", TRAINER, "trainer.evaluate()\n")


def test_evaluation() -> None:
    trainer = facts(phase="evaluate", line=1, settings={"per_device_eval_batch_size": 64}, gathered_bytes=1 << 20)
    same(
        diff("chunked_inference", trainer, Dose.of(chunks=4, through="transformers"), *EVALUATE),
        f"-{EVALUATE[0][:-1]}",
        "+args = TrainingArguments('out', per_device_eval_batch_size=16)",
    )
    same(
        diff("offload_predictions", trainer, Dose(), *EVALUATE, on="cuda:0"),
        f"-{EVALUATE[0][:-1]}",
        "+args = TrainingArguments('out', per_device_eval_batch_size=64, eval_accumulation_steps=1)",
    )


LIGHTNING = """\
import lightning as L

BATCH_SIZE = 32
train_loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
"""
FIT = ("trainer = L.Trainer(max_epochs=3, accelerator='gpu')\n", "trainer.fit(model, train_loader)\n")
LIT: dict[str, Any] = {
    "library": "lightning",
    "cell": 2,
    "line": 1,
    "call": "L.Trainer",
    "settings": {"accumulate_grad_batches": 1, "precision": "32-true", "batch_size": 32, "drop_last": False},
    "weighs": "parts",
}


def test_lightning() -> None:
    same(
        diff("micro_batch", facts(**LIT), FOUR, LIGHTNING, *FIT),
        "-BATCH_SIZE = 32",
        "+BATCH_SIZE = 8",
        "-trainer = L.Trainer(max_epochs=3, accelerator='gpu')",
        "+trainer = L.Trainer(max_epochs=3, accelerator='gpu', accumulate_grad_batches=4)",
    )
    same(
        diff("smaller_batch", facts(**LIT), Dose.of(batch_size=8), LIGHTNING, *FIT),
        "-BATCH_SIZE = 32",
        "+BATCH_SIZE = 8",
    )
    lines = diff("autocast", facts(**LIT), Dose.of(dtype="bfloat16"), LIGHTNING, *FIT)
    assert lines.endswith("precision='bf16-mixed')")


def test_lightning_with_a_loader_of_the_module() -> None:
    module = "class Lit(L.LightningModule):\n    def train_dataloader(self):\n"
    module += "        return DataLoader(self.data, batch_size=32)\n"
    fit = FIT[0] + "model = Lit()\ntrainer.fit(model)\n"
    lines = diff("micro_batch", facts(**{**LIT, "cell": 1, "line": 4}), FOUR, module + fit)
    assert "+        return DataLoader(self.data, batch_size=8)" in lines
    # The class of an earlier cell would be another one than that of a module that is there.
    there = patch("micro_batch", facts(**{**LIT, "cell": 3}), FOUR, module, "model = Lit()\n", FIT[0] + FIT[1])
    assert isinstance(there, Refused)
    assert "line 1 of cell 2 made something of it" in there.reason
    assert isinstance(patch("micro_batch", facts(**LIT), FOUR, module, fit), Patch)


ACCELERATE = """\
def main():
    accelerator = Accelerator()
    loader = DataLoader(data, batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""


def loop() -> Any:
    return live.loop(1, 5, "main", accumulates=True)


def test_a_loop_of_accelerate_is_taken_apart_within_what_counts_its_steps() -> None:
    cells, found = live.cells_of(ACCELERATE, "main()\n"), live.evidence(MODEL, loops=(loop(),))
    made = fixes.get("micro_batch").patch(cells, found, Dose.of(parts=4))
    assert isinstance(made, Patch), made
    assert [line for line in made.diff().splitlines()[2:] if line[:1] in "+-"] == [
        "-            accelerator.backward(loss_fn(model(x), y))",
        "+            # In 4 parts: the gradients of the whole batch, the activations of one part at a time.",
        "+            for micro_x, micro_y in zip(x.chunk(4), y.chunk(4), strict=True):",
        "+                loss = (loss_fn(model(micro_x), micro_y)) * (len(micro_x) / len(x))",
        "+                accelerator.backward(loss)",
    ]


ACCELERATED = ("""
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
layers = [layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.Tanh())]
model = nn.Sequential(*layers, nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(16384, 64), torch.randn(16384, 1))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4096))
""", """
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
""")  # fmt: skip


def test_a_loop_of_accelerate_is_healed_and_steps_as_often() -> None:
    pytest.importorskip("accelerate")
    expected = trained(*ACCELERATED)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    assert_heals("micro_batch", *ACCELERATED, budget="40MiB", namespace=namespace)
    assert live.furthest(expected, live.values(namespace["model"])) < 1e-5


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ((ARGS.replace("32", "16"), TRAINER, RUN), "`per_device_train_batch_size=16`, and 32 was in force"),
        ((ARGS.replace("output_dir=", "**settings, output_dir="), TRAINER, RUN), "from a dictionary"),
        ((ARGS.replace("=32", "=int(32)"), TRAINER, RUN), "something else sets it"),
        ((ARGS.replace("args =", "other ="), TRAINER, RUN), None),
        ((ARGS, "trainer = make(args)\n", RUN), "cannot run again for a retry"),
        ((ARGS, TRAINER + "trainer.add_callback(early)\n", RUN), "cannot run again for a retry"),
    ],
)
def test_what_is_not_written_there_is_left_alone(cells: tuple[str, ...], reason: str | None) -> None:
    made = patch("micro_batch", facts(), FOUR, *cells)
    if reason is None:
        assert isinstance(made, Patch)
    else:
        assert isinstance(made, Refused)
        assert reason in made.reason


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("schedule = OneCycleLR(optimizer, steps_per_epoch=len(train_loader))\n", "may set the length of a schedule"),
        ("class Lit:\n    automatic_optimization = False\n", "steps its optimizer itself"),
    ],
)
def test_what_counts_batches(more: str, reason: str) -> None:
    made = patch("micro_batch", facts(**LIT), FOUR, LIGHTNING + more, *FIT)
    assert isinstance(made, Refused)
    assert reason in made.reason
    limited = FIT[0].replace("max_epochs=3", "limit_train_batches=10")
    made = patch("micro_batch", facts(**LIT), FOUR, LIGHTNING, limited, FIT[1])
    assert isinstance(made, Refused)
    assert "limit_train_batches" in made.reason


def test_no_one_place_is_no_place() -> None:
    made = patch("micro_batch", facts(cell=None, line=None), FOUR)
    assert isinstance(made, Refused)


def test_bf16_on_a_cpu_needs_to_be_told() -> None:
    made = patch("autocast", facts(settings={"use_cpu": False}), Dose.of(dtype="bfloat16"))
    assert isinstance(made, Refused)
    assert "use_cpu=True" in made.reason


def test_the_promise_of_parts_that_are_weighed_by_their_labels() -> None:
    found = proposals("micro_batch", facts())
    assert [one.dose["parts"] for one in found] == [2, 4, 8, 16, 32]
    assert {(one.effect, one.caveat) for one in found} == {(Effect.EQUIVALENT, None)}
    assert [one.dose["parts"] for one in proposals("micro_batch", facts(settings={BATCH: 12}))] == [2, 4]


BATCH = "per_device_train_batch_size"


@pytest.mark.parametrize(
    ("given", "caveat"),
    [
        ({"draws": "`attn_pdrop=0.1` of the model"}, "draws other random numbers"),
        ({"model": replace(MODEL, dropout=("drop",))}, "model.drop draws other random numbers"),
        ({"weighs": "parts"}, "only where the loss is a mean over samples, and batches are full"),
        ({"settings": {"dataloader_drop_last": True}}, "one more step in each epoch"),
        ({**LIT, "settings": {**LIT["settings"], "drop_last": True}}, "one more step in each epoch"),
    ],
)
def test_a_weaker_promise_says_why(given: dict[str, Any], caveat: str) -> None:
    found = proposals("micro_batch", facts(**given))
    one = found[-1] if "step in each epoch" in caveat else found[0]
    assert one.effect is Effect.CHANGES_RESULT
    assert caveat in str(one.caveat)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"model": replace(MODEL, batch_norm=("norm",))}, "model.norm normalises over the batch"),
        ({"model": None}, "was not found"),
        ({"settings": {"auto_find_batch_size": True}}, "auto_find_batch_size"),
        ({"settings": {"_n_gpu": 2}}, "spread over devices"),
        ({"settings": {"deepspeed": "..."}}, "spread over devices"),
        ({"settings": {BATCH: 1}}, "one sample"),
        ({"settings": {BATCH: 7}}, "no half"),
        ({"phase": "evaluate"}, "evaluating"),
    ],
)
def test_parts_are_refused(given: dict[str, Any], reason: str) -> None:
    assert reason in refusal("micro_batch", facts(**given))


def test_several_processes_are_refused() -> None:
    assert "spread over devices" in refusal("micro_batch", facts(), world_size=2)


def test_mixed_precision() -> None:
    (one,) = proposals("autocast", facts())
    assert (one.dose["dtype"], one.effect) == ("bfloat16", Effect.CHANGES_RESULT)
    (one,) = proposals("autocast", facts(), on="cuda:0", native_bfloat16=False)
    assert one.dose["dtype"] == "float16"
    assert "in force already" in refusal("autocast", facts(settings={"bf16": True}))
    assert "in force already" in refusal("autocast", facts(**{**LIT, "settings": {"precision": "16-mixed"}}))


def test_recomputing() -> None:
    # The switch turns the cache of keys and values off, whose tensors may be rounded otherwise.
    assert [one.effect for one in proposals("checkpoint_blocks", facts())] == [Effect.EQUIVALENT, Effect.EQUIVALENT]
    assert "recomputes" in refusal("checkpoint_blocks", facts(settings={"activation_checkpointing": True}))
    assert "evaluating" in refusal("checkpoint_blocks", facts(phase="evaluate"))
    # A model without the switch, or with running statistics, is changed in its own source.
    for other in ({"recomputes": False}, {"model": replace(MODEL, batch_norm=("norm",))}):
        made = patch("checkpoint_blocks", facts(**other), Dose.of(every=1), "model = make()\n" + ARGS, TRAINER, RUN)
        assert isinstance(made, Patch)
        assert "activation_checkpointing" not in made.diff()


def test_optimizers() -> None:
    (one,) = proposals("lighter_optimizer", facts())
    assert (one.dose["optimizer"], one.effect, one.saves) == ("Adafactor", Effect.CHANGES_RESULT, 16 << 20)
    assert "was given its optimizer" in refusal("lighter_optimizer", facts(given_optimizer=True))
    assert "steps by `sgd`" in refusal("optimizer_8bit", facts(settings={"optim": "sgd"}))
    assert "no optimizer yet" in refusal("lighter_optimizer", facts(optimizer=None))
    assert "CUDA" in refusal("optimizer_8bit", facts())


def test_smaller_batches() -> None:
    found = proposals("smaller_batch", facts())
    assert [one.dose["batch_size"] for one in found] == [16, 8, 4, 2, 1]
    normalising = facts(model=replace(MODEL, batch_norm=("norm",)))
    assert [one.dose["batch_size"] for one in proposals("smaller_batch", normalising)] == [16, 8, 4, 2]
    assert "no half" in refusal("smaller_batch", facts(settings={BATCH: 7}))


def test_evaluation_batches() -> None:
    by_samples = replace(MODEL, type_name="BertForSequenceClassification")
    assert {one.effect for one in proposals("chunked_inference", facts(phase="evaluate", model=by_samples))} == {
        Effect.EQUIVALENT
    }
    one = proposals("chunked_inference", facts(phase="evaluate"))[0]
    assert one.effect is Effect.CHANGES_RESULT
    assert "eval_loss" in str(one.caveat)
    assert "gradients on" in refusal("chunked_inference", facts())


def test_predictions() -> None:
    trainer = facts(phase="evaluate", gathered_bytes=1 << 20)
    (one,) = proposals("offload_predictions", trainer, on="cuda:0")
    assert (one.effect, one.saves) == (Effect.EXACT, 1 << 20)
    assert "host memory already" in refusal("offload_predictions", trainer)
    assert "no predictions" in refusal("offload_predictions", replace(trainer, gathered_bytes=0), on="cuda:0")
    moved = facts(phase="evaluate", settings={"eval_accumulation_steps": 4}, gathered_bytes=1)
    assert "eval_accumulation_steps" in refusal("offload_predictions", moved, on="cuda:0")


def test_a_batch_is_not_needed_to_know_that_nothing_would_be_saved() -> None:
    trainer = facts()
    nothing = replace(evidence(trainer), censuses=(replace(evidence(trainer).census, roles=()),))
    for fix in ("micro_batch", "smaller_batch"):
        found = fixes.get(fix).propose(replace(live.INCIDENT, requested=None), nothing)
        assert isinstance(found, Refused)
    batch = Holding(bytes=1 << 20, device="cuda:0", role=Role.BATCH, path="x", shape=(32, 4))
    assert proposals("micro_batch", trainer, holdings=(batch,))


# The trainers themselves, where they are installed.

MAKE = """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
still = dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], 0.0)
sizes = dict(n_embd=32, n_layer=2, n_head=2, vocab_size=400, n_positions=64)
config = GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **still)
model = GPT2LMHeadModel(config)
ids = [torch.randint(0, 400, (64,)) for _ in range(44)]
rows = [{"input_ids": row, "labels": torch.where(torch.rand(64) < 0.5, row, -100)} for row in ids]
"""
SET = """\
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=32,
    num_train_epochs=1,
    optim="sgd",
    learning_rate=0.1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=rows)
"""


def trained(*cells: str) -> dict[str, torch.Tensor]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell, "<cell>", "exec"), namespace)
    return live.values(namespace["model"])


@pytest.mark.parametrize(
    ("fix", "cells", "budget", "tolerance"),
    [
        ("micro_batch", (MAKE, SET, RUN), "8MiB", 1e-5),
        ("micro_batch", (MAKE, SET + RUN), "8MiB", 1e-5),
        ("checkpoint_blocks", (MAKE.replace("400", "50").replace("n_layer=2", "n_layer=6"), SET, RUN), "14MiB", 0.0),
    ],
)
def test_a_real_trainer_is_healed(
    fix: str, cells: tuple[str, ...], budget: str, tolerance: float, tmp_path: Any, monkeypatch: Any
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    expected = trained(*cells)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    case = assert_heals(fix, *cells, budget=budget, namespace=namespace)
    assert case.outcome.kind == "healed"
    found = live.values(namespace["model"])
    assert live.same(expected, found) if tolerance == 0 else live.furthest(expected, found) < tolerance


def test_a_real_trainer_that_multiplies_gradients_of_a_mean_is_refused_by_the_trial(
    tmp_path: Any, monkeypatch: Any
) -> None:
    """It takes the loss of such a model to be divided by the number of labels, which it was not."""
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    make = MAKE.replace("GPT2LMHeadModel", "GPT2ForSequenceClassification").replace(
        "**still", "pad_token_id=0, **still"
    )
    make = make.replace("torch.where(torch.rand(64) < 0.5, row, -100)", "row[0] % 2")
    with pytest.raises(AssertionError, match="results differ"):
        assert_heals("micro_batch", make, SET, RUN, budget="8MiB")


@pytest.mark.parametrize(("fix_id", "dose"), [("micro_batch", {"parts": 2}), ("chunked_inference", {"chunks": 2})])
def test_what_is_set_through_a_trainer_is_not_done_to_its_objects_instead(fix_id: str, dose: dict[str, int]) -> None:
    fix = fixes.get(fix_id)
    through = Dose.of(**dose, through="transformers")
    made, attempt = attempt_with(fix, through, live.session(["trainer.train()"]), live.evidence())
    assert isinstance(made, Refused)
    assert attempt == made
