# SPDX-License-Identifier: Apache-2.0
"""A small GPT over bytes, whose attention is a parameter, and the text that it reads."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

# q, k and v as one tensor (batch, seqlen, 3, heads, head_dim) to out (batch, seqlen, heads,
# head_dim), causal.
Attention = Callable[[torch.Tensor], torch.Tensor]

NUM_BYTES = 256


def flashgrad_attention(qkv: torch.Tensor) -> torch.Tensor:
    from flashgrad.torch import flash_attn_qkvpacked_func

    return flash_attn_qkvpacked_func(qkv, causal=True)


def torch_attention(qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads = heads
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.projection(self.attention(qkv).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Learned positions, pre-norm blocks, the embedding as the output layer."""

    def __init__(
        self, attention: Attention, seqlen: int, layers: int = 4, width: int = 256, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Parameter(torch.zeros(seqlen, width))
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss in nats per byte."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        logits = self.norm(self.blocks(x)) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def read_text(paths: Iterable[pathlib.Path]) -> torch.Tensor:
    """The bytes of the files, one after the other, as uint8."""
    data = b"".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def own_text() -> torch.Tensor:
    """The sources and documents of this repository, in the order of their names."""
    root = pathlib.Path(__file__).resolve().parents[2]
    folders = ("docs", "include", "src", "tools", "python", "tests", "benchmarks", "examples")
    kinds = {".md", ".h", ".hpp", ".cpp", ".cuh", ".cu", ".c", ".py"}
    paths = [*root.glob("*.md"), *(p for name in folders for p in (root / name).rglob("*"))]
    return read_text(sorted(p for p in paths if p.suffix in kinds and p.is_file()))


def sample(
    text: torch.Tensor, batch: int, seqlen: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pieces of the text: tokens (batch, seqlen), and what follows each."""
    starts = torch.randint(len(text) - seqlen, (batch,), generator=generator)
    pieces = torch.stack([text[i : i + seqlen + 1] for i in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]
