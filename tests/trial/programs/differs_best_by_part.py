"""The best loss so far, and the weights kept for it, are judged by parts. Visible in two steps."""

# %% setup
import copy

import torch
import torch.nn as nn

torch.manual_seed(406)
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 6), torch.randn(2, 16, 1)
best = {"loss": float("inf"), "weights": None}


def keep(loss):
    if loss < best["loss"]:
        best.update(loss=loss, weights=copy.deepcopy(model.state_dict()))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(xb), yb)
    keep(loss.item())
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = nn.functional.mse_loss(model(xp), yp)
        keep(part.item())
        (part / 4).backward()
        loss += part.detach() / 4
    opt.step()
