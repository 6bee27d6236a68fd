"""The new evaluation without gradients calls model.eval() and does not go back to training. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(141)
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.4), nn.Linear(24, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 6), torch.randint(0, 2, (2, 16))
val_x = torch.randn(16, 6)
ce = nn.CrossEntropyLoss()

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = ce(model(xb), yb)
    loss.backward()
    opt.step()
    model.eval()
    val = model(val_x).argmax(1)
    model.train()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = ce(model(xb), yb)
    loss.backward()
    opt.step()
    model.eval()
    with torch.no_grad():
        val = model(val_x).argmax(1)
