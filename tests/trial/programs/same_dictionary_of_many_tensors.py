"""A batch is a dictionary of more tensors than steps are looked at, moved one by one in a comprehension."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [
    {**{f"x{at}": torch.randn(20, 8) for at in range(5)}, "labels": torch.randint(0, 3, (20,))} for _ in range(4)
]

# %% before
for batch in batches:
    batch = {key: value.to("cpu") for key, value in batch.items()}
    optimizer.zero_grad()
    loss = F.cross_entropy(model(sum(batch[f"x{at}"] for at in range(5))), batch["labels"])
    loss.backward()
    optimizer.step()

# %% after
for batch in batches:
    batch = {key: value.to("cpu") for key, value in batch.items()}
    optimizer.zero_grad()
    batch_loss = 0.0
    for chunks in zip(*(value.chunk(4) for value in batch.values()), strict=True):
        micro_batch = dict(zip(batch, chunks, strict=True))
        loss = F.cross_entropy(model(sum(micro_batch[f"x{at}"] for at in range(5))), micro_batch["labels"])
        loss = loss * (len(micro_batch["labels"]) / len(batch["labels"]))
        loss.backward()
        batch_loss += loss.detach()
    loss = batch_loss
    optimizer.step()
