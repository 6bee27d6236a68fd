"""A translation loss is a masked sum over the count of tokens; the count is taken of the whole batch before the parts."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(35)
PAD = 0
src, tgt = torch.randint(1, 25, (32, 7)), torch.randint(1, 25, (32, 9))
for i, n in enumerate(torch.randint(3, 9, (32,)).tolist()):
    tgt[i, n:] = PAD


class Seq2Seq(nn.Module):
    def __init__(self, vocab=25, dim=10):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.encoder, self.decoder = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, src, tgt_in):
        _, state = self.encoder(self.emb(src))
        return self.out(self.decoder(self.emb(tgt_in), state)[0])


model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

# %% before
def train_step(s, t):
    logits = model(s, t[:, :-1])
    gold = t[:, 1:]
    mask = (gold != PAD).float()
    loss = (F.cross_entropy(logits.transpose(1, 2), gold, reduction="none") * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


losses = [train_step(s, t) for s, t in zip(src.split(16), tgt.split(16))]

# %% after
def train_step(s, t):
    count = (t[:, 1:] != PAD).sum()
    optimizer.zero_grad()
    total = 0.0
    for sp, tp in zip(s.split(4), t.split(4)):
        logits = model(sp, tp[:, :-1])
        gold = tp[:, 1:]
        mask = (gold != PAD).float()
        loss = (F.cross_entropy(logits.transpose(1, 2), gold, reduction="none") * mask).sum() / count
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


losses = [train_step(s, t) for s, t in zip(src.split(16), tgt.split(16))]
