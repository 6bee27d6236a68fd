"""In the style of minGPT-ddp: a small GPT with dropout, two groups of parameters and clipped gradients."""

import math, os
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, DataLoader
from torch.utils.data.distributed import DistributedSampler


@dataclass
class GPTConfig:
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    vocab_size: int = 65
    block_size: int = 64
    pdrop: float = 0.1


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn = nn.MultiheadAttention(c.n_embd, c.n_head, dropout=c.pdrop, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.ones(c.block_size, c.block_size), 1).bool())
        self.mlp = nn.Sequential(nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU(), nn.Linear(4 * c.n_embd, c.n_embd), nn.Dropout(c.pdrop))

    def forward(self, x):
        T = x.size(1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=self.mask[:T, :T], need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.n_embd), nn.Parameter(torch.zeros(1, c.block_size, c.n_embd))
        self.drop = nn.Dropout(c.pdrop)
        self.blocks = nn.Sequential(*[Block(c) for _ in range(c.n_layer)])
        self.ln_f, self.head = nn.LayerNorm(c.n_embd), nn.Linear(c.n_embd, c.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.drop(self.tok(idx) + self.pos[:, : idx.size(1)])
        logits = self.head(self.ln_f(self.blocks(x)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class CharDataset(Dataset):
    def __init__(self, n, block):
        g = torch.Generator().manual_seed(0)
        self.data, self.block = torch.randint(0, 65, (n + block + 1,), generator=g), block

    def __len__(self):
        return len(self.data) - self.block - 1

    def __getitem__(self, i):
        return self.data[i : i + self.block], self.data[i + 1 : i + self.block + 1]


class Trainer:
    def __init__(self, model, optimizer, train_dataset, batch_size, max_epochs, grad_norm_clip):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.max_epochs, self.clip = max_epochs, grad_norm_clip
        self.train_loader = DataLoader(train_dataset, batch_size=batch_size, sampler=DistributedSampler(train_dataset))
        self.optimizer = optimizer
        self.model = DDP(model)

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch, dataloader, train=True):
        dataloader.sampler.set_epoch(epoch)
        for it, (source, targets) in enumerate(dataloader):
            step_type = "Train" if train else "Eval"
            batch_loss = self._run_batch(source, targets, train)
            print(f"[RANK{self.local_rank}] Epoch {epoch} | Iter {it} | {step_type} Loss {batch_loss:.5f}")

    def train(self):
        for epoch in range(self.max_epochs):
            self._run_epoch(epoch, self.train_loader)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    c = GPTConfig()
    model = GPT(c)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no = [p for p in model.parameters() if p.dim() < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no, "weight_decay": 0.0}], lr=3e-4, betas=(0.9, 0.95))
    trainer = Trainer(model, opt, CharDataset(256, c.block_size), 32, 1, 1.0)
    trainer.train()
    torch.save([p.detach() for p in model.parameters()], f"{os.environ['OUT']}.{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
