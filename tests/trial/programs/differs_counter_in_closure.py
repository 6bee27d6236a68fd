"""The loss function that another function made counts its calls in a variable of its closure. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(301)


def make_loss(warmup=100):
    calls = 0

    def loss_fn(out, target):
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(out, target)

    return loss_fn


loss_fn = make_loss()
model = nn.Linear(5, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 5), torch.randint(0, 3, (2, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = loss_fn(model(xb), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = loss_fn(model(xp), yp) / 4
        part.backward()
        loss += part.detach()
    opt.step()
