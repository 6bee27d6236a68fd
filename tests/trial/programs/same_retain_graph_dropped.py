"""Nothing goes backward through the graph a second time, so retain_graph=True was not needed."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(24)
features = nn.Linear(8, 16)
left, right = nn.Linear(16, 2), nn.Linear(16, 3)
opt = torch.optim.SGD([*features.parameters(), *left.parameters(), *right.parameters()], lr=0.1)
x, a, b = torch.randn(2, 20, 8), torch.randint(0, 2, (2, 20)), torch.randint(0, 3, (2, 20))
ce = nn.CrossEntropyLoss()

# %% before
for i in range(2):
    opt.zero_grad()
    shared = torch.relu(features(x[i]))
    loss_a = ce(left(shared), a[i])
    loss_b = ce(right(shared), b[i])
    loss = loss_a + 0.5 * loss_b
    loss.backward(retain_graph=True)
    opt.step()
    print(f"{loss_a.item():.4f} {loss_b.item():.4f}")

# %% after
for i in range(2):
    opt.zero_grad()
    shared = torch.relu(features(x[i]))
    loss_a = ce(left(shared), a[i])
    loss_b = ce(right(shared), b[i])
    loss = loss_a + 0.5 * loss_b
    loss.backward()
    opt.step()
    print(f"{loss_a.item():.4f} {loss_b.item():.4f}")
