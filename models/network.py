"""The demo network: a small decoder in the llama architecture, used by `train.py` and `export.py`. It needs only torch.

It has RMS norm, rotary positions on interleaved pairs (llama.cpp's NORM rope, so that the export permutes nothing),
grouped-query attention, SwiGLU and tied embeddings. The input is int64 [batch, time], the output are logits, float
[batch, time, vocabulary].
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 4096
    width: int = 512
    layers: int = 3
    heads: int = 8
    kv_heads: int = 2
    feed_forward: int = 1024
    context: int = 2048
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def rotary(time: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [time, head_size / 2]."""
    frequency = shape.rope_base ** (-torch.arange(0, shape.head_size, 2).float() / shape.head_size)
    angle = torch.arange(time).float()[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head_size
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attn_q = nn.Linear(shape.width, shape.width, bias=False)
        self.attn_k = nn.Linear(shape.width, kv, bias=False)
        self.attn_v = nn.Linear(shape.width, kv, bias=False)
        self.attn_output = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.ffn_gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        s = self.shape
        h = self.attn_norm(x)
        q = self.attn_q(h).view(batch, time, s.heads, s.head_size).transpose(1, 2)
        k = self.attn_k(h).view(batch, time, s.kv_heads, s.head_size).transpose(1, 2)
        v = self.attn_v(h).view(batch, time, s.kv_heads, s.head_size).transpose(1, 2)
        a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + self.attn_output(a.transpose(1, 2).reshape(batch, time, width))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Network(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotary(tokens.shape[1], self.shape)
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, cos, sin)
        return F.linear(self.output_norm(x), self.token_embd.weight)
