"""Each part asks the stream for its rows anew, so that later batches are consumed early. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(120)


def stream(batch_size):
    g = torch.Generator().manual_seed(5)
    while True:
        x = torch.randn(batch_size, 5, generator=g)
        yield x, x.sum(1, keepdim=True)


model = nn.Linear(5, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
data = stream(16)

# %% before
for step in range(3):
    x, y = next(data)
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    opt.step()

# %% after
for step in range(3):
    opt.zero_grad()
    loss = 0.0
    for part in range(2):
        x, y = next(data)
        half = nn.functional.mse_loss(model(x[part * 8 : part * 8 + 8]), y[part * 8 : part * 8 + 8]) / 2
        half.backward()
        loss += half.detach()
    opt.step()
