"""A loop that accumulates over two batches already takes each of them in parts, and both divisions apply."""

# %% setup
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(14)
loader = DataLoader(TensorDataset(torch.randn(90, 8), torch.randint(0, 6, (90,))), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()
accumulation_steps = 2

# %% before
model.zero_grad()
for i, (inputs, labels) in enumerate(loader):
    predictions = model(inputs)
    loss = criterion(predictions, labels)
    loss = loss / accumulation_steps
    loss.backward()
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        optimizer.step()
        model.zero_grad()
    print(i, round(loss.item() * accumulation_steps, 6))

# %% after
model.zero_grad()
for i, (inputs, labels) in enumerate(loader):
    collected, summed = [], 0.0
    for some_inputs, some_labels in zip(inputs.split(7), labels.split(7), strict=True):
        predictions = model(some_inputs)
        loss = criterion(predictions, some_labels) * (len(some_inputs) / len(inputs))
        loss = loss / accumulation_steps
        loss.backward()
        collected.append(predictions.detach())
        summed = summed + loss.detach()
    predictions, loss = torch.cat(collected), summed
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        optimizer.step()
        model.zero_grad()
    print(i, round(loss.item() * accumulation_steps, 6))
