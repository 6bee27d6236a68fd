"""Models of sequences: an LSTM language model, a GPT with tied weights, encoders and decoders, one of transformers."""

from __future__ import annotations

from typing import Final

from models.family import Family

__all__ = ["ATTENTION", "ENCODER_DECODER", "GPT", "LSTM", "TRANSFORMERS"]

LSTM: Final = Family(
    name="lstm",
    size=64,
    templates=(
        """\
import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_

# Device configuration
device = torch.device("cpu")

# Hyper-parameters
embed_size = 32
hidden_size = 64
num_layers = 1
batch_size = $size
seq_length = 24
learning_rate = 0.002

torch.manual_seed(0)
""",
        """\
# Load "Penn Treebank" dataset
vocab_size = 150
ids = torch.randint(0, vocab_size, (batch_size, 5 * seq_length + 1))
""",
        """\
# RNN based language model
class RNNLM(nn.Module):
    def __init__(self, vocab_size, embed_size, hidden_size, num_layers):
        super(RNNLM, self).__init__()
        self.embed = nn.Embedding(vocab_size, embed_size)
        self.lstm = nn.LSTM(embed_size, hidden_size, num_layers, batch_first=True)
        self.linear = nn.Linear(hidden_size, vocab_size)

    def forward(self, x, h):
        # Embed word ids to vectors
        x = self.embed(x)

        # Forward propagate LSTM
        out, (h, c) = self.lstm(x, h)

        # Reshape output to (batch_size*sequence_length, hidden_size)
        out = out.reshape(out.size(0)*out.size(1), out.size(2))

        # Decode hidden states of all time steps
        out = self.linear(out)
        return out, (h, c)

model = RNNLM(vocab_size, embed_size, hidden_size, num_layers).to(device)

# Loss and optimizer
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)

# Truncated backpropagation
def detach(states):
    return [state.detach() for state in states]
""",
        """\
losses = []

# Set initial hidden and cell states
states = (torch.zeros(num_layers, batch_size, hidden_size).to(device),
          torch.zeros(num_layers, batch_size, hidden_size).to(device))

for i in range(0, ids.size(1) - seq_length, seq_length):
    # Get mini-batch inputs and targets
    inputs = ids[:, i:i+seq_length].to(device)
    targets = ids[:, (i+1):(i+1)+seq_length].to(device)

    # Forward pass
    states = detach(states)
    outputs, states = model(inputs, states)
    loss = criterion(outputs, targets.reshape(-1))

    # Backward and optimize
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
""",
    ),
)

GPT: Final = Family(
    name="gpt",
    size=8,
    templates=(
        """\
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 1000
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.1


torch.manual_seed(1337)
batch_size = $size
max_iters = 5
learning_rate = 1e-3
grad_clip = 1.0
""",
        """\
class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)

        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # weight tying

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss
""",
        """\
config = GPTConfig()
data = torch.randint(0, config.vocab_size, (4000,))


def get_batch():
    ix = torch.randint(len(data) - config.block_size, (batch_size,))
    x = torch.stack([data[i : i + config.block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + config.block_size] for i in ix])
    return x, y


model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: min(1.0, (it + 1) / 3))
""",
        """\
losses = []
for iter_num in range(max_iters):
    X, Y = get_batch()
    logits, loss = model(X, Y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    warmup.step()
    losses.append(loss.item())
""",
    ),
)

ENCODER_DECODER: Final = Family(
    name="encoder_decoder",
    size=32,
    templates=(
        """\
import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, BOS, EOS = 0, 1, 2
BATCH_SIZE = $size
CLIP = 1

random.seed(1234)
torch.manual_seed(1234)
""",
        """\
def sentence():
    return torch.tensor([BOS, *(random.randint(3, 199) for _ in range(random.randint(8, 20))), EOS])


def collate(pairs):
    sources, targets = zip(*pairs)
    return pad_sequence(sources, batch_first=True), pad_sequence(targets, batch_first=True)


pairs = [(sentence(), sentence()) for _ in range($samples)]
train_iterator = DataLoader(pairs, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
""",
        """\
class Encoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)

    def forward(self, src):
        return self.rnn(self.embedding(src))


class Decoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.fc_out = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, vocab))

    def forward(self, trg, memory, src_mask, hidden):
        states, _ = self.rnn(self.embedding(trg), hidden)
        scores = states @ memory.transpose(1, 2)
        weights = scores.masked_fill(~src_mask.unsqueeze(1), -1e9).softmax(dim=-1)
        return self.fc_out(torch.cat([states, weights @ memory], dim=-1))


class Seq2Seq(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, src, trg):
        memory, hidden = self.encoder(src)
        return self.decoder(trg, memory, src != PAD, hidden)


model = Seq2Seq(Encoder(200, 48), Decoder(200, 48))
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
""",
        """\
def train(model, iterator, optimizer, criterion, clip):
    model.train()
    epoch_losses = []

    for i, batch in enumerate(iterator):
        src, trg = batch
        optimizer.zero_grad()
        output = model(src, trg[:, :-1])

        # output = [batch size, trg len - 1, output dim]
        output_dim = output.shape[-1]
        output = output.reshape(-1, output_dim)
        trg = trg[:, 1:].reshape(-1)

        loss = criterion(output, trg)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        epoch_losses.append(loss.item())

    return epoch_losses
""",
        "losses = train(model, train_iterator, optimizer, criterion, CLIP)\n",
    ),
)

TRANSFORMERS: Final = Family(
    name="transformers",
    size=12,
    templates=(
        """\
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

torch.manual_seed(42)
device = "cpu"
lr = 1e-3
num_epochs = 1
batch_size = $size
""",
        """\
config = BertConfig(
    vocab_size=400,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    num_labels=3,
    attn_implementation="eager",
)
model = BertForSequenceClassification(config).to(device)
""",
        """\
examples = [
    {
        "input_ids": torch.randint(5, 400, (48,)),
        "attention_mask": torch.ones(48, dtype=torch.long),
        "labels": torch.tensor(i % 3),
    }
    for i in range($samples)
]
train_dataloader = DataLoader(examples, shuffle=True, batch_size=batch_size)
""",
        """\
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
lr_scheduler = get_linear_schedule_with_warmup(
    optimizer=optimizer,
    num_warmup_steps=0,
    num_training_steps=(len(train_dataloader) * num_epochs),
)
losses = []
""",
        """\
for epoch in range(num_epochs):
    model.train()
    total_loss = 0
    for step, batch in enumerate(tqdm(train_dataloader, disable=None)):
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        total_loss += loss.detach().float()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()

    train_epoch_loss = total_loss / len(train_dataloader)
    print(f"{epoch=}: {train_epoch_loss=}")
""",
    ),
)

ATTENTION: Final = Family(
    name="attention",
    size=16,
    templates=(
        """\
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
batch_size = $size
max_len = 40
""",
        """\
def attention(query, key, value, mask=None):
    "Compute 'Scaled Dot Product Attention'"
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    return torch.matmul(p_attn, value)
""",
        """\
class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, x, mask):
        n = x.size(0)
        query, key, value = (lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2) for lin in self.linears[:3])
        out = attention(query, key, value, mask=mask)
        return self.linears[-1](out.transpose(1, 2).reshape(n, -1, self.h * self.d_k))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))
        self.norms = nn.ModuleList([nn.LayerNorm(d_model), nn.LayerNorm(d_model)])

    def forward(self, x, mask):
        x = x + self.self_attn(self.norms[0](x), mask)
        return x + self.feed_forward(self.norms[1](x))


class Encoder(nn.Module):
    def __init__(self, vocab, d_model=32, N=3, h=8, n_classes=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.position = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList([EncoderLayer(d_model, h) for _ in range(N)])
        self.norm = nn.LayerNorm(d_model)
        self.generator = nn.Linear(d_model, n_classes)

    def forward(self, src):
        mask = (src != 0).unsqueeze(1).unsqueeze(1)
        x = self.embed(src) + self.position(torch.arange(src.size(1)))
        for layer in self.layers:
            x = layer(x, mask)
        return self.generator(self.norm(x)[:, 0])


model = Encoder(vocab=120)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
""",
        """\
sentences = torch.randint(1, 120, ($samples, max_len))
lengths = torch.randint(10, max_len + 1, ($samples, 1))
sentences[torch.arange(max_len) >= lengths] = 0  # padding
loader = DataLoader(TensorDataset(sentences, sentences[:, 0] % 5), batch_size=batch_size, shuffle=True)
losses = []
""",
        """\
model.train()
for i, (src, y) in enumerate(loader):
    loss = criterion(model(src), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
""",
    ),
)
"""Attention written out as in textbooks, with a padding mask and without dropout.

Gradients of the bias of keys are rounding alone (a softmax does not see it), which Adam would blow up to steps.
"""
