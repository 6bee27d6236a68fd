"""RMSE is the root of the batch's mean, and the mean of roots is another thing. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(157)
house = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(house.parameters(), lr=1e-2)
X, price = torch.randn(32, 8), torch.randn(32, 1).exp()


def rmse(pred, target):
    return torch.sqrt(nn.functional.mse_loss(torch.log1p(pred.relu()), torch.log1p(target)))

# %% before
for b in range(2):
    opt.zero_grad()
    loss = rmse(house(X[b * 16 : b * 16 + 16]), price[b * 16 : b * 16 + 16])
    loss.backward()
    opt.step()

# %% after
for b in range(2):
    opt.zero_grad()
    loss = 0.0
    for k in range(b * 16, b * 16 + 16, 4):
        part = rmse(house(X[k : k + 4]), price[k : k + 4]) / 4
        part.backward()
        loss += part.detach()
    opt.step()
