"""A forward over a whole test set at once becomes one over chunks of it, joined to the same predictions."""

# %% setup
import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(32)
model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3)).eval()
X_test = torch.from_numpy(np.random.RandomState(0).randn(64, 12)).float()
y_test = torch.randint(0, 3, (64,))

# %% before
with torch.no_grad():
    logits = model(X_test)
    y_pred = logits.argmax(dim=1)
acc = (y_pred == y_test).float().mean().item()
print(f"test accuracy {acc:.4f}")

# %% after
with torch.no_grad():
    logits = torch.cat([model(rows) for rows in X_test.split(24)])
    y_pred = logits.argmax(dim=1)
acc = (y_pred == y_test).float().mean().item()
print(f"test accuracy {acc:.4f}")
