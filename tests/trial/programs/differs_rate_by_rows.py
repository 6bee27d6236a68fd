"""The learning rate follows the rows at hand (linear scaling), which after the change are a part's. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(409)
model = nn.Linear(9, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 9), torch.randint(0, 3, (2, 16))


def step(rows):
    for group in opt.param_groups:
        group["lr"] = 0.1 * rows / 16
    opt.step()

# %% before
def fit():
    for xb, yb in zip(x, y):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        step(len(xb))


fit()

# %% after
def fit():
    for batch, target in zip(x, y):
        opt.zero_grad()
        for xb, yb in zip(batch.chunk(4), target.chunk(4)):
            loss = nn.functional.cross_entropy(model(xb), yb) / 4
            loss.backward()
        step(len(xb))


fit()
