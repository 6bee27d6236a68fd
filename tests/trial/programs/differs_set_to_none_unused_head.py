"""With zeros for gradients an unused head still decays; with None it is left alone. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(142)
body, head_a, head_b = nn.Linear(5, 6), nn.Linear(6, 2), nn.Linear(6, 2)
everything = nn.ModuleList([body, head_a, head_b])
opt = torch.optim.SGD(everything.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
x, y = torch.randn(4, 16, 5), torch.randint(0, 2, (4, 16))

# %% before
for task, (xb, yb) in enumerate(zip(x, y)):
    opt.zero_grad(set_to_none=False)
    head = head_a if task % 2 == 0 else head_b
    loss = nn.functional.cross_entropy(head(torch.relu(body(xb))), yb)
    loss.backward()
    opt.step()

# %% after
for task, (xb, yb) in enumerate(zip(x, y)):
    opt.zero_grad(set_to_none=True)
    head = head_a if task % 2 == 0 else head_b
    loss = nn.functional.cross_entropy(head(torch.relu(body(xb))), yb)
    loss.backward()
    opt.step()
