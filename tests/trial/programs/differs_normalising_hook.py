"""A hook that runs after a gradient is accumulated scales it to length one, after each part anew. Visible in two steps."""

# %% setup
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(107)
model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3))


def unit(param):
    param.grad.div_(param.grad.norm() + 1e-12)


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(unit)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batches = [(torch.randn(18, 10), torch.randint(0, 3, (18,))) for _ in range(3)]

# %% before
for x, y in batches:
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()

# %% after
for x, y in batches:
    optimizer.zero_grad(set_to_none=True)
    loss = torch.tensor(0.0)
    for xp, yp in zip(x.split(6), y.split(6)):
        part = F.cross_entropy(model(xp), yp) / 3
        part.backward()
        loss = loss + part.detach()
    optimizer.step()
