"""Each part's loss, not the batch's, decides whether the rate is cut. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(125)
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(32, 3)
y = torch.cat([torch.zeros(8), 6 * torch.ones(8)]).repeat(2).unsqueeze(1)

# %% before
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x[i : i + 16]), y[i : i + 16])
    loss.backward()
    if loss.item() > 25:
        for group in opt.param_groups:
            group["lr"] *= 0.1
    opt.step()

# %% after
for i in range(0, 32, 16):
    opt.zero_grad()
    total = 0.0
    for j in range(i, i + 16, 8):
        loss = nn.functional.mse_loss(net(x[j : j + 8]), y[j : j + 8])
        (loss / 2).backward()
        if loss.item() > 25:
            for group in opt.param_groups:
                group["lr"] *= 0.1
        total += loss.detach() / 2
    loss = total
    opt.step()
