"""Gradients that cancel to nothing are rounding noise in parts, and Adam makes whole steps of it. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(21)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return torch.where(w >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * (w.abs() <= 1)


class BinaryLinear(nn.Linear):
    def forward(self, x):
        return F.linear(Sign.apply(x), Sign.apply(self.weight), self.bias)


bnn = nn.Sequential(BinaryLinear(10, 20), nn.Hardtanh(), BinaryLinear(20, 4))
opt = torch.optim.Adam(bnn.parameters(), lr=0.01)
xs, ys = torch.randn(2, 24, 10), torch.randint(0, 4, (2, 24))

# %% before
for x, y in zip(xs, ys):
    opt.zero_grad()
    loss = F.multi_margin_loss(bnn(x), y)
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p in bnn.parameters():
            p.clamp_(-1, 1)

# %% after
for x, y in zip(xs, ys):
    opt.zero_grad()
    loss = torch.tensor(0.0)
    for xp, yp in zip(x.chunk(3), y.chunk(3)):
        piece = F.multi_margin_loss(bnn(xp), yp) / 3
        piece.backward()
        loss = loss + piece.detach()
    opt.step()
    with torch.no_grad():
        for p in bnn.parameters():
            p.clamp_(-1, 1)
