"""Write a trained draft head of the demo model as a GGUF that llama.cpp loads next to the model.

- The MTP layer becomes a mimo2 file of this layer, the embedding and the output matrix. It drafts for the demo model as
  `mimo2.py` rewrites it, which can also put the layer into the model's file.
- The EAGLE-3 head becomes an eagle3 file without an embedding or output matrix. It reads those of `demo.gguf` itself,
  for which it drafts.

    python models/export_heads.py --head mtp --work models/work --output models/demo-mtp.gguf
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import mimo2
import torch
from gguf.quants import quantize
from heads import LAYERS_READ
from network import Shape
from torch import Tensor

HERE = Path(__file__).resolve().parent
KIND = gguf.GGMLQuantizationType.Q8_0
IN_NEXTN = {"enorm", "hnorm", "eh_proj"}  # the tensors that llama.cpp keeps under blk.N.nextn


def add_weights(writer: gguf.GGUFWriter, names: dict[str, str], state: dict[str, Tensor]) -> None:
    """Add the tensors of `state` under the names of the file: matrices as Q8_0, vectors as float32."""
    for own, name in names.items():
        data = state[f"{own}.weight"].float().numpy()
        if data.ndim == 1:
            writer.add_tensor(f"{name}.weight", data)
        else:
            writer.add_tensor(f"{name}.weight", quantize(data, KIND), raw_dtype=KIND)


def export_mtp(demo: gguf.GGUFReader, state: dict[str, Tensor], shape: Shape, output: Path) -> None:
    writer = gguf.GGUFWriter(output, mimo2.ARCHITECTURE)
    writer.add_name("rest-local demo, MTP layer")
    mimo2.add_metadata(writer, demo, mtp_layers=1)
    tensors = {tensor.name: tensor for tensor in demo.tensors}
    mimo2.add_tensor(writer, "token_embd.weight", tensors["token_embd.weight"])
    mimo2.add_tensor(writer, "output.weight", tensors["token_embd.weight"])
    mimo2.add_tensor(writer, "output_norm.weight", tensors["output_norm.weight"])
    names = {}
    for name in (n.removesuffix(".weight") for n in state):
        inner = "nextn.shared_head_norm" if name == "output_norm" else f"nextn.{name}" if name in IN_NEXTN else name
        names[name] = f"blk.{shape.layers}.{inner}"
    add_weights(writer, names, state)
    mimo2.write(writer)


def export_eagle3(demo: gguf.GGUFReader, state: dict[str, Tensor], shape: Shape, output: Path) -> None:
    writer = gguf.GGUFWriter(output, "eagle3")
    writer.add_name("rest-local demo, EAGLE-3 head")
    writer.add_license("mit")
    writer.add_block_count(1)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_array("eagle3.target_layers", list(LAYERS_READ))
    writer.add_uint32("eagle3.target_hidden_size", shape.width)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    mimo2.add_vocabulary(writer, demo)
    names = {name: name if name in {"fc", "output_norm"} else f"blk.0.{name}"
             for name in (n.removesuffix(".weight") for n in state)}  # fmt: skip
    add_weights(writer, names, state)
    mimo2.write(writer)


EXPORTS = {"mtp": export_mtp, "eagle3": export_eagle3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", choices=sorted(EXPORTS), required=True)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--model", type=Path, default=HERE / "demo.gguf")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    checkpoint = torch.load(args.work / f"{args.head}.pt", map_location="cpu", weights_only=True)
    demo = gguf.GGUFReader(args.model)
    EXPORTS[args.head](demo, checkpoint["state"], Shape(**checkpoint["shape"]), args.output)
    print(json.dumps({"file": str(args.output), "bytes": args.output.stat().st_size}))


if __name__ == "__main__":
    main()
