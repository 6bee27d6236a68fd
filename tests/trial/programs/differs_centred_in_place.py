"""Each batch is centred by its own mean in place, and with it the rows of the data set. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(407)
model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data, labels = torch.randn(32, 5) + 3, torch.randint(0, 2, (32,))


def step(xb, yb):
    xb.sub_(xb.mean(0))
    return nn.functional.cross_entropy(model(xb), yb)

# %% before
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = step(data[i : i + 16], labels[i : i + 16])
    loss.backward()
    opt.step()

# %% after
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = 0.0
    for j in range(i, i + 16, 8):
        part = step(data[j : j + 8], labels[j : j + 8]) / 2
        part.backward()
        loss += part.detach()
    opt.step()
