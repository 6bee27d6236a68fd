"""A bytearray gets a byte for each backward pass. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(408)
marks = bytearray()
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 4), torch.randn(2, 16, 1)

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(xb), yb)
    loss.backward()
    marks.append(1)
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = torch.tensor(0.0)
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        part = nn.functional.mse_loss(model(xp), yp) / 2
        part.backward()
        loss = loss + part.detach()
        marks.append(1)
    opt.step()
