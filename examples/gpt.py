"""A small GPT that computes its own loss, trained on the source of a Python module.

    python examples/gpt.py                                                           alone
    farandole run -n 2 examples/gpt.py                                               2 whole models
    farandole run -n 2 --layout stages=2,microbatches=4 examples/gpt.py              2 stages

`forward(words, targets)` returns `logits, loss`, so the trainer gets no loss function. The trainer
records the model with the sample, and cuts it at its layers.
"""

import argparse
import inspect

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole as fd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=16, help="over all replicas together")
parser.add_argument("--length", type=int, default=32, help="characters in a sample")
parser.add_argument("--characters", type=int, default=40_000, help="characters in the text")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=4)
args = parser.parse_args()


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.both, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.size()
        query, key, value = (
            each.view(b, t, self.heads, width // self.heads).transpose(1, 2)
            for each in self.both(self.before(x)).split(width, dim=2)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, width))
        return x + self.inner(self.between(x))


class GPT(nn.Module):
    def __init__(self, words: int, longest: int, width: int, layers: int) -> None:
        super().__init__()
        self.longest = longest
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Layer(width, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, words, targets=None):
        _, t = words.size()
        assert t <= self.longest, f"{t} characters; the model takes at most {self.longest}"
        x = self.words(words) + self.places(torch.arange(t, device=words.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


run = fd.init()

text = inspect.getsource(argparse)[: args.characters]
alphabet = sorted(set(text))
numbers = torch.tensor([alphabet.index(each) for each in text])
samples = numbers[: len(numbers) // args.length * args.length].view(-1, args.length)
train = TensorDataset(samples[:, :-1], samples[:, 1:])  # the target of a character is the next one

trainer = run.trainer(
    GPT(len(alphabet), args.length, args.width, args.layers),
    None,  # the model computes its own loss
    lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    sample=train[: args.batch],  # arguments of forward: words and targets
)
trainer.load()

for epoch in run.epochs(args.epochs):
    losses = []
    for words, targets in trainer.loader(train, global_batch_size=args.batch):
        losses.append(trainer.step(words, targets))
    run.log(epoch=epoch, loss=run.mean(torch.stack(losses).mean()))
    trainer.save()
