"""Train the demo network on the stream of `prepare.py` for a given time, with torch on a CPU or GPU.

- The optimizer is Muon for the matrices and AdamW for embeddings and norms.
- The learning rate is constant and then falls linearly over the last 45% of the time (`--decay`). The schedule follows
  the clock, not the step count, so that a slow machine finishes its decay too.
- It writes `checkpoint.pt` every few minutes and at the end, and prints the loss as lines of JSON.

    python models/train.py --work models/work --minutes 80
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from network import Network, Shape
from torch import Tensor

HERE = Path(__file__).resolve().parent


def orthogonalise(g: Tensor, steps: int = 4) -> Tensor:
    """Do the Newton-Schulz iteration of Muon: approximately the nearest semi-orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    for _ in range(steps):
        y = x @ x.T
        x = a * x + (b * y + c * y @ y) @ x
    return x.T if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: list[Tensor], lr: float, dtype: torch.dtype) -> None:
        """`dtype`: of the iteration that computes an update; weights and momentum keep their own dtype."""
        super().__init__(parameters, {"lr": lr, "momentum": 0.95, "weight_decay": 0.05})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("m", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]).to(self.dtype))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))


def grown(state: dict[str, Tensor], network: Network) -> dict[str, Tensor]:
    """Return the weights for a network of twice the layers: after each layer follows one that changes nothing yet.

    Raises SystemExit if `state` does not hold half of the layers of `network`. The added layers keep the initial values
    of `network`, whose last matrices are zero, so the loss is the same at the first step.
    """
    own = sum(name.endswith(".attn_norm.weight") for name in state)
    if 2 * own != network.shape.layers:
        raise SystemExit(f"--grow: {own} layers become {2 * own}, not {network.shape.layers}")
    result = network.state_dict()
    for name, tensor in state.items():
        block, _, rest = name.removeprefix("blk.").partition(".")
        result[f"blk.{2 * int(block)}.{rest}" if name.startswith("blk.") else name] = tensor
    return result


def batches(data: np.ndarray, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of shuffled windows without end; each pass over the data has another order."""
    windows = (len(data) - 1) // length
    epoch = 0
    while True:
        order = np.random.default_rng(seed + epoch).permutation(windows)
        for i in range(0, windows - batch + 1, batch):
            block = np.stack([data[w * length : w * length + length + 1] for w in order[i : i + batch]])
            t = torch.from_numpy(block.astype(np.int64))
            yield t[:, :-1], t[:, 1:]
        epoch += 1


@torch.no_grad()
def loss_on(network: Network, data: np.ndarray, windows: int, length: int = 1024) -> float:
    """Mean nats per token over evenly spaced windows, float32."""
    network.eval()
    starts = np.linspace(0, len(data) - length - 1, windows).astype(int)
    total = 0.0
    for start in starts:
        t = torch.from_numpy(data[start : start + length + 1].astype(np.int64))[None]
        total += F.cross_entropy(network(t[:, :-1])[0], t[0, 1:]).item()
    network.train()
    return total / windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--minutes", type=float, default=80)
    parser.add_argument("--data", default="train.bin", help="the stream, a file of the work folder")
    parser.add_argument("--resume", action="store_true", help="continue from checkpoint.pt, with new momentum")
    parser.add_argument("--grow", action="store_true", help="with --resume: the checkpoint has half as many layers")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--long-length", type=int, default=1024, help="window length over the last fifth of the time")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of Muon; AdamW takes 0.15 of it")
    parser.add_argument(
        "--decay", type=float, default=0.45, help="last share of the time in which the rate falls to zero"
    )
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--feed-forward", type=int, default=Shape.feed_forward)
    args = parser.parse_args()
    if args.grow and not args.resume:
        parser.error("--grow goes with --resume")
    torch.manual_seed(1)
    torch.set_num_threads(args.threads)

    shape = Shape(width=args.width, layers=args.layers, feed_forward=args.feed_forward)
    network = Network(shape)
    if args.resume:
        state = torch.load(args.work / "checkpoint.pt", weights_only=True)["state"]
        network.load_state_dict(grown(state, network) if args.grow else state)
    matrices = [p for n, p in network.named_parameters() if p.ndim == 2 and "token_embd" not in n]
    others = [p for n, p in network.named_parameters() if not (p.ndim == 2 and "token_embd" not in n)]
    muon = Muon(matrices, lr=args.lr, dtype=torch.bfloat16 if args.bf16 else torch.float32)
    adam = torch.optim.AdamW(others, lr=args.lr * 0.15, betas=(0.9, 0.95), weight_decay=0.0)
    print(json.dumps({"parameters": sum(p.numel() for p in network.parameters()), **shape.to_dict()}), flush=True)

    train = np.fromfile(args.work / args.data, dtype="<u2")
    held_out = np.fromfile(args.work / "held_out.bin", dtype="<u2")
    begun = time.monotonic()
    short = batches(train, args.batch, args.length, seed=1)
    long = batches(train, max(1, args.batch * args.length // args.long_length), args.long_length, seed=100)
    seen, step, running, saved = 0, 0, 0.0, begun
    while (part := (time.monotonic() - begun) / (60 * args.minutes)) < 1:
        scale = min(1.0, (step + 1) / 60) * (min(1.0, (1 - part) / args.decay) if args.decay else 1.0)
        for group in muon.param_groups:
            group["lr"] = args.lr * scale
        for group in adam.param_groups:
            group["lr"] = args.lr * 0.15 * scale
        x, y = next(short if part < 0.8 else long)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            logits = network(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        seen += x.numel()
        step += 1
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        if step % 50 == 0:
            elapsed = time.monotonic() - begun
            progress = {
                "step": step, "tokens": seen, "loss": round(running, 3), "minutes": round(elapsed / 60, 1),
                "tokens_per_second": round(seen / elapsed),
            }  # fmt: skip
            print(json.dumps(progress), flush=True)
        if time.monotonic() - saved > 300:
            saved = time.monotonic()
            torch.save({"shape": shape.to_dict(), "state": network.state_dict()}, args.work / "checkpoint.pt")
            print(json.dumps({"step": step, "held_out_loss": round(loss_on(network, held_out, 8), 4)}), flush=True)
    report = {
        "tokens": seen, "steps": step, "minutes": args.minutes, "training_loss": round(running, 4),
        "held_out_loss": round(loss_on(network, held_out, 64), 4),
    }  # fmt: skip
    torch.save({"shape": shape.to_dict(), "state": network.state_dict(), "report": report}, args.work / "checkpoint.pt")
    (args.work / "train.json").write_text(json.dumps(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
