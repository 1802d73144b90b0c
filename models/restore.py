"""Fill the work folder from a GGUF that `export.py` wrote, to continue the training on another machine.

It writes `tokenizer.json` (the same vocabulary, merges and split) and `checkpoint.pt` (the dequantized weights; Q8_0
costs 0.003 nats per token, see README.md). `prepare.py --keep-tokenizer` and `train.py --resume` continue from there.

    python models/restore.py --work models/work --model models/demo.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize
from network import Network, Shape
from prepare import SPECIAL, byte_level_bpe

HERE = Path(__file__).resolve().parent


def shape_of(reader: gguf.GGUFReader) -> Shape:
    """The hyperparameters that `export.add_shape` writes."""

    def value(key: str) -> float:
        return reader.fields[f"llama.{key}"].contents()

    return Shape(
        vocabulary=int(value("vocab_size")),
        width=int(value("embedding_length")),
        layers=int(value("block_count")),
        heads=int(value("attention.head_count")),
        kv_heads=int(value("attention.head_count_kv")),
        feed_forward=int(value("feed_forward_length")),
        context=int(value("context_length")),
        rope_base=float(value("rope.freq_base")),
        norm_epsilon=float(value("attention.layer_norm_rms_epsilon")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--model", type=Path, default=HERE / "demo.gguf")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(args.model)

    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    merges: list[str] = reader.fields["tokenizer.ggml.merges"].contents()
    ids = {token: i for i, token in enumerate(tokens) if token not in SPECIAL}
    byte_level_bpe(ids, [(a, b) for a, b in (m.split(" ") for m in merges)]).save(str(args.work / "tokenizer.json"))

    shape = shape_of(reader)
    wanted = Network(shape).state_dict()
    state = {
        t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()).reshape(wanted[t.name].shape)
        for t in reader.tensors
    }
    Network(shape).load_state_dict(state)  # raises RuntimeError if a name or a shape does not fit
    torch.save({"shape": shape.to_dict(), "state": state}, args.work / "checkpoint.pt")


if __name__ == "__main__":
    main()
