"""After a warm-up of three steps a term over pairs of rows joins the loss. Not visible in the first two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(123)
trunk, classifier = nn.Linear(10, 8), nn.Linear(8, 3)
params = [*trunk.parameters(), *classifier.parameters()]
optimizer = torch.optim.Adam(params, lr=1e-2)
x, y = torch.randn(5, 16, 10), torch.randint(0, 3, (5, 16))
warmup = 3


def supcon(z, y):
    sim = F.normalize(z) @ F.normalize(z).T
    return ((y[:, None] == y[None]).float() - torch.sigmoid(sim)).pow(2).mean()

# %% before
for step, (xb, yb) in enumerate(zip(x, y)):
    optimizer.zero_grad()
    z = trunk(xb)
    loss = F.cross_entropy(classifier(z), yb)
    if step >= warmup:
        loss = loss + supcon(z, yb)
    loss.backward()
    optimizer.step()

# %% after
for step, (xb, yb) in enumerate(zip(x, y)):
    optimizer.zero_grad()
    codes, total = [], 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        z = trunk(xp)
        loss = F.cross_entropy(classifier(z), yp)
        if step >= warmup:
            loss = loss + supcon(z, yp)
        loss = loss / 2
        loss.backward()
        codes.append(z.detach())
        total += loss.detach()
    z, loss = torch.cat(codes), total
    optimizer.step()
