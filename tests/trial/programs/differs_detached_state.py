"""The hidden state between two windows is detached, which ends the gradient that flowed through it. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(139)
gru, head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)
params = [*gru.parameters(), *head.parameters()]
opt = torch.optim.SGD(params, lr=0.1)
waves, ends = torch.randn(2, 16, 12, 3), torch.randn(2, 16, 1)

# %% before
for wave, end in zip(waves, ends):
    opt.zero_grad()
    h = None
    for window in wave.split(4, dim=1):
        out, h = gru(window, h)
    loss = nn.functional.mse_loss(head(h[-1]), end)
    loss.backward()
    opt.step()

# %% after
for wave, end in zip(waves, ends):
    opt.zero_grad()
    h = None
    for window in wave.split(4, dim=1):
        h = h.detach() if h is not None else None
        out, h = gru(window, h)
    loss = nn.functional.mse_loss(head(h[-1]), end)
    loss.backward()
    opt.step()
