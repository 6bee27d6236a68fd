"""retain_graph is dropped although a second backward goes through the same graph, which raises. Visible in the first step."""

# %% setup
import torch
from torch import nn

torch.manual_seed(138)
shared, a, b = nn.Linear(5, 8), nn.Linear(8, 1), nn.Linear(8, 1)
opt = torch.optim.SGD([*shared.parameters(), *a.parameters(), *b.parameters()], lr=0.1)
x, ya, yb = torch.randn(16, 5), torch.randn(16, 1), torch.randn(16, 1)

# %% before
for _ in range(2):
    opt.zero_grad()
    h = torch.tanh(shared(x))
    first = nn.functional.mse_loss(a(h), ya)
    second = nn.functional.mse_loss(b(h), yb)
    first.backward(retain_graph=True)
    second.backward()
    opt.step()

# %% after
for _ in range(2):
    opt.zero_grad()
    h = torch.tanh(shared(x))
    first = nn.functional.mse_loss(a(h), ya)
    second = nn.functional.mse_loss(b(h), yb)
    first.backward()
    second.backward()
    opt.step()
