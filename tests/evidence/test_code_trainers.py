"""Trainers of libraries, told from the frames of a failure: modules and classes of the same names stand for theirs."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed import facts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    DataCollatorForSeq2Seq,
    GPT2Config,
    GPT2LMHeadModel,
    default_data_collator,
)
from transformers.utils import is_torch_available

from oomdoctor.evidence._trainers import passed
from oomdoctor.model.code import TrainerFacts
from oomdoctor.model.session import Cell, Cells

if not is_torch_available():
    pytest.skip("this transformers asks for a newer torch", allow_module_level=True)

LIBRARY = """
class Trainer:
    def __init__(self, **given):
        self.__dict__.update(given)
    def train(self):
        self.training_step(self.items)
        self.evaluate()
    def training_step(self, num_items_in_batch):
        if not self.fails_late:
            raise MemoryError
    def evaluate(self):
        self.evaluation_loop(self.gathered)
    def evaluation_loop(self, all_preds):
        raise MemoryError
    def compute_loss(self): ...
"""
SETTINGS = """
    from transformers import TrainingArguments, Trainer
    args = TrainingArguments("out", per_device_train_batch_size=32)
"""
MAKE = "trainer = Trainer(model=model, args=args)"
RUN = "trainer.train()"


def library(source: str, name: str) -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), module)
    return module


def small(cls: type = GPT2LMHeadModel, **config: Any) -> nn.Module:
    if cls is GPT2LMHeadModel:
        still = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        given = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**{**given, **still, **config}))
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8)
    return cls(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, **config))


def trainer(cls: type | None = None, **given: Any) -> Any:
    made = cls or library(LIBRARY, "transformers.trainer")["Trainer"]
    settings = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, **given.pop("args", {})}
    known = {
        "model": small(),
        "args": SimpleNamespace(**settings),
        "model_accepts_loss_kwargs": True,
        "data_collator": default_data_collator,
        "train_dataset": list(range(44)),
        "items": 12,
        "gathered": None,
        "fails_late": False,
    }
    return made(**{**known, **given})


def found(live: Any, *sources: str, method: str = "train", **namespace: Any) -> tuple[TrainerFacts, ...]:
    history = tuple(
        Cell(number=n, source=textwrap.dedent(s).strip()) for n, s in enumerate(sources or (SETTINGS, MAKE, RUN), 1)
    )
    with pytest.raises(MemoryError) as failure:
        getattr(live, method)()
    return facts(Cells(history=history), namespace, passed=passed(failure.value)).trainers


def test_the_trainer_that_failed_and_its_settings() -> None:
    (one,) = found(trainer(args={"optim": "adamw_torch", "fsdp": [], "deepspeed": {"stage": 2}, "hub_token": "hf_x"}))
    assert (one.library, one.phase) == ("transformers", "train")
    assert (one.cell, one.line, one.call) == (1, 2, "TrainingArguments")
    assert dict(one.settings) == {
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "optim": "adamw_torch",
        "deepspeed": "...",
        "fsdp": "",
    }
    assert one.model is not None
    assert one.model.type_name == "GPT2LMHeadModel"
    assert (one.weighs, one.draws) == ("items", None)
    assert one.recomputes


def test_no_failure_has_no_trainer() -> None:
    cells = Cells(history=(Cell(number=1, source=textwrap.dedent(SETTINGS)),))
    assert facts(cells, {}).trainers == ()
    assert passed(None) is None
    assert passed(ValueError()) is None


def test_evaluation_within_training_is_told_apart() -> None:
    gathered = SimpleNamespace(tensors=(torch.zeros(4, 8), [torch.zeros(2)]))
    (one,) = found(trainer(fails_late=True, gathered=gathered))
    assert (one.phase, one.gathered_bytes) == ("evaluate", (32 + 2) * 4)
    assert found(trainer(), method="evaluate")[0].phase == "evaluate"


def test_a_failure_that_another_came_from_counts() -> None:
    with pytest.raises(MemoryError) as failure:
        trainer().train()
    told = ValueError("told")
    told.__cause__ = failure.value
    assert passed(told) is not None


@pytest.mark.parametrize(
    ("given", "weighs"),
    [
        ({}, "items"),
        ({"items": None}, "parts"),
        ({"model_accepts_loss_kwargs": False}, "parts"),
    ],
)
def test_how_parts_of_a_batch_are_weighed(given: dict[str, Any], weighs: str) -> None:
    assert found(trainer(**given))[0].weighs == weighs


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": small(resid_pdrop=0.1)}, "`resid_pdrop=0.1` of the model"),
        ({"neftune_noise_alpha": 5.0}, "`neftune_noise_alpha`"),
        ({"data_collator": lambda rows: rows}, "`<lambda>` is called for each part and"),
        ({"args": {"dataloader_num_workers": 2}}, "each of 2 workers"),
        ({"data_collator": DataCollatorForSeq2Seq(tokenizer=None)}, None),
    ],
)
def test_what_draws_for_each_part(given: dict[str, Any], says: str | None) -> None:
    assert found(trainer(**given))[0].draws == says


def test_an_optimizer_that_was_given() -> None:
    assert not found(trainer())[0].given_optimizer
    given = "trainer = Trainer(model=model, args=args, optimizers=(optimizer, None))"
    assert found(trainer(), SETTINGS, given, RUN)[0].given_optimizer


def test_the_optimizer_out_of_its_wrapper() -> None:
    inner = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    (one,) = found(trainer(optimizer=SimpleNamespace(optimizer=inner)))
    assert one.optimizer is not None
    assert (one.optimizer.type_name, one.optimizer.parameter_bytes) == ("AdamW", 20 * 4)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("import transformers\nargs = transformers.TrainingArguments('out')", "transformers.TrainingArguments"),
        ("from transformers import Seq2SeqTrainingArguments as S\nargs = S('out')", "S"),
        ("from mine import TrainingArguments\nargs = TrainingArguments('out')", ""),
        ("from transformers import TrainingArguments as T\nargs = T('a')\nother = T('b')\nargs = [args, other]", ""),
    ],
)
def test_where_the_settings_are_made(source: str, call: str) -> None:
    (one,) = found(trainer(), source, MAKE, RUN)
    assert one.call == call
    assert (one.cell is None) is (call == "")


def test_the_last_run_of_a_cell_counts() -> None:
    assert found(trainer(), SETTINGS, SETTINGS, MAKE, RUN)[0].cell == 2


def test_nothing_of_the_users_is_run() -> None:
    class Data:
        def __len__(self) -> int:
            raise AssertionError("it was asked for its length")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"it was asked for {name}")

    assert found(trainer(train_dataset=Data(), compute_metrics=Data()))


LIGHTNING = """
class Trainer:
    def __init__(self, **given):
        self.__dict__.update(given)
    def fit(self, model, train_dataloaders):
        loop(self)
"""
LOOP = "def run():\n    raise MemoryError\n"
PLAN = """
    import lightning as L
    trainer = L.Trainer(max_epochs=1)
"""


@pytest.mark.parametrize(("module", "phase"), [("fit_loop", "train"), ("evaluation_loop", "evaluate")])
def test_lightning(module: str, phase: str) -> None:
    home = library(LIGHTNING, "lightning.pytorch.trainer.trainer")
    run = library(LOOP, f"lightning.pytorch.loops.{module}")["run"]
    home["loop"] = lambda _: run()
    loader = DataLoader(TensorDataset(torch.zeros(10, 2)), batch_size=4, drop_last=True)
    combined = SimpleNamespace(_combined_loader=SimpleNamespace(_flattened=[loader]))
    strategy = SimpleNamespace(_precision_plugin=SimpleNamespace(precision="bf16-mixed"))
    live = home["Trainer"](accumulate_grad_batches=2, fit_loop=combined, strategy=strategy)
    model = nn.Linear(2, 2)
    history = (Cell(number=1, source=textwrap.dedent(PLAN)), Cell(number=2, source="trainer.fit(lit, loader)"))
    with pytest.raises(MemoryError) as failure:
        live.fit(model, loader)
    (one,) = facts(Cells(history=history), {}, [("lit", model)], passed=passed(failure.value)).trainers
    assert (one.library, one.phase, one.cell, one.call) == ("lightning", phase, 1, "L.Trainer")
    assert dict(one.settings) == {
        "accumulate_grad_batches": 2,
        "precision": "bf16-mixed",
        "batch_size": 4,
        "drop_last": True,
    }
    assert one.model is not None
    assert (one.model.path, one.weighs) == ("lit", "parts")
