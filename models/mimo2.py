"""Rewrite the demo model in the architecture mimo2, in which llama.cpp knows MTP layers, alone or with the MTP layer.

llama.cpp has no MTP graph for the architecture llama. mimo2 computes the same with the same weights: its expert layers,
attention sinks and value scale are optional. Three things differ, and none of them changes a result by more than the
rounding of a sum:

- Rotary positions pair the rows (i, i + half of a head) of queries and keys, not neighbours. Reordering the rows of
  those matrices makes up for it, and is exact in any quantization, which runs along the rows.
- The output matrix is a tensor of its own, here a copy of the embedding.
- Attention needs a sliding window. Every layer gets one that is larger than any context.

    python models/mimo2.py --output demo-mimo2.gguf [--head models/demo-mtp.gguf]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).resolve().parent
ARCHITECTURE = "mimo2"
WINDOW = 1 << 20  # tokens


def halves(rows: np.ndarray, head_size: int) -> np.ndarray:
    """Rows of a query or key matrix, from neighbouring pairs to the pairs (i, i + half of a head)."""
    by_pair = rows.reshape(-1, head_size // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(np.swapaxes(by_pair, 1, 2)).reshape(rows.shape)


def add_metadata(writer: gguf.GGUFWriter, demo: gguf.GGUFReader, mtp_layers: int) -> None:
    """Add shape and vocabulary of `demo`; the shape counts `mtp_layers` more layers than `demo` has."""

    def value(key: str) -> float:
        return float(demo.fields[f"llama.{key}"].contents())

    layers = int(value("block_count")) + mtp_layers
    writer.add_license("mit")
    writer.add_block_count(layers)
    if mtp_layers:
        writer.add_nextn_predict_layers(mtp_layers)
    writer.add_context_length(int(value("context_length")))
    writer.add_embedding_length(int(value("embedding_length")))
    writer.add_feed_forward_length(int(value("feed_forward_length")))
    writer.add_expert_feed_forward_length(int(value("feed_forward_length")))  # required, though there are no experts
    writer.add_head_count(int(value("attention.head_count")))
    writer.add_head_count_kv(int(value("attention.head_count_kv")))
    writer.add_layer_norm_rms_eps(value("attention.layer_norm_rms_epsilon"))
    writer.add_rope_freq_base(value("rope.freq_base"))
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base_swa", value("rope.freq_base"))
    writer.add_rope_dimension_count(int(value("rope.dimension_count")))
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern([True] * layers)
    writer.add_vocab_size(int(value("vocab_size")))
    writer.add_file_type(int(demo.fields["general.file_type"].contents()))
    add_vocabulary(writer, demo)


def add_vocabulary(writer: gguf.GGUFWriter, demo: gguf.GGUFReader) -> None:
    """Add the tokenizer of `demo` with its special tokens and its chat template."""
    for name, field in demo.fields.items():
        if name.startswith("tokenizer."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if field.types[1:] else None)


def write(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: gguf.ReaderTensor, data: np.ndarray | None = None) -> None:
    """Add `tensor` under a name, with its own data or other data of the same type."""
    writer.add_tensor(name, tensor.data if data is None else data, raw_dtype=tensor.tensor_type)


def convert(demo: Path, output: Path, head: Path | None = None) -> None:
    """Write `demo` as mimo2 to `output`, with the MTP layer of the file `head` if there is one.

    Raises ValueError if `demo` is not of the architecture llama, or the layer does not follow its last one.
    """
    reader = gguf.GGUFReader(demo)
    if (architecture := reader.fields["general.architecture"].contents()) != "llama":
        raise ValueError(f"{demo} is of the architecture {architecture}, not llama")
    layer = {}
    if head is not None:
        prefix = f"blk.{reader.fields['llama.block_count'].contents()}."
        layer = {t.name: t for t in gguf.GGUFReader(head).tensors if t.name.startswith("blk.")}
        if not layer or not all(name.startswith(prefix) for name in layer):
            raise ValueError(f"{head} does not hold the layer {prefix}*")
    head_size = int(reader.fields["llama.rope.dimension_count"].contents())
    writer = gguf.GGUFWriter(output, ARCHITECTURE)
    writer.add_name("rest-local demo" + (" with an MTP layer" if layer else ""))
    add_metadata(writer, reader, mtp_layers=1 if layer else 0)
    for tensor in reader.tensors:
        rotated = tensor.name.endswith(("attn_q.weight", "attn_k.weight"))
        add_tensor(writer, tensor.name, tensor, halves(tensor.data, head_size) if rotated else None)
        if tensor.name == "token_embd.weight":
            add_tensor(writer, "output.weight", tensor)
    for name, tensor in layer.items():
        add_tensor(writer, name, tensor)
    write(writer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "demo.gguf")
    parser.add_argument("--head", type=Path, help="a file with the MTP layer, such as demo-mtp.gguf")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    convert(args.model, args.output, args.head)


if __name__ == "__main__":
    main()
