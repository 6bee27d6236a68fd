"""Cross entropy with class weights divides by the sum of the labels' weights; parts carry their share of that sum."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(37)
class_weights = torch.tensor([0.2, 1.0, 5.0])
labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 48, replacement=True)
loader = DataLoader(TensorDataset(torch.randn(48, 11), labels), batch_size=16)
classifier = nn.Sequential(nn.Linear(11, 22), nn.ReLU(), nn.Linear(22, 3))
criterion = nn.CrossEntropyLoss(weight=class_weights)
optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1)
epoch_losses = []

# %% before
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = criterion(classifier(inputs), targets)
    loss.backward()
    optimizer.step()
    epoch_losses.append(loss.item())

# %% after
for inputs, targets in loader:
    optimizer.zero_grad()
    weight_sum = class_weights[targets].sum()
    loss = 0.0
    for some_inputs, some_targets in zip(inputs.chunk(4), targets.chunk(4)):
        part = criterion(classifier(some_inputs), some_targets) * class_weights[some_targets].sum() / weight_sum
        part.backward()
        loss += part.detach()
    optimizer.step()
    epoch_losses.append(loss.item())
