"""A tiny projector with random weights for any model, so that images can be tested without a download.

    python -m models.tiny_mmproj mmproj-demo.gguf               # fits models/demo.gguf
    python -m models.tiny_mmproj out.gguf --width 64 --kind gemma3

It sees nothing: its rows depend on every pixel, and that is all a test of the engine needs. Kinds are those of
llama.cpp's `tools/mtmd`:

mlp      a CLIP tower and two layers (LLaVA): causal attention in the language model
gemma3   a SigLIP tower and one layer (Gemma 3): the image attends to all of itself
qwen2vl  a tower for images of any shape (Qwen2-VL), for models whose positions have several parts (M-RoPE)

Written in 10 ms; 100 to 200 kB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
KINDS = ("mlp", "gemma3", "qwen2vl")

TOWER, HEADS, FEED, BLOCKS = 32, 2, 48, 2
IMAGE, PATCH = 32, 8  # pixels: 16 patches of an image of fixed size


class _Weights:
    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer, self._random = writer, np.random.default_rng(seed)

    def add(self, name: str, *shape: int, spread: float, mean: float = 0.0) -> None:
        data = (self._random.standard_normal(shape) * spread + mean).astype(np.float32)
        self._writer.add_tensor(name, data)

    def linear(self, name: str, out: int, into: int, gain: float = 1.0) -> None:
        self.add(f"{name}.weight", out, into, spread=gain / np.sqrt(into))
        self.add(f"{name}.bias", out, spread=0.1)

    def norm(self, name: str, size: int = TOWER) -> None:
        self.add(f"{name}.weight", size, spread=0.0, mean=1.0)
        self.add(f"{name}.bias", size, spread=0.0)


def write(path: Path, width: int, kind: str = "mlp", *, seed: int = 0, spread: float = 1.0) -> Path:
    """Write a projector for models whose embeddings are `width` wide. `spread`: standard deviation of its rows, about.

    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind}: choose one of {', '.join(KINDS)}")
    writer = gguf.GGUFWriter(path, "clip")
    projector = {"qwen2vl": "qwen2vl_merger"}.get(kind, kind)
    writer.add_string("clip.projector_type", projector)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    sizes = {
        "embedding_length": TOWER, "feed_forward_length": FEED, "block_count": BLOCKS, "projection_dim": width,
        "attention.head_count": HEADS, "image_size": IMAGE, "patch_size": PATCH,
    }  # fmt: skip
    if kind == "gemma3":
        sizes["projector.scale_factor"] = 1
    for name, value in sizes.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])
    weights = _Weights(writer, seed)
    _tower(weights, kind)
    if kind == "mlp":
        weights.linear("mm.0", TOWER, TOWER)
        weights.linear("mm.2", width, TOWER, spread)
    elif kind == "gemma3":
        weights.add("mm.soft_emb_norm.weight", TOWER, spread=0.0, mean=1.0)
        weights.add("mm.input_projection.weight", TOWER, width, spread=spread / np.sqrt(TOWER))
    else:
        weights.linear("mm.0", 4 * TOWER, 4 * TOWER)
        weights.linear("mm.2", width, 4 * TOWER, spread)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tower(weights: _Weights, kind: str) -> None:
    pixels = 3 * PATCH * PATCH
    weights.add("v.patch_embd.weight", TOWER, 3, PATCH, PATCH, spread=2.0 / np.sqrt(pixels))
    if kind == "mlp":
        weights.add("v.class_embd", TOWER, spread=1.0)
        weights.add("v.position_embd.weight", (IMAGE // PATCH) ** 2 + 1, TOWER, spread=0.5)
        weights.norm("v.pre_ln")
    elif kind == "gemma3":
        weights.add("v.patch_embd.bias", TOWER, spread=0.1)
        weights.add("v.position_embd.weight", (IMAGE // PATCH) ** 2, TOWER, spread=0.5)
    else:
        weights.add("v.patch_embd.weight.1", TOWER, 3, PATCH, PATCH, spread=2.0 / np.sqrt(pixels))
    if kind != "mlp":
        weights.norm("v.post_ln")
    for number in range(BLOCKS):
        block = f"v.blk.{number}"
        weights.norm(f"{block}.ln1")
        weights.norm(f"{block}.ln2")
        for name in ("q", "k", "v", "out"):
            weights.linear(f"{block}.attn_{name}", TOWER, TOWER, 2.0)
        weights.linear(f"{block}.ffn_up", FEED, TOWER)
        weights.linear(f"{block}.ffn_down", TOWER, FEED)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--width", type=int, default=512, help="of the model's embeddings; 512 is that of demo.gguf")
    parser.add_argument("--kind", choices=KINDS, default="mlp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread", type=float, default=1.0)
    given = parser.parse_args()
    write(given.path, given.width, given.kind, seed=given.seed, spread=given.spread)


if __name__ == "__main__":
    main()
