"""Cells that run out of memory, as small as they can be: what the notebooks of these tests are made of."""

TRAINING = """\
import torch
from torch import nn
%load_ext oomdoctor
%oomdoctor simulate 32MiB
torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CrossEntropyLoss()
inputs, targets = torch.randn(4096, 256), torch.randint(0, 10, (4096,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4096)"""
TRAIN = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
print("steps", 1 + 1)"""

SCORING = """\
import time
import torch
from torch import nn
from tqdm import tqdm
%load_ext oomdoctor
%oomdoctor simulate 24MiB
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
parts = [torch.randn(1024, 256) for _ in range(4)]"""
"""Its models' outputs keep their graphs, so that without gradients it fits."""
SCORE = """\
model.eval()
scores = [model(part) for part in parts]
print("scored", len(scores) + 1)"""
