"""Programs whose step is more than one model, one loss, one mean: a GAN, a VAE, a contrastive loss."""

from __future__ import annotations

from typing import Final

from models.family import Family

__all__ = ["CONTRASTIVE", "GAN", "VAE"]

GAN: Final = Family(
    name="gan",
    size=800,
    models=("G", "D"),
    templates=(
        """\
import torch
import torch.nn as nn

# Hyper-parameters
latent_size = 16
hidden_size = 128
image_size = 64
num_epochs = 1
batch_size = $size

torch.manual_seed(0)
""",
        """\
# MNIST dataset
mnist = torch.utils.data.TensorDataset(torch.rand($samples, 1, 8, 8) * 2 - 1)

# Data loader
data_loader = torch.utils.data.DataLoader(dataset=mnist, batch_size=batch_size, shuffle=True)
""",
        """\
# Discriminator
D = nn.Sequential(
    nn.Linear(image_size, hidden_size),
    nn.LeakyReLU(0.2),
    nn.Linear(hidden_size, hidden_size),
    nn.LeakyReLU(0.2),
    nn.Linear(hidden_size, 1),
    nn.Sigmoid())

# Generator
G = nn.Sequential(
    nn.Linear(latent_size, hidden_size),
    nn.ReLU(),
    nn.Linear(hidden_size, hidden_size),
    nn.ReLU(),
    nn.Linear(hidden_size, image_size),
    nn.Tanh())

# Binary cross entropy loss and optimizer
criterion = nn.BCELoss()
d_optimizer = torch.optim.Adam(D.parameters(), lr=0.0002)
g_optimizer = torch.optim.Adam(G.parameters(), lr=0.0002)
""",
        """\
def reset_grad():
    d_optimizer.zero_grad()
    g_optimizer.zero_grad()


losses = []
""",
        """\
for epoch in range(num_epochs):
    for i, (images,) in enumerate(data_loader):
        images = images.reshape(batch_size, -1)

        # Create the labels which are later used as input for the BCE loss
        real_labels = torch.ones(batch_size, 1)
        fake_labels = torch.zeros(batch_size, 1)

        # ================================================================== #
        #                      Train the discriminator                       #
        # ================================================================== #
        outputs = D(images)
        d_loss_real = criterion(outputs, real_labels)
        real_score = outputs

        z = torch.randn(batch_size, latent_size)
        fake_images = G(z)
        outputs = D(fake_images)
        d_loss_fake = criterion(outputs, fake_labels)
        fake_score = outputs

        # Backprop and optimize
        d_loss = d_loss_real + d_loss_fake
        reset_grad()
        d_loss.backward()
        d_optimizer.step()

        # ================================================================== #
        #                        Train the generator                         #
        # ================================================================== #
        z = torch.randn(batch_size, latent_size)
        fake_images = G(z)
        outputs = D(fake_images)
        g_loss = criterion(outputs, real_labels)

        # Backprop and optimize
        reset_grad()
        g_loss.backward()
        g_optimizer.step()

        losses.append((d_loss.item(), g_loss.item()))
""",
    ),
)

VAE: Final = Family(
    name="vae",
    size=1400,
    templates=(
        """\
import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F

torch.manual_seed(1)
device = torch.device("cpu")
kwargs = {"batch_size": $size, "shuffle": True}
""",
        """\
train_loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.rand($samples, 1, 6, 6), torch.zeros($samples)),
    **kwargs,
)
""",
        """\
class VAE(nn.Module):
    def __init__(self):
        super(VAE, self).__init__()

        self.fc1 = nn.Linear(36, 180)
        self.fc21 = nn.Linear(180, 20)
        self.fc22 = nn.Linear(180, 20)
        self.fc3 = nn.Linear(20, 180)
        self.fc4 = nn.Linear(180, 36)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5*logvar)
        eps = torch.randn_like(std)
        return mu + eps*std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 36))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


# Reconstruction + KL divergence losses summed over all elements and batch
def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction='sum')
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD
""",
        """\
losses = []


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        losses.append(loss.item() / len(data))

    print('====> Epoch: {} Average loss: {:.4f}'.format(epoch, train_loss / len(train_loader.dataset)))
""",
        "for epoch in range(1, 2):\n    train(epoch)\n",
    ),
)

CONTRASTIVE: Final = Family(
    name="contrastive",
    size=240,
    models=("encoder",),
    templates=(
        """\
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)

bs = $size
temperature = 0.5
""",
        """\
samples = torch.randn($samples, 48)
pairs = torch.utils.data.TensorDataset(samples + 0.1 * torch.randn_like(samples), samples)
loader = torch.utils.data.DataLoader(pairs, bs, shuffle=True, drop_last=True)
""",
        """\
class Encoder(nn.Module):
    def __init__(self, width=96, depth=4):
        super().__init__()
        self.stem = nn.Linear(48, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(depth)
        )
        self.projection = nn.Linear(width, 24)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.normalize(self.projection(x), dim=-1)


encoder = Encoder()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
""",
        """\
def nt_xent(za, zb):
    z = torch.cat([za, zb])
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    positives = torch.arange(len(z)).roll(len(za))
    return F.cross_entropy(similarity, positives)


losses = []
""",
        """\
for first, second in loader:
    loss = nt_xent(encoder(first), encoder(second))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
""",
    ),
)
