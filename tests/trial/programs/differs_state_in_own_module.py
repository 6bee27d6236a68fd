"""A module of the user's own, imported from a file, counts calls in a global of its own. Visible in two steps."""

# %% setup
from pathlib import Path

Path("tracking.py").write_text("calls = 0\n\n\ndef track(loss):\n    global calls\n    calls += 1\n    return loss\n")

# %% setup
import sys

sys.path.insert(0, "")
import torch
import torch.nn as nn

import tracking

torch.manual_seed(401)
model = nn.Linear(6, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 6), torch.randint(0, 2, (2, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = tracking.track(nn.functional.cross_entropy(model(xb), yb))
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        part = tracking.track(nn.functional.cross_entropy(model(xp), yp)) / 2
        part.backward()
        loss += part.detach()
    opt.step()
