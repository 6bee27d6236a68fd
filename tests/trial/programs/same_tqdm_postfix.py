"""Batches under tqdm are taken in parts; the bar, its postfix and the running mean count batches as before."""

# %% setup
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.manual_seed(9)
set_ = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 5, (64,)))
loader = DataLoader(set_, batch_size=16, shuffle=True, drop_last=True)
net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()

# %% before
avg = 0.0
pbar = tqdm(loader, desc="train")
for i, (img, lab) in enumerate(pbar, 1):
    opt.zero_grad(set_to_none=True)
    loss = loss_fn(net(img), lab)
    loss.backward()
    opt.step()
    avg += (loss.item() - avg) / i
    pbar.set_postfix(loss=f"{avg:.3f}")
pbar.close()

# %% after
avg = 0.0
pbar = tqdm(loader, desc="train")
for i, (img, lab) in enumerate(pbar, 1):
    opt.zero_grad(set_to_none=True)
    loss = 0
    for img_part, lab_part in zip(img.chunk(8), lab.chunk(8), strict=True):
        micro = loss_fn(net(img_part), lab_part) / 8
        micro.backward()
        loss = loss + micro.detach()
    opt.step()
    avg += (loss.item() - avg) / i
    pbar.set_postfix(loss=f"{avg:.3f}")
pbar.close()
