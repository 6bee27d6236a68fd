"""Losses of three tasks that were summed and sent backward together go backward one after the other, each with its graph."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(47)
towers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)) for _ in range(3))
weights = [1.0, 0.5, 2.0]
opt = torch.optim.SGD(towers.parameters(), lr=0.05)
x, ys = torch.randn(2, 16, 6), torch.randn(2, 3, 16, 1)

# %% before
for xb, yb in zip(x, ys):
    opt.zero_grad()
    losses = [w * nn.functional.smooth_l1_loss(t(xb), y) for w, t, y in zip(weights, towers, yb)]
    loss = sum(losses)
    loss.backward()
    opt.step()
    print(" ".join(f"{one.item():.5f}" for one in losses))

# %% after
for xb, yb in zip(x, ys):
    opt.zero_grad()
    losses = []
    for w, t, y in zip(weights, towers, yb):
        task_loss = w * nn.functional.smooth_l1_loss(t(xb), y)
        task_loss.backward()
        losses.append(task_loss.detach())
    loss = sum(losses)
    opt.step()
    print(" ".join(f"{one.item():.5f}" for one in losses))
