"""The loss is a mean over the tokens of packed sequences of unequal length; parts count as equal. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

torch.manual_seed(112)
sentences = [torch.randint(1, 20, (int(n),)) for n in torch.randint(2, 12, (32,))]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(20, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(self.emb(padded), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[0].data), pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False).data


tagger = Tagger()
opt = torch.optim.SGD(tagger.parameters(), lr=0.2)

# %% before
def fit(sents):
    opt.zero_grad()
    logits, gold = tagger(pad_sequence(sents, batch_first=True), torch.tensor([len(s) for s in sents]))
    loss = F.cross_entropy(logits, gold)
    loss.backward()
    opt.step()
    return loss.item()


history = [fit(sentences[i : i + 16]) for i in range(0, 32, 16)]

# %% after
def fit(sents, parts=4):
    opt.zero_grad()
    total, size = 0.0, len(sents) // parts
    for k in range(0, len(sents), size):
        some = sents[k : k + size]
        logits, gold = tagger(pad_sequence(some, batch_first=True), torch.tensor([len(s) for s in some]))
        loss = F.cross_entropy(logits, gold) / parts
        loss.backward()
        total += loss.item()
    opt.step()
    return total


history = [fit(sentences[i : i + 16]) for i in range(0, 32, 16)]
