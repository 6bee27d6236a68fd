"""A data frame gets a row for each backward pass. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import pandas as pd

torch.manual_seed(416)
model = nn.Linear(6, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 6), torch.randint(0, 3, (2, 16))
frame = pd.DataFrame({"rows": [0]})

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(xb), yb)
    loss.backward()
    frame.loc[len(frame)] = [len(frame)]
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = torch.tensor(0.0)
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = nn.functional.cross_entropy(model(xp), yp) / 4
        part.backward()
        loss = loss + part.detach()
        frame.loc[len(frame)] = [len(frame)]
    opt.step()
