"""The two draft heads of the demo model, an MTP layer and an EAGLE-3 head, for `train_heads.py` and `export_heads.py`.

Both predict what the frozen demo network says at position p from the token at p and from what the network computed at
p - 1. They draft further by reading their own output in place of the network's. Both are one transformer layer; they
differ in what they read and in how it enters the layer:

- `MTP` reads the hidden state before the output norm. One matrix joins it with the token's embedding, then follows a
  layer of the shape of the network's own. Rotary positions are of llama.cpp's NEOX kind, as in mimo2.
- `Eagle3` reads the inputs of three of the network's layers, which one matrix joins. Its attention sees that and the
  token's embedding at the same time. Rotary positions are of llama.cpp's NORM kind.

The tensors have the names of the GGUF files (`export_heads.py`). Neither has an own embedding or output matrix.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from network import Block, Network, Shape, rotary, rotate
from torch import Tensor, nn

LAYERS_READ = (1, 3, 5)  # of 6: the layers whose inputs the EAGLE-3 head reads


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the pairs (i, i + half); `rotate` of network.py pairs neighbours."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)


def halves(rows: Tensor, head_size: int) -> Tensor:
    """The rows of a query or key matrix, reordered from neighbouring pairs to the pairs (i, i + half)."""
    return rows.view(-1, head_size // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def earlier(x: Tensor, places: int) -> Tensor:
    """[batch, heads, time, size], shifted so that position t holds what t - places held; zeros where nothing was."""
    return F.pad(x, (0, 0, places, 0))[:, :, : x.shape[2]] if places else x


class Head(nn.Module):
    """What both heads share: attention over the own earlier steps, and the feed-forward part."""

    skipped = 0  # leading positions that the head never sees
    rotation = staticmethod(rotate)

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.attn_output = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.ffn_gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_down = nn.Linear(shape.feed_forward, shape.width, bias=False)
        self.output_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)

    def read(self, features: Tensor) -> Tensor:
        """The state [batch, time, width] that the head takes from the network's `features`."""
        raise NotImplementedError

    def join(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream, queries, keys and values; the last three [batch, time, heads * head size]."""
        raise NotImplementedError

    def start_from(self, network: Network) -> None:
        """Begin with the weights of the network's last layer."""
        block = network.blk[-1]
        assert isinstance(block, Block)
        for name in ("attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"):
            getattr(self, name).load_state_dict(getattr(block, name).state_dict())
        self.output_norm.load_state_dict(network.output_norm.state_dict())

    def forward(self, embedding: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """The states after 1 to `steps` drafted tokens, each [batch, time, width]; `output_norm` makes logits of them.

        `embedding` [batch, time, width] is of the token at each position, `features` of the position before it, with
        zeros at the first. State s at position p knows the network's features up to p - 1 - s, and all tokens up to p.
        A state attends to what drafting would have in its cache there: the first step's keys up to position p - s, and
        one key of each later step. So the s first positions of state s mean nothing.
        """
        s = self.shape
        batch, time, width = embedding.shape
        cos, sin = rotary(time, s)
        scale = s.head_size**-0.5
        groups = s.heads // s.kv_heads
        state = self.read(features)
        cache: list[tuple[Tensor, Tensor]] = []
        states: list[Tensor] = []
        for step in range(steps):
            residual, q, k, v = self.join(embedding, state)
            q = self.rotation(q.view(batch, time, s.heads, s.head_size).transpose(1, 2), cos, sin)
            k = self.rotation(k.view(batch, time, s.kv_heads, s.head_size).transpose(1, 2), cos, sin)
            v = v.view(batch, time, s.kv_heads, s.head_size).transpose(1, 2)
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            cache.append((k, v))
            if step == 0:
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                first_k, first_v = cache[0]
                hidden = torch.ones(time, time, dtype=torch.bool).triu(1 - step)
                scores = [(q @ first_k.transpose(-1, -2)).float().masked_fill(hidden, float("-inf"))]
                later = [(earlier(k, step - j), earlier(v, step - j)) for j, (k, v) in enumerate(cache) if j]
                scores += [(q * k).float().sum(-1, keepdim=True) for k, _ in later]
                weights = (torch.cat(scores, -1) * scale).softmax(-1).type_as(v)
                a = weights[..., :time] @ first_v
                for j, (_, value) in enumerate(later):
                    a = a + weights[..., time + j, None] * value
            x = residual + self.attn_output(a.transpose(1, 2).reshape(batch, time, width))
            h = self.ffn_norm(x)
            x = x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
            states.append(x)
            state = F.pad(x, (0, 0, 1, 0))[:, :time]
        return states


class MTP(Head):
    rotation = staticmethod(rotate_halves)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        kv = shape.kv_heads * shape.head_size
        self.enorm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.hnorm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.eh_proj = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attn_qkv = nn.Linear(shape.width, shape.width + 2 * kv, bias=False)

    @staticmethod
    def features(inputs: list[Tensor]) -> Tensor:
        """What it reads of the network's layer inputs, the last of which is the hidden state after all layers."""
        return inputs[-1]

    def read(self, features: Tensor) -> Tensor:
        return features

    def join(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(state)), -1))
        kv = self.shape.kv_heads * self.shape.head_size
        q, k, v = self.attn_qkv(self.attn_norm(x)).split((self.shape.width, kv, kv), -1)
        return x, q, k, v

    @torch.no_grad()
    def start_from(self, network: Network) -> None:
        super().start_from(network)
        block = network.blk[-1]
        assert isinstance(block, Block)
        size = self.shape.head_size
        q, k = halves(block.attn_q.weight, size), halves(block.attn_k.weight, size)
        self.attn_qkv.weight.copy_(torch.cat((q, k, block.attn_v.weight)))
        self.attn_norm.load_state_dict(block.attn_norm.state_dict())
        one = torch.eye(self.shape.width)
        self.eh_proj.weight.copy_(torch.cat((0.5 * one, one), -1))


class Eagle3(Head):
    skipped = 1  # position 0 has no position before it

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        kv = shape.kv_heads * shape.head_size
        self.fc = nn.Linear(len(LAYERS_READ) * shape.width, shape.width, bias=False)
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attn_norm_2 = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attn_q = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.attn_k = nn.Linear(2 * shape.width, kv, bias=False)
        self.attn_v = nn.Linear(2 * shape.width, kv, bias=False)

    @staticmethod
    def features(inputs: list[Tensor]) -> Tensor:
        return torch.cat([inputs[layer] for layer in LAYERS_READ], -1)

    def read(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def join(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = torch.cat((self.attn_norm(embedding), self.attn_norm_2(state)), -1)
        return state, self.attn_q(x), self.attn_k(x), self.attn_v(x)

    @torch.no_grad()
    def start_from(self, network: Network) -> None:
        super().start_from(network)
        block = network.blk[-1]
        assert isinstance(block, Block)
        for name in ("attn_q", "attn_k", "attn_v"):
            own = getattr(block, name).weight
            getattr(self, name).weight.copy_(torch.cat((0.2 * torch.randn_like(own) * own.std(), own), -1))
        self.attn_norm_2.load_state_dict(block.attn_norm.state_dict())
        one = torch.eye(self.shape.width)
        zero = torch.zeros_like(one)
        self.fc.weight.copy_(torch.cat((zero, zero, one), -1))


HEADS: dict[str, type[MTP] | type[Eagle3]] = {"mtp": MTP, "eagle3": Eagle3}


def load_network(work: Path) -> Network:
    """The frozen demo network of `checkpoint.pt` in the work folder."""
    checkpoint = torch.load(work / "checkpoint.pt", map_location="cpu", weights_only=True)
    network = Network(Shape(**checkpoint["shape"]))
    network.load_state_dict(checkpoint["state"])
    return network.requires_grad_(False).eval()


@torch.no_grad()
def layer_inputs(network: Network, tokens: Tensor) -> list[Tensor]:
    """The inputs of the network's layers and then the hidden state after the last; each [batch, time, width]."""
    cos, sin = rotary(tokens.shape[1], network.shape)
    inputs = [network.token_embd(tokens)]
    for block in network.blk:
        inputs.append(block(inputs[-1], cos, sin))
    return inputs
