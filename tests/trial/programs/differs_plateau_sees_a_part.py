"""ReduceLROnPlateau is told the last part's loss at the end of the epoch. Visible in two steps, where the epoch ends."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(404)
model = nn.Linear(5, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
x, y = torch.randn(2, 16, 5), torch.randn(2, 16, 1)

# %% before
def epoch():
    for xb, yb in zip(x, y):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        scheduler.step(loss.item())
        opt.step()


epoch()

# %% after
def epoch():
    for xb, yb in zip(x, y):
        opt.zero_grad()
        for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
            loss = nn.functional.mse_loss(model(xp), yp) / 2
            loss.backward()
        scheduler.step(loss.item())
        opt.step()


epoch()
