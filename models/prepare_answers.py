"""Make the training stream of the draft heads: text of the other streams, and the demo model's greedy answers to it.

A head drafts what the model says, and greedy answers differ from text: they loop more, and every token is the model's
first choice. Windows of 512 tokens are drawn from the other streams. A share of the windows (`--answers`) keep their
first half, as a prompt, and the network writes the rest.

    python models/prepare_answers.py --work models/work [--answers 0.3]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from heads import load_network
from network import Block, Network, rotary, rotate
from prepare_repeats import mix
from torch import Tensor

HERE = Path(__file__).resolve().parent
WINDOW = 512
SHARES = {"train": 0.36, "train-2": 0.14, "train-copies": 0.05, "train-known": 0.45}


def step(network: Network, tokens: Tensor, caches: list[tuple[Tensor, Tensor]], begin: int, end: int) -> Tensor:
    """Read tokens [batch, end - begin] into the caches; the first choice after the last, int64 [batch, 1]."""
    s = network.shape
    cos, sin = (x[begin:end] for x in rotary(end, s))
    batch, time = tokens.shape
    x = network.token_embd(tokens)
    for block, (keys, values) in zip(network.blk, caches, strict=True):
        assert isinstance(block, Block)
        h = block.attn_norm(x)
        q = block.attn_q(h).view(batch, time, s.heads, s.head_size).transpose(1, 2)
        k = block.attn_k(h).view(batch, time, s.kv_heads, s.head_size).transpose(1, 2)
        keys[:, :, begin:end] = rotate(k, cos, sin)
        values[:, :, begin:end] = block.attn_v(h).view(batch, time, s.kv_heads, s.head_size).transpose(1, 2)
        q = rotate(q, cos, sin)
        if time == 1:  # the queries that share a key head, as if they were several positions
            q = q.reshape(batch, s.kv_heads, s.heads // s.kv_heads, s.head_size)
            a = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end])
            a = a.reshape(batch, s.heads, 1, s.head_size)
        else:
            a = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], is_causal=True, enable_gqa=True)
        x = x + block.attn_output(a.transpose(1, 2).reshape(batch, time, s.width))
        h = block.ffn_norm(x)
        x = x + block.ffn_down(F.silu(block.ffn_gate(h)) * block.ffn_up(h))
    return F.linear(network.output_norm(x[:, -1:]), network.token_embd.weight).argmax(-1)


@torch.no_grad()
def greedy(network: Network, prompts: np.ndarray, length: int) -> np.ndarray:
    """`prompts` [batch, n] with the network's greedy continuations, [batch, length]; end tokens end nothing."""
    s = network.shape
    batch, n = prompts.shape
    shape = (batch, s.kv_heads, length, s.head_size)
    dtype = network.token_embd.weight.dtype
    caches = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in network.blk]
    tokens = torch.from_numpy(prompts.astype(np.int64))
    parts = [tokens, step(network, tokens, caches, 0, n)]
    for end in range(n + 1, length):
        parts.append(step(network, parts[-1], caches, end - 1, end))
    return torch.cat(parts, 1).numpy().astype("<u2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--answers", type=float, default=0.3, help="share of the windows that end in an answer")
    parser.add_argument("--tokens", type=int, default=1_500_000, help="length of the stream, at most")
    parser.add_argument("--batch", type=int, default=50, help="answers written at once")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(20261122)
    streams = [np.fromfile(args.work / f"{name}.bin", dtype="<u2") for name in SHARES]
    windows = mix(streams, list(SHARES.values()), WINDOW, rng)[: args.tokens].reshape(-1)
    windows = windows[: len(windows) // WINDOW * WINDOW].reshape(-1, WINDOW).copy()
    network = load_network(args.work)
    answered = int(len(windows) * args.answers)
    if args.bf16:
        network.bfloat16()
    for begin in range(0, answered, args.batch):
        part = windows[begin : min(begin + args.batch, answered)]
        part[:] = greedy(network, part[:, : WINDOW // 2], WINDOW)
        print(json.dumps({"answers": begin + len(part), "of": answered}), flush=True)
    rng.permutation(windows).reshape(-1).tofile(args.work / "train-heads.bin")
    print(json.dumps({"tokens": windows.size, "answers": answered}))


if __name__ == "__main__":
    main()
