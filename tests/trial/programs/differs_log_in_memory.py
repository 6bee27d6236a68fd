"""A StringIO collects a line for each loss, and parts write more lines. Visible in two steps."""

# %% setup
import io

import torch
import torch.nn as nn

torch.manual_seed(304)
log = io.StringIO()
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 3), torch.randn(2, 16, 1)

# %% before
def train():
    for xb, yb in zip(x, y):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        log.write("step\n")
        opt.step()


train()

# %% after
def train():
    for xb, yb in zip(x, y):
        opt.zero_grad()
        for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
            loss = nn.functional.mse_loss(model(xp), yp) / 2
            loss.backward()
            log.write("step\n")
        opt.step()


train()
