"""Policies as reinforcement learning makes them: a small transformer, trained here.

How much of a policy an update changes depends on the weights' magnitudes and on the optimizer,
so neither noise nor an untrained model will do. A byte-level transformer (3.4 M parameters,
matrices that start at a deviation of 0.02) learns to predict the text of this repository's
documents at 1e-3; then a fresh AdamW (0.9, 0.999; decay 0.01, gradients clipped to a norm of 1)
moves its fp32 masters by REINFORCE with group-normalised advantages on text that it samples
itself. The reward is the share of lower-case letters. After each step the masters are rounded
to bf16: those are the policies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as nn

WIDTH: Final = 256
LAYERS: Final = 4
HEADS: Final = 4
VOCABULARY: Final = 256
CONTEXT: Final = 96
PRETRAINING_STEPS: Final = 300
PRETRAINING_RATE: Final = 1e-3
PRETRAINING_BATCH: Final = 8
PROMPTS: Final = 4
SAMPLES: Final = 8
PROMPT: Final = 32
COMPLETION: Final = 24

TEXTS: Final = Path(__file__).parent.parent / "docs"

Policy = NDArray[np.uint16]
"""The bit patterns of all bf16 values, tensor after tensor."""


class Transformer(torch.nn.Module):
    """A byte-level decoder whose parameters are a flat list of matrices and gains."""

    def __init__(self) -> None:
        super().__init__()

        def matrix(rows: int, columns: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns) * 0.02)

        self.embedding = matrix(VOCABULARY, WIDTH)
        self.positions = matrix(CONTEXT, WIDTH)
        self.head = matrix(VOCABULARY, WIDTH)
        self.gains = torch.nn.Parameter(torch.ones(2 * LAYERS + 1, WIDTH))
        self.attention = torch.nn.ParameterList(matrix(3 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.mixing = torch.nn.ParameterList(matrix(WIDTH, WIDTH) for _ in range(LAYERS))
        self.up = torch.nn.ParameterList(matrix(4 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.down = torch.nn.ParameterList(matrix(WIDTH, 4 * WIDTH) for _ in range(LAYERS))

    def forward(
        self, tokens: Tensor, past: list[tuple[Tensor, Tensor]] | None = None
    ) -> Tensor:
        """Logits of the next byte; ``past`` holds each layer's keys and values and grows."""
        done = past[0][0].shape[2] if past else 0
        length = tokens.shape[1]
        x = self.embedding[tokens] + self.positions[done : done + length]
        for layer in range(LAYERS):
            h = nn.rms_norm(x, (WIDTH,), self.gains[2 * layer])
            query, key, value = (
                part.view(*part.shape[:2], HEADS, -1).transpose(1, 2)
                for part in nn.linear(h, self.attention[layer]).chunk(3, dim=2)
            )
            if past is not None:
                if done:
                    key = torch.cat([past[layer][0], key], dim=2)
                    value = torch.cat([past[layer][1], value], dim=2)
                    past[layer] = (key, value)
                else:
                    past.append((key, value))
            seen = nn.scaled_dot_product_attention(query, key, value, is_causal=not done)
            x = x + nn.linear(seen.transpose(1, 2).flatten(2), self.mixing[layer])
            h = nn.rms_norm(x, (WIDTH,), self.gains[2 * layer + 1])
            x = x + nn.linear(nn.gelu(nn.linear(h, self.up[layer])), self.down[layer])
        return nn.linear(nn.rms_norm(x, (WIDTH,), self.gains[-1]), self.head)


@cache
def shapes() -> list[tuple[int, int]]:
    """Rows and columns of each matrix, in the order in which a policy has them."""
    with torch.device("meta"):
        return [(p.shape[0], p.shape[1]) for p in Transformer().parameters()]


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A trained model's parameters, from which courses at several rates start."""

    seed: int
    state: dict[str, Tensor]
    text: Tensor
    loss: float


def pretrain(seed: int) -> Pretrained:
    """Train one model on the documents; about 20 CPU seconds."""
    torch.manual_seed(seed)
    text = "\n".join(p.read_text("utf-8") for p in sorted(TEXTS.rglob("*.md"))).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE, weight_decay=0.01)
    mean = 0.0
    for step in range(PRETRAINING_STEPS):
        rows = _windows(data, PRETRAINING_BATCH, CONTEXT + 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = nn.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        _update(model, optimizer, loss)
        mean = loss.item() if not step else 0.95 * mean + 0.05 * loss.item()
    return Pretrained(seed, model.state_dict(), data, mean)


def course(start: Pretrained, rate: float) -> Iterator[Policy]:
    """Yield the policies of one course of reinforcement learning: version 0, then one a
    step.
    """
    torch.manual_seed(start.seed + 1_000)
    model = Transformer()
    model.load_state_dict(start.state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    while True:
        yield _as_bf16(model)
        rows = _rollouts(model, start.text)
        letters = rows[:, PROMPT:]
        rewards = ((letters >= ord("a")) & (letters <= ord("z"))).float().mean(dim=1)
        groups = rewards.view(PROMPTS, SAMPLES)
        spread = groups.std(dim=1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])[:, PROMPT - 1 :]
        logs = nn.log_softmax(logits.float(), dim=2).gather(2, letters[:, :, None])[:, :, 0]
        _update(model, optimizer, -(advantages * logs).mean())


@torch.no_grad()
def _rollouts(model: Transformer, text: Tensor) -> Tensor:
    """Return some prompts, each with several completions that the model samples."""
    rows = _windows(text, PROMPTS, PROMPT).repeat_interleave(SAMPLES, dim=0)
    past: list[tuple[Tensor, Tensor]] = []
    latest = rows
    for _ in range(COMPLETION):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(latest, past)[:, -1]
        latest = torch.multinomial(logits.float().softmax(dim=1), 1)
        rows = torch.cat([rows, latest], dim=1)
    return rows


def _windows(data: Tensor, count: int, length: int) -> Tensor:
    starts = torch.randint(len(data) - length, (count, 1))
    return data[starts + torch.arange(length)]


def _update(model: Transformer, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _as_bf16(model: Transformer) -> Policy:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    patterns: Policy = flat.to(torch.bfloat16).view(torch.uint16).numpy()
    return patterns
