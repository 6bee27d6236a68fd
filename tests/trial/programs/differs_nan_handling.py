"""The mean over targets that are not NaN is taken part by part, where their counts differ. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(131)
x, y = torch.randn(32, 5), torch.randn(32, 2)
y[torch.rand(32) < 0.4, 0] = float("nan")
y[:5, 1] = float("nan")
model = nn.Linear(5, 2)
opt = torch.optim.Adam(model.parameters(), lr=0.02)

# %% before
for i in range(0, 32, 16):
    known = ~y[i : i + 16].isnan()
    error = (model(x[i : i + 16]) - y[i : i + 16])[known] ** 2
    loss = error.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for i in range(0, 32, 16):
    opt.zero_grad()
    known = ~y[i : i + 16].isnan()
    errors, loss = [], 0.0
    for j in range(i, i + 16, 4):
        error = (model(x[j : j + 4]) - y[j : j + 4])[~y[j : j + 4].isnan()] ** 2
        part = error.mean() / 4
        part.backward()
        errors.append(error.detach())
        loss += part.detach()
    error = torch.cat(errors)
    opt.step()
