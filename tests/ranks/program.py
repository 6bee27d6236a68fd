"""A training on several ranks, as a user would write it, that runs out of memory where the environment says.

``WHERE``: ``forward``, ``backward``, ``step``, ``late`` (after the last collective) or ``nowhere``; ``RANKS``: on which
ranks; ``OUT``: where what is left goes. ``jobs.source_of`` writes what else happens in the place of comments.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
where = os.environ["WHERE"] if str(rank) in os.environ["RANKS"].split(",") else "nowhere"
is_wide = os.environ["WHERE"] in ("step", "late")
BATCH, STEPS, GREED = 8 if is_wide else 1024, 3, int(os.environ.get("GREED", "65536"))


class Greedy(torch.autograd.Function):
    """Does nothing, and takes ``GREED`` bytes a row to do it, forward or backward."""

    @staticmethod
    def forward(ctx, x):
        """Return the input."""
        if where == "forward":
            torch.empty(len(x), GREED // 4)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient."""
        if where == "backward":
            torch.empty(len(grad), GREED // 4)
        return grad


class Net(nn.Module):
    """Two layers, and what is greedy between them."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(32, width), nn.Linear(width, 10)

    def forward(self, x):
        """Return ten logits a row."""
        return self.second(Greedy.apply(torch.relu(self.first(x))))


torch.manual_seed(0)
data = TensorDataset(torch.randn(BATCH * world * STEPS, 32), torch.randint(0, 10, (BATCH * world * STEPS,)))
net = Net(50_000 if is_wide else 64)
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
if where in ("step", "late"):
    held = torch.zeros(int(os.environ["HELD"]) << 18)
loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, world, rank, seed=3))
losses = []
# before
for x, y in loader:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    # in a step
# after
if where == "late":
    copies = [one.detach().clone() for one in (*net.parameters(), *net.parameters())]
left = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
left["random"] = torch.get_rng_state()
torch.save(left, f"{os.environ['OUT']}.{rank}.pt")
