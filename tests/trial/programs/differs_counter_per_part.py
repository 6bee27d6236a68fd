"""The model counts its own training calls in a plain attribute, which parts raise faster. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(119)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.calls, self.seen = nn.Linear(6, 2), 0, 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.seen += len(x)
        return self.lin(x)


model = Counting()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 6), torch.randint(0, 2, (2, 16))

# %% before
def epoch():
    for xb, yb in zip(x, y):
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()


epoch()

# %% after
def epoch():
    for xb, yb in zip(x, y):
        opt.zero_grad()
        for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
            loss = nn.functional.cross_entropy(model(xp), yp) / 2
            loss.backward()
        opt.step()


epoch()
