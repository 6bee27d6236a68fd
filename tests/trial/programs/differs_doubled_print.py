"""The line that tells of the batch has moved into the loop over its parts, and is printed twice. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(117)
model = nn.Linear(9, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
X, Y = torch.randn(32, 9), torch.randint(0, 3, (32,))

# %% before
for step in range(2):
    xb, yb = X[step * 16 : step * 16 + 16], Y[step * 16 : step * 16 + 16]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step()
    print(f"[{step}] trained on a batch")

# %% after
for step in range(2):
    xb, yb = X[step * 16 : step * 16 + 16], Y[step * 16 : step * 16 + 16]
    optimizer.zero_grad()
    loss = 0.0
    for k in (slice(0, 8), slice(8, 16)):
        part = nn.functional.cross_entropy(model(xb[k]), yb[k]) / 2
        part.backward()
        loss += part.detach()
        print(f"[{step}] trained on a batch")
    optimizer.step()
