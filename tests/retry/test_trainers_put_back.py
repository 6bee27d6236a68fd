"""A trainer of a library, made before the cell, is put back with what it counts and what it made."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from oomdoctor.retry.transaction import Transaction


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_trainer_that_failed_after_a_step_begins_anew(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Failing(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                raise torch.OutOfMemoryError

        def trainer_of(model: nn.Module) -> Trainer:
            settings = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
            args = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, max_steps=3, seed=1, **settings)
            return Trainer(model=model, args=args, train_dataset=rows)

        rows = [{"x": torch.full((8,), float(number)), "labels": torch.tensor(number % 2)} for number in range(32)]
        torch.manual_seed(0)
        model, fresh = Net(), Net()
        fresh.load_state_dict(model.state_dict())
        trainer = trainer_of(model)
        transaction = Transaction({"model": model, "trainer": trainer}, "trainer.train()", lambda: 1 << 30)
        with transaction.armed():
            trainer.add_callback(Failing())
            with pytest.raises(torch.OutOfMemoryError):
                trainer.train()
        assert trainer.state.global_step == 1
        transaction.restore()
        assert (transaction.losses(), transaction.unrestored()) == ((), [])
        assert (trainer.state.global_step, trainer.optimizer) == (0, None)
        trainer.train()
        trainer_of(fresh).train()
    assert torch.equal(model.head.weight, fresh.head.weight)


def test_plain_data_that_a_cell_replaces_comes_back() -> None:
    namespace: dict[str, Any] = {"run": SimpleNamespace(state=SimpleNamespace(step=3, names=["a"]))}
    transaction = Transaction(namespace, "run", lambda: 1 << 20)
    namespace["run"].state = SimpleNamespace(step=4, names=[])
    transaction.restore()
    assert namespace["run"].state == SimpleNamespace(step=3, names=["a"])
