"""The weights' penalty is added whole to each part's loss, and so counts four times. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(160)
lasso = nn.Linear(20, 1)
opt = torch.optim.SGD(lasso.parameters(), lr=0.05)
X, t = torch.randn(32, 20), torch.randn(32, 1)

# %% before
for i in (0, 16):
    opt.zero_grad()
    loss = nn.functional.mse_loss(lasso(X[i : i + 16]), t[i : i + 16]) + 0.1 * lasso.weight.abs().sum()
    loss.backward()
    opt.step()

# %% after
for i in (0, 16):
    opt.zero_grad()
    loss = 0.0
    for j in range(i, i + 16, 4):
        part = nn.functional.mse_loss(lasso(X[j : j + 4]), t[j : j + 4]) / 4 + 0.1 * lasso.weight.abs().sum()
        part.backward()
        loss += part.detach()
    opt.step()
