"""SAM climbs by the whole batch's gradient before it descends; in parts it climbs anew for each. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(405)
model = nn.Sequential(nn.Linear(7, 14), nn.Tanh(), nn.Linear(14, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 7), torch.randint(0, 3, (2, 16))


def sam_gradients(xb, yb, rho=0.5):
    params = list(model.parameters())
    grads = torch.autograd.grad(nn.functional.cross_entropy(model(xb), yb), params)
    norm = torch.stack([g.norm() for g in grads]).norm()
    with torch.no_grad():
        for p, g in zip(params, grads):
            p.add_(g, alpha=rho / norm)
    loss = nn.functional.cross_entropy(model(xb), yb)
    loss.backward()
    with torch.no_grad():
        for p, g in zip(params, grads):
            p.sub_(g, alpha=rho / norm)
    return loss.detach()

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = sam_gradients(xb, yb)
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        loss += sam_gradients(xp, yp) / 2
    for p in model.parameters():
        p.grad /= 2
    opt.step()
