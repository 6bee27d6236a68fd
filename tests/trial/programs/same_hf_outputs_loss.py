"""A model whose output carries .loss takes dictionaries of tensors in parts, weighted by labels that are not -100."""

# %% setup
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

torch.manual_seed(6)


@dataclass
class MaskedLMOutput:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class TinyForMaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.Linear(16, 40)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.encoder(self.embeddings(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.decoder(hidden)
        loss = F.cross_entropy(logits.view(-1, 40), labels.view(-1)) if labels is not None else None
        return MaskedLMOutput(loss, logits)


rows = []
for _ in range(36):
    length = int(torch.randint(3, 10, ()))
    ids, mask = torch.randint(1, 40, (10,)), (torch.arange(10) < length).long()
    masked = (torch.rand(10) < 0.4) & (mask == 1)
    masked[0] = True
    rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids.where(masked, torch.tensor(-100))})
train_dataloader = DataLoader(rows, batch_size=16, shuffle=True)
model = TinyForMaskedLM()
optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)

# %% before
model.train()
for epoch in range(1):
    total_loss = 0
    for batch in train_dataloader:
        outputs = model(**batch)
        loss = outputs.loss
        total_loss += loss.detach().float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: {total_loss / len(train_dataloader):.5f}")

# %% after
model.train()
for epoch in range(1):
    total_loss = 0
    for batch in train_dataloader:
        counted = (batch["labels"] != -100).sum()
        loss, logits = torch.zeros(()), []
        for start in range(0, len(batch["labels"]), 5):
            part = {name: tensor[start : start + 5] for name, tensor in batch.items()}
            outputs = model(**part)
            part_loss = outputs.loss * (part["labels"] != -100).sum() / counted
            part_loss.backward()
            loss += part_loss.detach()
            logits.append(outputs.logits.detach())
        outputs = MaskedLMOutput(loss, torch.cat(logits))
        total_loss += loss.detach().float()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: {total_loss / len(train_dataloader):.5f}")
