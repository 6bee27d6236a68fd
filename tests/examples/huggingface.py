"""Programs on transformers models: a T5 with low-rank adapters, and a classifier trained with accelerate."""

from __future__ import annotations

from typing import Final

from models.family import Family

__all__ = ["ACCELERATED", "ADAPTERS"]

ADAPTERS: Final = Family(
    name="adapters",
    size=8,
    templates=(
        """\
import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import T5Config, T5ForConditionalGeneration, default_data_collator, get_linear_schedule_with_warmup

torch.manual_seed(42)
device = "cpu"
max_length = 48
lr = 1e-2
num_epochs = 1
batch_size = $size
""",
        """\
class LoRA(nn.Module):
    \"\"\"A frozen linear layer with a trained low-rank term beside it.\"\"\"

    def __init__(self, base, r=4, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, r, bias=False)
        self.up = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * self.scaling


config = T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                  dropout_rate=0.0, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config).requires_grad_(False)
for module in list(model.modules()):
    for name in ("q", "v"):
        if isinstance(getattr(module, name, None), nn.Linear):
            setattr(module, name, LoRA(getattr(module, name)))
model = model.to(device)
""",
        """\
def encode(i):
    n = 8 + i % 32
    labels = torch.full((max_length,), -100)  # padding does not count
    labels[:n] = torch.randint(2, 300, (n,))
    return {
        "input_ids": torch.randint(2, 300, (max_length,)),
        "attention_mask": torch.ones(max_length, dtype=torch.long),
        "labels": labels,
    }


train_dataset = [encode(i) for i in range($samples)]
train_dataloader = DataLoader(
    train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=batch_size
)
""",
        """\
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
lr_scheduler = get_linear_schedule_with_warmup(
    optimizer=optimizer,
    num_warmup_steps=0,
    num_training_steps=(len(train_dataloader) * num_epochs),
)
losses = []
""",
        """\
# training
for epoch in range(num_epochs):
    model.train()
    total_loss = 0
    for step, batch in enumerate(tqdm(train_dataloader, disable=None)):
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        total_loss += loss.detach().float()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    train_epoch_loss = total_loss / len(train_dataloader)
    train_ppl = torch.exp(train_epoch_loss)
    print(f"{epoch=}: {train_ppl=} {train_epoch_loss=}")
""",
    ),
)

ACCELERATED: Final = Family(
    name="accelerated",
    size=12,
    templates=(
        """\
import math

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import BertConfig, BertForSequenceClassification, default_data_collator, get_scheduler

torch.manual_seed(42)
accelerator = Accelerator(cpu=True)

per_device_train_batch_size = $size
per_device_eval_batch_size = 2 * per_device_train_batch_size
gradient_accumulation_steps = 2
num_train_epochs = 1
""",
        """\
config = BertConfig(
    vocab_size=400,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    num_labels=3,
)
model = BertForSequenceClassification(config)


def example(i):
    return {"input_ids": torch.randint(5, 400, (48,)), "labels": i % 3}


train_dataset = [example(i) for i in range($samples)]
eval_dataset = [example(i) for i in range($samples)]
""",
        """\
train_dataloader = DataLoader(
    train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=per_device_train_batch_size
)
eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=per_device_eval_batch_size)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
num_update_steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
max_train_steps = num_train_epochs * num_update_steps_per_epoch
lr_scheduler = get_scheduler(
    name="linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=max_train_steps
)

model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
losses = []
""",
        """\
# Only show the progress bar once on each machine.
progress_bar = tqdm(range(max_train_steps), disable=None)
completed_steps = 0

for epoch in range(num_train_epochs):
    model.train()
    for step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        loss = outputs.loss
        loss = loss / gradient_accumulation_steps
        losses.append(loss.item())
        accelerator.backward(loss)
        if step % gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1:
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            progress_bar.update(1)
            completed_steps += 1

        if completed_steps >= max_train_steps:
            break

    model.eval()
    correct, seen = 0, 0
    for step, batch in enumerate(eval_dataloader):
        outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        predictions, references = accelerator.gather((predictions, batch["labels"]))
        correct += (predictions == references).sum().item()
        seen += len(references)

    accelerator.print(f"epoch {epoch}: accuracy {correct / seen:.3f}")
""",
    ),
)
