"""Small reference programs of PyTorch: digits, a VAE behind argparse, a U-Net in mixed precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from models.coupled import VAE
from models.family import Family
from models.images import UNET

__all__ = ["MNIST", "UNET_AMP", "VAE_ARGS"]

MNIST: Final = Family(
    name="mnist",
    size=100,
    share=0.85,
    templates=(
        """\
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR

# Training settings
parser = argparse.ArgumentParser(description='Digits')
parser.add_argument('--batch-size', type=int, default=$size, metavar='N',
                    help='samples in a training batch')
parser.add_argument('--epochs', type=int, default=1, metavar='N')
parser.add_argument('--lr', type=float, default=1.0, metavar='LR')
parser.add_argument('--gamma', type=float, default=0.7, metavar='M',
                    help='factor on the learning rate after each epoch')
parser.add_argument('--log-interval', type=int, default=2, metavar='N')
args = parser.parse_args([])

torch.manual_seed(1)
device = torch.device('cpu')
""",
        """\
class Digits(torch.utils.data.Dataset):
    # a bright row on noise: the digit says which
    def __init__(self, n):
        self.rows = torch.arange(n) % 10

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        image = torch.rand(1, 14, 14)
        image[0, self.rows[index]] += 1
        return image, self.rows[index]
""",
        """\
class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 24, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(600, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = torch.flatten(x, 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)
""",
        """\
losses = []


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if batch_idx % args.log_interval == 0:
            print('Train Epoch: {} [{}/{}]\\tLoss: {:.6f}'.format(
                epoch, batch_idx * len(data), len(train_loader.dataset), loss.item()))
""",
        """\
train_kwargs = {'batch_size': args.batch_size}
train_kwargs.update({'num_workers': 0, 'shuffle': True})

train_loader = torch.utils.data.DataLoader(Digits($samples), **train_kwargs)

model = Net().to(device)
optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
""",
        """\
for epoch in range(1, args.epochs + 1):
    train(args, model, device, train_loader, optimizer, epoch)
    scheduler.step()
""",
    ),
)

VAE_ARGS: Final = replace(
    VAE,
    name="vae_args",
    templates=(
        """\
import argparse

import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F

parser = argparse.ArgumentParser(description='VAE')
parser.add_argument('--batch-size', type=int, default=$size, metavar='N')
parser.add_argument('--epochs', type=int, default=1, metavar='N')
parser.add_argument('--seed', type=int, default=1, metavar='S')
args = parser.parse_args([])

torch.manual_seed(args.seed)
device = torch.device("cpu")
kwargs = {'num_workers': 0}
""",
        """\
pictures = torch.utils.data.TensorDataset(torch.rand($samples, 1, 6, 6), torch.zeros($samples))
train_loader = torch.utils.data.DataLoader(
    pictures, batch_size=args.batch_size, shuffle=True, **kwargs)
""",
        *VAE.templates[2:-1],
        "for epoch in range(1, args.epochs + 1):\n    train(epoch)\n",
    ),
)

UNET_AMP: Final = replace(
    UNET,
    name="unet_amp",
    templates=tuple(text.replace(", enabled=False", "") for text in UNET.templates),
)
