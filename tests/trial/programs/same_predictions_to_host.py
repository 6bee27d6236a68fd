"""Predictions gathered over a test set are detached and moved to the CPU, where they were put in the end anyway."""

# %% setup
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(25)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)).to(device)
test_loader = DataLoader(TensorDataset(torch.randn(50, 2, 8), torch.randint(0, 4, (50,))), batch_size=16)

# %% before
model.eval()
all_preds, all_labels = [], []
for xb, yb in test_loader:
    probs = torch.softmax(model(xb.to(device)), dim=1)
    all_preds.append(probs)
    all_labels.append(yb)
preds = torch.cat(all_preds).detach().cpu().numpy()
labels = torch.cat(all_labels).numpy()
confusion = np.zeros((4, 4), dtype=int)
np.add.at(confusion, (labels, preds.argmax(1)), 1)
print(confusion)

# %% after
model.eval()
all_preds, all_labels = [], []
for xb, yb in test_loader:
    probs = torch.softmax(model(xb.to(device)), dim=1)
    all_preds.append(probs.detach().cpu())
    all_labels.append(yb)
preds = torch.cat(all_preds).numpy()
labels = torch.cat(all_labels).numpy()
confusion = np.zeros((4, 4), dtype=int)
np.add.at(confusion, (labels, preds.argmax(1)), 1)
print(confusion)
