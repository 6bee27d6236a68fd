"""The changed cell halves the memory of new tensors by the default dtype, and leaves it so. Visible in one step."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(403)
model = nn.Linear(6, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 6), torch.randint(0, 2, (16,))

# %% before
opt.zero_grad()
loss = nn.functional.cross_entropy(model(x), y)
loss.backward()
opt.step()

# %% after
opt.zero_grad()
loss = nn.functional.cross_entropy(model(x), y)
loss.backward()
opt.step()
torch.set_default_dtype(torch.bfloat16)
