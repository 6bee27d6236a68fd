"""The augmentation draws from a numpy generator of its own, once a call; the whole batch's flip becomes one of each part. Visible in two steps."""

# %% setup
import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(309)


class Flip:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, x):
        return x.flip(-1) if self.rng.random() < 0.5 else x


flip = Flip(3)
model = nn.Sequential(nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 1, 8), torch.randint(0, 2, (2, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(flip(xb)), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        part = nn.functional.cross_entropy(model(flip(xp)), yp) / 2
        part.backward()
        loss += part.detach()
    opt.step()
