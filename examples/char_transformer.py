"""A character-level transformer on Python's own manual, as a torch module on several ranks.

    python -m collectives run -n 4 examples/char_transformer.py [--steps 60]

The text is what `help()` shows about the language: pydoc_data.topics of the standard library, some
500,000 characters of prose and code. Trains twice, replicated (ZeRO-0) and with parameters,
gradients and optimizer state sharded (ZeRO-3), and compares the losses of all steps: they must be
equal bit for bit. Writes a few words of its own at the end. Exits with status 1 if the losses
differ, or did not fall.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a rank: the ranks fill the cores

import argparse
import sys
import time
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import collectives as cc
from collectives.train import AdamW, Cosine, Trainer, WarmUp

CONTEXT, WIDTH, LAYERS, HEADS, MICRO = 48, 64, 2, 4, 4


class Block(nn.Module):
    """Attention to what came before, then a small network on each place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next character at every place; the last layer is tied to the embedding."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, letters, bias=False)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.out.weight = self.embed.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.place(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each next character, in nats."""
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def write(model: nn.Module, text: torch.Tensor, length: int) -> torch.Tensor:
    """Goes on with `text`, always with the likeliest character."""
    with torch.no_grad():
        for _ in range(length):
            ahead = model(text[None, -CONTEXT:])[0, -1].argmax()
            text = torch.cat([text, ahead[None]])
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    prose = "\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(prose))
    number = {letter: i for i, letter in enumerate(letters)}
    text = torch.tensor([number[letter] for letter in prose])

    with cc.init() as comm:
        told = []
        for stage in (0, 3):
            torch.manual_seed(1)
            start = time.perf_counter()
            trainer = Trainer(
                Transformer(len(letters)),
                AdamW(lr=5e-3, weight_decay=0.01),
                comm,
                loss=loss,
                sharding=stage,
                clip_norm=1.0,
                schedule=WarmUp(args.steps // 10, Cosine(args.steps)),
                bucket_bytes=64 << 10,
                first_bucket_bytes=16 << 10,
            )
            losses = []
            for step in range(args.steps):
                random = np.random.default_rng([step, comm.rank])
                starts = random.integers(0, len(text) - CONTEXT - 1, MICRO)
                batch = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
                losses.append(trainer.step(batch).loss)
            told.append(losses)
            if comm.rank == 0:
                held = sum(trainer.nbytes().values())
                print(
                    f"ZeRO-{stage} on {comm.size} ranks: loss {losses[0]:.4f} to {losses[-1]:.4f} "
                    f"nats, {held:,} bytes a rank, {time.perf_counter() - start:.1f} s",
                    flush=True,
                )
        with trainer.gathered() as model:
            words = write(model, text[:24], 40)
        good = told[0] == told[1] and told[0][-1] < 0.9 * told[0][0]
        if comm.rank == 0:
            print(f"{len(prose):,} characters; it writes: {''.join(letters[i] for i in words)!r}")
            print(f"{'good' if good else 'FAILED'}: due are losses that fall, equal bit for bit")
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
