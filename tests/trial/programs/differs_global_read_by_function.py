"""What a function reads as a global is made without a graph. Visible in the first run: one gradient is gone."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(98)
encoder, head = nn.Linear(5, 4), nn.Linear(4, 2)
opt = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
xs, ys = torch.randn(3, 8, 5), torch.randn(3, 8, 2)


def loss_of(y):
    return nn.functional.mse_loss(head(code), y)


# %% before
for x, y in zip(xs, ys):
    code = encoder(x)
    loss = loss_of(y)
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for x, y in zip(xs, ys):
    with torch.no_grad():
        code = encoder(x)
    loss = loss_of(y)
    opt.zero_grad()
    loss.backward()
    opt.step()
