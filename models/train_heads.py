"""Train a draft head of the demo model for a given time: an MTP layer or an EAGLE-3 head (`heads.py`).

The demo network is frozen (`restore.py` brings its weights out of the GGUF). It computes what the head reads and, as
the target, its own distribution of the next token: what counts is that the head agrees with the network's choice, not
with the text. The target is the mean of the distribution and of its arg-max. The batches take turns with 1 to
`--steps` drafted tokens, each from the head's own state of the one before, as in use. Optimizers and schedule are those
of `train.py`.

    python models/train_heads.py --head mtp --data train-heads.bin --minutes 30 [--resume]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from heads import HEADS, Head, layer_inputs, load_network
from network import Network
from torch import Tensor
from train import Muon, batches

HERE = Path(__file__).resolve().parent


def run(network: Network, head: Head, tokens: Tensor, steps: int) -> tuple[Tensor, list[Tensor]]:
    """The network's logits, and the head's after each of `steps` drafted tokens; all [batch, time, vocabulary].

    The first `head.skipped` positions are left out of both.
    """
    with torch.no_grad():
        inputs = layer_inputs(network, tokens)
        target = F.linear(network.output_norm(inputs[-1]), network.token_embd.weight)
        features = F.pad(head.features(inputs), (0, 0, 1, 0))[:, :-1]
    begin = head.skipped
    states = head(inputs[0][:, begin:], features[:, begin:], steps)
    return target[:, begin:], [F.linear(head.output_norm(x), network.token_embd.weight) for x in states]


class CrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `logits` [n, classes] against probabilities; half the passes over memory of torch's own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:  # type: ignore[override]
        x = logits.float()
        normaliser = x.logsumexp(-1, keepdim=True)
        loss = (normaliser.sum() - torch.dot(x.flatten(), wanted.flatten())) / len(x)
        ctx.save_for_backward(logits, wanted, normaliser)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, wanted, normaliser = ctx.saved_tensors
        x = (logits - normaliser).exp_().sub_(wanted).mul_(gradient / len(logits))
        return x.to(logits.dtype), None


def loss_of(target: Tensor, drafts: list[Tensor]) -> Tensor:
    """Cross entropy of the drafts against the target's distribution and arg-max, the mean over the steps."""
    target = target.float()
    wanted = target.softmax(-1).mul_(0.5)
    wanted.scatter_add_(-1, target.argmax(-1, keepdim=True), torch.full_like(wanted[..., :1], 0.5))
    total = torch.zeros(())
    for step, logits in enumerate(drafts):
        x, y = logits[:, step:].flatten(0, 1), wanted[:, step:].flatten(0, 1)
        total = total + CrossEntropy.apply(x, y)
    return total / len(drafts)


@torch.no_grad()
def agreement(
    network: Network, head: Head, data: np.ndarray, windows: int, steps: int, length: int = 512
) -> list[float]:
    """By step, the share of positions where the head's first choice is the network's; the text is given up to there."""
    same, count = [0] * steps, [0] * steps
    for start in np.linspace(0, len(data) - length, windows).astype(int):
        tokens = torch.from_numpy(data[start : start + length].astype(np.int64))[None]
        target, drafts = run(network, head, tokens, steps)
        for step, logits in enumerate(drafts):
            hits = (logits.argmax(-1) == target.argmax(-1))[:, step:]
            same[step] += int(hits.sum())
            count[step] += hits.numel()
    return [round(a / b, 3) for a, b in zip(same, count, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", choices=sorted(HEADS), required=True)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--data", default="train-heads.bin", help="the stream, a file of the work folder")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--resume", action="store_true", help="continue from the head's checkpoint, with new momentum")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="drafted tokens")
    parser.add_argument("--lr", type=float, default=0.015, help="learning rate of Muon; AdamW takes 0.15 of it")
    parser.add_argument(
        "--decay", type=float, default=0.6, help="last share of the time in which the rate falls to zero"
    )
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    network = load_network(args.work)
    head: Head = HEADS[args.head](network.shape)
    path = args.work / f"{args.head}.pt"
    if args.resume:
        head.load_state_dict(torch.load(path, weights_only=True)["state"])
    else:
        head.start_from(network)
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim != 2]
    muon = Muon(matrices, lr=args.lr, dtype=torch.bfloat16 if args.bf16 else torch.float32)
    adam = torch.optim.AdamW(others, lr=args.lr * 0.15, betas=(0.9, 0.95), weight_decay=0.0)
    print(json.dumps({"parameters": sum(p.numel() for p in head.parameters())}), flush=True)

    data = np.fromfile(args.work / args.data, dtype="<u2")
    known = np.fromfile(args.work / "train-known.bin", dtype="<u2")
    held_out = np.fromfile(args.work / "held_out.bin", dtype="<u2")

    def save(windows: int) -> dict[str, object]:
        torch.save({"shape": network.shape.to_dict(), "state": head.state_dict()}, path)
        return {
            "known": agreement(network, head, known, windows, args.steps),
            "held_out": agreement(network, head, held_out, windows, args.steps),
        }

    begun = time.monotonic()
    seen, step, running, saved = 0, 0, 0.0, begun
    stream = batches(data, args.batch, args.length, seed=args.seed)
    while (part := (time.monotonic() - begun) / (60 * args.minutes)) < 1:
        scale = min(1.0, (step + 1) / 30) * (min(1.0, (1 - part) / args.decay) if args.decay else 1.0)
        for group in muon.param_groups:
            group["lr"] = args.lr * scale
        for group in adam.param_groups:
            group["lr"] = args.lr * 0.15 * scale
        tokens, _ = next(stream)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            target, drafts = run(network, head, tokens, 1 + step % args.steps)
        loss = loss_of(target, drafts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        seen += tokens.numel()
        step += 1
        running = loss.item() if step == 1 else 0.97 * running + 0.03 * loss.item()
        elapsed = time.monotonic() - begun
        if step % 20 == 0:
            progress = {
                "step": step, "tokens": seen, "loss": round(running, 3), "minutes": round(elapsed / 60, 1),
                "tokens_per_second": round(seen / elapsed),
            }  # fmt: skip
            print(json.dumps(progress), flush=True)
        if time.monotonic() - saved > 240:
            saved = time.monotonic()
            print(json.dumps({"step": step, **save(6)}), flush=True)
    report = {"head": args.head, "tokens": seen, "steps": step, "minutes": args.minutes, "loss": round(running, 3)}
    print(json.dumps({**report, **save(40)}))


if __name__ == "__main__":
    main()
