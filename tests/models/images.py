"""Models of images: a residual CNN with BatchNorm, a U-Net, a ViT."""

from __future__ import annotations

from typing import Final

from models.family import Family

__all__ = ["CNN", "UNET", "VIT"]

CNN: Final = Family(
    name="cnn",
    size=8,
    templates=(
        """\
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = torch.device("cpu")

# Hyper-parameters
num_epochs = 1
batch_size = $size
learning_rate = 0.05
""",
        """\
images = torch.randn($samples, 3, 32, 32)
labels = torch.randint(0, 10, ($samples,))
train_dataset = torch.utils.data.TensorDataset(images, labels)
train_loader = torch.utils.data.DataLoader(dataset=train_dataset, batch_size=batch_size, shuffle=True)
""",
        """\
class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + x)


class ResNet(nn.Module):
    def __init__(self, num_blocks=4, channels=12, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.blocks = nn.Sequential(*[ResidualBlock(channels) for _ in range(num_blocks)])
        self.avg_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x):
        out = self.avg_pool(self.blocks(F.relu(self.stem(x))))
        return self.fc(out.view(out.size(0), -1))


model = ResNet().to(device)
""",
        """\
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.3)
losses = []
""",
        """\
for epoch in range(num_epochs):
    for i, (images, labels) in enumerate(train_loader):
        images = images.to(device)
        labels = labels.to(device)

        # Forward pass
        outputs = model(images)
        loss = criterion(outputs, labels)

        # Backward and optimize
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    # Decay learning rate
    scheduler.step()
""",
    ),
)

UNET: Final = Family(
    name="unet",
    size=10,
    templates=(
        """\
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

torch.manual_seed(0)
DEVICE = "cpu"
""",
        """\
class Cells(Dataset):
    \"\"\"Discs on noise, with their masks.\"\"\"

    def __init__(self, n, side=32):
        self.n, self.side = n, side

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        rng = torch.Generator().manual_seed(index)
        grid = torch.stack(torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij"))
        centre = torch.randint(8, self.side - 8, (2, 1, 1), generator=rng)
        mask = ((grid - centre).pow(2).sum(0) < 36).float()
        return mask + 0.3 * torch.randn(3, self.side, self.side, generator=rng), mask


train_loader = DataLoader(Cells($samples), batch_size=$size, shuffle=True)
""",
        """\
class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.conv(x)


class UNET(nn.Module):
    def __init__(self, in_channels=3, out_channels=1, features=(8, 16, 32)):
        super().__init__()
        self.ups = nn.ModuleList()
        self.downs = nn.ModuleList()
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)

        for feature in features:
            self.downs.append(DoubleConv(in_channels, feature))
            in_channels = feature
        for feature in reversed(features):
            self.ups.append(nn.ConvTranspose2d(feature * 2, feature, kernel_size=2, stride=2))
            self.ups.append(DoubleConv(feature * 2, feature))

        self.bottleneck = DoubleConv(features[-1], features[-1] * 2)
        self.final_conv = nn.Conv2d(features[0], out_channels, kernel_size=1)

    def forward(self, x):
        skip_connections = []
        for down in self.downs:
            x = down(x)
            skip_connections.append(x)
            x = self.pool(x)

        x = self.bottleneck(x)
        skip_connections = skip_connections[::-1]

        for idx in range(0, len(self.ups), 2):
            x = self.ups[idx](x)
            x = self.ups[idx + 1](torch.cat((skip_connections[idx // 2], x), dim=1))

        return self.final_conv(x)


model = UNET().to(DEVICE)
loss_fn = nn.BCEWithLogitsLoss()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(DEVICE, enabled=False)
""",
        """\
def train_fn(loader, model, optimizer, loss_fn, scaler):
    history = []
    loop = tqdm(loader, disable=None)

    for batch_idx, (data, targets) in enumerate(loop):
        data = data.to(device=DEVICE)
        targets = targets.float().unsqueeze(1).to(device=DEVICE)

        # forward
        with torch.autocast(DEVICE, enabled=False):
            predictions = model(data)
            loss = loss_fn(predictions, targets)

        # backward
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        # update tqdm loop
        loop.set_postfix(loss=loss.item())
        history.append(loss.item())

    return history
""",
        "losses = train_fn(train_loader, model, optimizer, loss_fn, scaler)\n",
    ),
)

VIT: Final = Family(
    name="vit",
    size=64,
    templates=(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n",
        """\
config = {
    "batch_size": $size,
    "patch": 4,
    "image": 16,
    "dim": 48,
    "depth": 4,
    "heads": 4,
    "classes": 10,
    "lr": 3e-3,
}

torch.manual_seed(0)
""",
        """\
class PatchEmbedding(nn.Module):
    def __init__(self, image, patch, dim):
        super().__init__()
        self.project = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (image // patch) ** 2, dim))

    def forward(self, images):
        tokens = self.project(images).flatten(2).transpose(1, 2)
        cls = self.cls.expand(tokens.size(0), -1, -1)
        return torch.cat([cls, tokens], dim=1) + self.position


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, image, patch, dim, depth, heads, classes):
        super().__init__()
        self.embed = PatchEmbedding(image, patch, dim)
        self.encoder = nn.ModuleList([Block(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        x = self.embed(images)
        for block in self.encoder:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


net = ViT(*(config[key] for key in ("image", "patch", "dim", "depth", "heads", "classes")))
""",
        """\
pictures = torch.randn($samples, 3, config["image"], config["image"])
kinds = torch.randint(0, config["classes"], (len(pictures),))
trainloader = DataLoader(TensorDataset(pictures, kinds), batch_size=config["batch_size"], shuffle=True)

optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"], weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config["lr"], total_steps=len(trainloader))
loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
""",
        """\
def train_one_epoch(net, loader):
    net.train()
    running = []
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_function(net(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        running.append(loss.item())
    return running
""",
        'losses = train_one_epoch(net, trainloader)\nprint(f"epoch 1: {sum(losses) / len(losses):.3f}")\n',
    ),
    models=("net",),
)
