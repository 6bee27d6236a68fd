"""The teacher's pass freezes parameters that the student shares, and leaves them frozen. Visible after one step."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(311)
embed, head = nn.Linear(6, 8), nn.Linear(8, 2)
opt = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
x, y = torch.randn(16, 6), torch.randint(0, 2, (16,))

# %% before
opt.zero_grad()
loss = nn.functional.cross_entropy(head(torch.relu(embed(x))), y)
loss.backward()
opt.step()
features = torch.relu(embed(x)).detach()

# %% after
opt.zero_grad()
loss = nn.functional.cross_entropy(head(torch.relu(embed(x))), y)
loss.backward()
opt.step()
embed.requires_grad_(False)
features = torch.relu(embed(x))
