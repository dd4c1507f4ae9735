"""A language model in the style of Hugging Face: configuration, output class, tied weights, AMP, early stopping."""

import argparse
import copy
import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)


@dataclass
class Config:
    vocab: int = 23
    width: int = 12
    heads: int = 3
    layers: int = 2
    dropout: float = 0.1


class Output(OrderedDict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.query, self.value, self.out = (nn.Linear(config.width, config.width) for _ in range(3))
        self.key = nn.Linear(config.width, config.width, bias=False)  # a bias would have a gradient of rounding alone

    def heads(self, x):
        return x.view(*x.shape[:-1], self.config.heads, -1).transpose(1, 2)

    def forward(self, hidden, mask=None):
        query, key, value = self.heads(self.query(hidden)), self.heads(self.key(hidden)), self.heads(self.value(hidden))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
        length = scores.size(-1)
        scores = scores.masked_fill(torch.ones(length, length).tril() == 0, float("-inf"))
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, None, :].to(scores.dtype)) * -1e9
        weights = F.dropout(scores.softmax(dim=-1), self.config.dropout, self.training)
        return self.out((weights @ value).transpose(1, 2).reshape(hidden.shape))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention, self.first = Attention(config), nn.LayerNorm(config.width)
        self.second = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )  # fmt: skip

    def forward(self, hidden, mask=None):
        hidden = hidden + self.attention(self.first(hidden), mask)
        return hidden + self.mlp(self.second(hidden))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(config.vocab, config.width), nn.Embedding(16, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        places = torch.arange(input_ids.size(1)).unsqueeze(0).expand(input_ids.size(0), -1)
        hidden = self.tokens(input_ids) + self.positions(places)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask)
        logits = self.head(self.norm(hidden))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))
        return Output(loss=loss, logits=logits)


class Texts(Dataset):
    def __init__(self, n, vocab):
        self.rows = torch.randint(1, vocab, (n, 9))
        self.rows[:, 1::2] = self.rows[:, ::2][:, :4] % (vocab - 1) + 1
        self.lengths = torch.randint(4, 10, (n,))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        mask = torch.arange(9) < self.lengths[index]
        return {
            "input_ids": self.rows[index],
            "attention_mask": mask,
            "labels": self.rows[index].masked_fill(~mask, -100),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--patience", type=int, default=1)
    args = parser.parse_args([])
    torch.manual_seed(5)
    config = Config()
    model = Model(config)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    train = DataLoader(Texts(26, config.vocab), batch_size=5, shuffle=True)
    held_out = DataLoader(Texts(11, config.vocab), batch_size=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, epochs=6, steps_per_epoch=3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    best, waited, state = math.inf, 0, None
    for epoch in range(6):
        model.train()
        total = 0.0
        for step, batch in enumerate(train):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                loss = model(**batch).loss / args.accumulation
            scaler.scale(loss).backward()
            total += loss.item() * len(batch["input_ids"])
            if (step + 1) % args.accumulation == 0:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=step % 4 == 1)
                schedule.step()
        model.eval()
        with torch.no_grad():
            outs = [(model(**batch), batch["labels"]) for batch in held_out]
        loss = sum(out.loss.item() for out, _ in outs) / len(held_out)
        right = sum((out.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum().item() for out, labels in outs)
        plateau.step(loss)
        print(f"{epoch} {total / len(train.dataset):.15f} {loss:.15f} {right} {norm:.15f} {scaler.get_scale()}")
        print("rate", optimizer.param_groups[0]["lr"])
        if loss < best:
            best, waited, state = loss, 0, copy.deepcopy(model.state_dict())
        elif (waited := waited + 1) > args.patience:
            print("stopped early at", epoch)
            break
    model.load_state_dict(state)
    torch.save({"model": model.state_dict(), "best": torch.tensor(best)}, "language.pt")


main()
