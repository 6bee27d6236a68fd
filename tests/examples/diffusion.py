"""A small diffusion model: loader, model, optimizer and loop in one cell, the noise drawn in the step."""

from __future__ import annotations

from typing import Final

from models.family import Family

__all__ = ["DIFFUSION"]

DIFFUSION: Final = Family(
    name="diffusion",
    size=48,
    models=("net",),
    templates=(
        """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cpu"
""",
        """\
dataset = TensorDataset(torch.rand($samples, 1, 16, 16), torch.zeros($samples))


def corrupt(x, amount):
    \"\"\"Mix noise into `x`, for each sample as much as `amount` says\"\"\"
    noise = torch.rand_like(x)
    amount = amount.view(-1, 1, 1, 1)  # so that it broadcasts
    return x * (1 - amount) + noise * amount
""",
        """\
class SmallUNet(nn.Module):
    \"\"\"As few layers as a UNet can have.\"\"\"

    def __init__(self, in_channels=1, out_channels=1):
        super().__init__()
        self.down_layers = nn.ModuleList([
            nn.Conv2d(in_channels, 8, kernel_size=5, padding=2),
            nn.Conv2d(8, 16, kernel_size=5, padding=2),
            nn.Conv2d(16, 16, kernel_size=5, padding=2),
        ])
        self.up_layers = nn.ModuleList([
            nn.Conv2d(16, 16, kernel_size=5, padding=2),
            nn.Conv2d(16, 8, kernel_size=5, padding=2),
            nn.Conv2d(8, out_channels, kernel_size=5, padding=2),
        ])
        self.act = nn.SiLU()
        self.downscale = nn.MaxPool2d(2)
        self.upscale = nn.Upsample(scale_factor=2)

    def forward(self, x):
        h = []
        for i, layer in enumerate(self.down_layers):
            x = self.act(layer(x))
            if i < 2:  # not before the lowest layer
                h.append(x)
                x = self.downscale(x)

        for i, layer in enumerate(self.up_layers):
            if i > 0:
                x = self.upscale(x)
                x += h.pop()
            x = self.act(layer(x))

        return x
""",
        """\
# How many samples at once, and how often through all of them
batch_size = $size
n_epochs = 1

train_dataloader = DataLoader(dataset, batch_size=batch_size, shuffle=True)

net = SmallUNet()
net.to(device)

loss_fn = nn.MSELoss()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)

# Kept for the plot below
losses = []

for epoch in range(n_epochs):

    for x, y in train_dataloader:

        # The data, and the data made worse
        x = x.to(device)
        noise_amount = torch.rand(x.shape[0]).to(device)
        noisy_x = corrupt(x, noise_amount)

        # What the model makes of it
        pred = net(noisy_x)

        # How close is that to the data?
        loss = loss_fn(pred, x)

        # One step
        opt.zero_grad()
        loss.backward()
        opt.step()

        losses.append(loss.item())

    # The mean over this epoch
    avg_loss = sum(losses[-len(train_dataloader):]) / len(train_dataloader)
    print(f'Finished epoch {epoch}. Average loss for this epoch: {avg_loss:05f}')
""",
    ),
)
