"""A VAE's loss is a sum over the rows; the noise is drawn for the whole batch, and parts take their rows of it."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(36, 20), nn.Linear(20, 4), nn.Linear(20, 4)
        self.fc3, self.fc4 = nn.Linear(4, 20), nn.Linear(20, 36)

    def forward(self, x, eps):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + eps * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def elbo(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


pictures = torch.rand(60, 36)
vae = VAE()
optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

# %% before
train_loss = 0
for data in pictures.split(20):
    eps = torch.randn(len(data), 4)
    optimizer.zero_grad()
    recon, mu, logvar = vae(data, eps)
    loss = elbo(recon, data, mu, logvar)
    loss.backward()
    train_loss += loss.item()
    optimizer.step()
print(f"====> average loss: {train_loss / len(pictures):.4f}")

# %% after
train_loss = 0
for data in pictures.split(20):
    eps = torch.randn(len(data), 4)
    optimizer.zero_grad()
    done, loss = [], 0.0
    for data_part, eps_part in zip(data.split(8), eps.split(8), strict=True):
        result = vae(data_part, eps_part)
        part = elbo(result[0], data_part, *result[1:])
        part.backward()
        done.append([tensor.detach() for tensor in result])
        loss += part.detach()
    recon, mu, logvar = (torch.cat(tensors) for tensors in zip(*done, strict=True))
    train_loss += loss.item()
    optimizer.step()
print(f"====> average loss: {train_loss / len(pictures):.4f}")
