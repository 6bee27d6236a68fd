"""A hook on the head's bias prints when a gradient arrives; parts make it print more lines. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(106)
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))


def spy(grad):
    print("gradient of the head's bias has arrived")


net[2].bias.register_hook(spy)
opt = torch.optim.Adam(net.parameters())
loss_fn = nn.CrossEntropyLoss()
x, y = torch.randn(16, 5), torch.randint(0, 2, (16,))

# %% before
opt.zero_grad()
loss = loss_fn(net(x), y)
loss.backward()
opt.step()

# %% after
opt.zero_grad()
loss = 0.0
for xp, yp in zip(x.split(8), y.split(8)):
    half = loss_fn(net(xp), yp) / 2
    half.backward()
    loss = loss + half.detach()
opt.step()
