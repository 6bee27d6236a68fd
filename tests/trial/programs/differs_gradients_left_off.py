"""set_grad_enabled(False) before the evaluation is not taken back, so the next cell cannot train. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(310)
model = nn.Linear(8, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y, val_x, val_y = torch.randn(16, 8), torch.randint(0, 3, (16,)), torch.randn(16, 8), torch.randint(0, 3, (16,))

# %% before
opt.zero_grad()
nn.functional.cross_entropy(model(x), y).backward()
opt.step()
val_acc = (model(val_x).argmax(1) == val_y).float().mean().item()

# %% after
opt.zero_grad()
nn.functional.cross_entropy(model(x), y).backward()
opt.step()
torch.set_grad_enabled(False)
val_acc = (model(val_x).argmax(1) == val_y).float().mean().item()
