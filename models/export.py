"""Write the trained network and its tokenizer as a GGUF that llama.cpp loads.

python models/export.py --work models/work --output models/demo.gguf [--type q8_0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from network import Shape
from prepare import SPECIAL

HERE = Path(__file__).resolve().parent
TYPES = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "f16": gguf.GGMLQuantizationType.F16}
FILE_TYPES = {"q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "f16": gguf.LlamaFileType.MOSTLY_F16}
FIM_ROLES = {
    "pre": "fim_prefix", "suf": "fim_suffix", "mid": "fim_middle", "pad": "fim_pad", "rep": "repo_name",
    "sep": "file_sep",
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, dict[str, object]]) -> None:
    """Add byte-level BPE (llama.cpp's "gpt2" with the "qwen2" split) and the roles of the special tokens."""
    ids: dict[str, int] = dict(tokenizer["model"]["vocab"])  # type: ignore[call-overload]
    ids.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    tokens = [text for text, _ in sorted(ids.items(), key=lambda item: item[1])]
    if [ids[t] for t in tokens] != list(range(len(tokens))):
        raise SystemExit("the vocabulary has holes")
    kinds = [gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in tokens]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(k) for k in kinds])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(ids["<|endoftext|>"])
    writer.add_eos_token_id(ids["<|endoftext|>"])
    writer.add_eot_token_id(ids["<|im_end|>"])
    for role, name in FIM_ROLES.items():
        writer.add_uint32(f"tokenizer.ggml.fim_{role}_token_id", ids[f"<|{name}|>"])
    writer.add_chat_template(TEMPLATE)


def add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Add the hyperparameters of the llama architecture."""
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_vocab_size(shape.vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--output", type=Path, default=HERE / "demo.gguf")
    parser.add_argument("--type", choices=sorted(TYPES), default="q8_0")
    args = parser.parse_args()
    checkpoint = torch.load(args.work / "checkpoint.pt", map_location="cpu", weights_only=True)
    shape = Shape(**checkpoint["shape"])
    writer = gguf.GGUFWriter(args.output, "llama")
    writer.add_name("rest-local demo")
    writer.add_description("Python completion, fill-in-the-middle and small chat; trained from scratch by models/")
    writer.add_license("mit")
    add_shape(writer, shape)
    writer.add_file_type(FILE_TYPES[args.type])
    add_vocabulary(writer, json.loads((args.work / "tokenizer.json").read_text("utf-8")))
    for name, tensor in checkpoint["state"].items():
        data = tensor.float().numpy()
        if data.ndim == 1:
            writer.add_tensor(name, data.astype(np.float32))
        else:
            kind = TYPES[args.type]
            writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(json.dumps({"file": str(args.output), "bytes": args.output.stat().st_size, **checkpoint.get("report", {})}))


if __name__ == "__main__":
    main()
