"""The weight of a term over the whole batch is zero until the fourth step. Not visible in the first two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(403)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(6, 16, 6), torch.randint(0, 4, (6, 16))


class Ramp:
    def __init__(self, begin, length):
        self.begin, self.length = begin, length

    def __call__(self, step):
        return min(1.0, max(0.0, (step - self.begin) / self.length))


ramp = Ramp(2, 2)


def objective(out, target, step):
    return F.cross_entropy(out, target) + ramp(step) * out.mean(0).square().sum()

# %% before
for step, (xb, yb) in enumerate(zip(x, y)):
    opt.zero_grad()
    loss = objective(model(xb), yb, step)
    loss.backward()
    opt.step()

# %% after
for step, (xb, yb) in enumerate(zip(x, y)):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = objective(model(xp), yp, step) / 4
        part.backward()
        loss += part.detach()
    opt.step()
