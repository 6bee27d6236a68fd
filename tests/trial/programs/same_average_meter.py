"""A competition's train_fn with an AverageMeter, clipping and a schedule per batch: only forward and backward are split."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.manual_seed(208)


class CFG:
    batch_size = 16
    max_grad_norm = 0.5
    epochs = 1


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


train_loader = DataLoader(TensorDataset(torch.randn(60, 1, 8, 8), torch.rand(60)), batch_size=CFG.batch_size, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
criterion = nn.BCEWithLogitsLoss()
losses, norms = AverageMeter(), []

# %% before
def train_fn(epoch):
    model.train()
    bar = tqdm(train_loader, total=len(train_loader))
    for images, labels in bar:
        optimizer.zero_grad()
        y_preds = model(images)
        loss = criterion(y_preds.view(-1), labels)
        losses.update(loss.item(), labels.size(0))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm).item())
        optimizer.step()
        scheduler.step()
        bar.set_postfix(loss=losses.avg, lr=scheduler.get_last_lr()[0])
    return losses.avg


for epoch in range(CFG.epochs):
    avg_loss = train_fn(epoch)

# %% after
def train_fn(epoch, parts=4):
    model.train()
    bar = tqdm(train_loader, total=len(train_loader))
    for images, labels in bar:
        optimizer.zero_grad()
        total = 0.0
        for some_images, some_labels in zip(images.tensor_split(parts), labels.tensor_split(parts)):
            y_preds = model(some_images)
            loss = criterion(y_preds.view(-1), some_labels) * some_labels.size(0) / labels.size(0)
            loss.backward()
            total += loss.item()
        losses.update(total, labels.size(0))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm).item())
        optimizer.step()
        scheduler.step()
        bar.set_postfix(loss=losses.avg, lr=scheduler.get_last_lr()[0])
    return losses.avg


for epoch in range(CFG.epochs):
    avg_loss = train_fn(epoch)
