"""Make the training stream of the demo model from Python source that is already on this machine.

It reads the running interpreter's standard library and its permissively licensed packages. It writes `tokenizer.json`,
`train.bin` and `held_out.bin` (flat little-endian uint16 token ids) and `prepare.json` into the work folder. It knows
nothing about the network. Running it needs the `tokenizers` package; the functions that choose and cut text do not.

    python models/prepare.py --work models/work [--site DIR ...] [--tokens 26_000_000] [--keep-tokenizer]
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import random
import re
import sys
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
VOCABULARY = 4096
END = "<|endoftext|>"
SPECIAL = [
    END, "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
]  # fmt: skip
NOT_RENAMED = {"def", "self", "return", "for", "not", "and", "the", "else", "elif", "import"}
# The split of llama.cpp's pre-tokenizer "qwen2", so that the GGUF tokenizes exactly as the training did.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|Unlicense)\b", re.I)
REFUSED = re.compile(r"\b(A?L?GPL|GNU|MPL|Mozilla|EPL|CC-BY|Proprietary)\b", re.I)
LARGEST_FILE = 200_000
SHARE_OF_ONE_PACKAGE = 0.20  # of the stream, at most: torch and sympy would dominate it otherwise


def held_out_modules() -> list[str]:
    """Return the modules in `held_out.txt`, paths relative to the standard library."""
    lines = (HERE / "held_out.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def licence_of(distribution: importlib.metadata.Distribution) -> str:
    """Return the licence in the package's metadata, as one string."""
    meta = distribution.metadata
    classifiers = [c for c in meta.get_all("Classifier") or [] if c.startswith("License")]
    expression, free_text = ((meta.get_all(key) or [""])[0] for key in ("License-Expression", "License"))
    return " ".join([expression or "", (free_text or "")[:80], *classifiers])


def permissive(licence: str) -> bool:
    """Whether the licence names a permissive licence and no other kind."""
    return bool(PERMISSIVE.search(licence)) and not REFUSED.search(licence)


def package_files(site: Path) -> Iterator[tuple[str, Path]]:
    """Yield (package name, file) of every permissively licensed distribution under `site`."""
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        if not permissive(licence_of(distribution)):
            continue
        for file in distribution.files or []:
            if file.suffix == ".py" and ".." not in file.parts:
                yield distribution.metadata["Name"], site / file


def usable(path: Path, text: str) -> bool:
    """Whether a file is ordinary source: no test (a list of values), no generated table, no very long lines."""
    if any(part in {"test", "tests", "testing", "idle_test", "_vendor"} for part in path.parts):
        return False
    if not 400 <= len(text) <= LARGEST_FILE or "\0" in text:
        return False
    lines = text.splitlines()
    digits = sum(c.isdigit() for c in text) / len(text)
    return max(map(len, lines)) <= 400 and digits < 0.12 and len(text) / len(lines) < 80


def collect(sites: list[Path]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the training texts by package, and the held-out texts by module."""
    library = Path(sysconfig.get_paths()["stdlib"])
    held_out = {name: (library / name).read_text("utf-8") for name in held_out_modules() if (library / name).exists()}
    private = Counter(
        line.strip() for text in held_out.values() for line in set(text.splitlines()) if len(line.strip()) > 30
    )
    found: list[tuple[str, Path]] = [
        ("stdlib", p) for p in sorted(library.rglob("*.py"))
        if "site-packages" not in p.parts and str(p.relative_to(library)) not in held_out
    ]  # fmt: skip
    for site in sites:
        found += sorted(package_files(site))
    texts: dict[str, list[str]] = {}
    seen: set[bytes] = set()
    for package, path in found:
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n").expandtabs(8)
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or not usable(path, text):
            continue
        lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 30]
        if lines and sum(line in private for line in lines) > 0.2 * len(lines):
            continue  # a copy of a held-out module
        seen.add(digest)
        texts.setdefault(package, []).append(text)
    return texts, held_out


def byte_level_bpe(vocabulary: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None) -> Tokenizer:
    """Byte-level BPE with the split above, empty or with a given vocabulary, followed by the SPECIAL tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    if vocabulary:
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of VOCABULARY entries; the special tokens take the last ids, in the order of SPECIAL."""
    from tokenizers import AddedToken, pre_tokenizers, trainers

    tokenizer = byte_level_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the vocabulary has {tokenizer.get_vocab_size()} entries, wanted {VOCABULARY}")
    return tokenizer


def pieces(text: str, rng: random.Random, low: int, high: int) -> Iterator[str]:
    """Cut a file at line ends into pieces of low..high characters."""
    start = 0
    while start < len(text):
        end = start + rng.randint(low, high)
        cut = text.find("\n", end)
        end = len(text) if cut < 0 or len(text) - cut < 200 else cut + 1
        yield text[start:end]
        start = end


def fill_in_the_middle(piece: str, rng: random.Random) -> str:
    """Prefix-suffix-middle; half of the cuts are at line ends, the usual place of an editor's cursor."""
    a, b = sorted((rng.randint(0, len(piece)), rng.randint(0, len(piece))))
    if rng.random() < 0.5:
        a = piece.rfind("\n", 0, a) + 1
        b = max(a, piece.rfind("\n", 0, b) + 1)
    return f"<|fim_prefix|>{piece[:a]}<|fim_suffix|>{piece[b:]}<|fim_middle|>{piece[a:b]}{END}"


def functions(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, first paragraph of the docstring or '', source) of the functions and methods of a file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            source = "".join(lines[node.lineno - 1 : node.end_lineno])
            if 80 < len(source) < 2400:
                doc = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
                yield node.name, doc, textwrap.dedent(source)


def chat(user: str, answer: str) -> str:
    """One question and an answer of code, in the form of the chat template in `export.py`."""
    return (
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n```python\n{answer.rstrip()}\n```<|im_end|>\n{END}"
    )


def edit(source: str, rng: random.Random) -> str | None:
    """Make a rename: the answer repeats the code of the question except for one name."""
    names = [n for n, count in Counter(re.findall(r"\b[a-z_]{3,}\b", source)).items() if count >= 2]
    names = [n for n in names if n not in NOT_RENAMED]
    if not names:
        return None
    old = rng.choice(names)
    new = rng.choice(["value", "item", "result", "entry", "other", "target", "current", old + "_", "new_" + old])
    asked = rng.choice([f"Rename `{old}` to `{new}`:", f"Replace `{old}` by `{new}` in this code:"])
    return chat(f"{asked}\n```python\n{source.rstrip()}\n```", re.sub(rf"\b{old}\b", new, source))


def samples(text: str, rng: random.Random) -> Iterator[str]:
    """All samples of one file. Half of the pieces are fill-in-the-middle; functions add chat and edit samples."""
    if rng.random() < 0.5:
        for piece in pieces(text, rng, 1200, 3400):
            yield fill_in_the_middle(piece, rng)
    else:
        for piece in pieces(text, rng, 6000, 14000):
            yield piece + (END if text.endswith(piece) else "")
    for name, doc, source in functions(text):
        draw = rng.random()
        if len(doc) > 20 and draw < 0.35:
            yield chat(f"Write a Python function `{name}`: {doc}", source)
        elif draw > 0.85 and len(source) < 1500 and (sample := edit(source, rng)):
            yield sample


def choose(texts: dict[str, list[str]], tokens: int, rng: random.Random) -> list[str]:
    """Shuffled files for a stream of `tokens`; no package exceeds its share."""
    limit = int(SHARE_OF_ONE_PACKAGE * tokens * 2.6)
    files: list[str] = []
    for _, own in sorted(texts.items()):
        rng.shuffle(own)
        total = 0
        for text in own:
            total += len(text)
            if total > limit:
                break
            files.append(text)
    rng.shuffle(files)
    return files


def encode(tokenizer: Tokenizer, texts: list[str], wanted: int) -> np.ndarray:
    """Token ids of `texts` in order, uint16, until there are `wanted` or slightly more, or the texts end."""
    ids: list[np.ndarray] = []
    count = 0
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.encode_batch(texts[start : start + 512]):
            ids.append(np.array(encoding.ids, dtype="<u2"))
            count += len(encoding.ids)
        if count >= wanted:
            break
    return np.concatenate(ids)


def load_tokenizer(path: Path, files: list[str], keep: bool) -> Tokenizer:
    """Return the tokenizer at `path` with `keep`, else one trained on a part of `files` and saved there."""
    from tokenizers import Tokenizer

    if keep:
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(files[:: max(1, len(files) // 4000)])
    tokenizer.save(str(path))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--site", type=Path, action="append", default=[Path(sysconfig.get_paths()["purelib"])])
    parser.add_argument("--tokens", type=int, default=26_000_000, help="length of the training stream")
    parser.add_argument(
        "--keep-tokenizer", action="store_true", help="use the work folder's tokenizer.json instead of training one"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rng = random.Random(20240611)

    texts, held_out = collect(args.site)
    sizes = {name: sum(map(len, files)) for name, files in texts.items()}
    print(dict(sorted(sizes.items(), key=lambda kv: -kv[1])[:40]), sum(sizes.values()), file=sys.stderr)
    files = choose(texts, args.tokens, rng)
    tokenizer = load_tokenizer(args.work / "tokenizer.json", files, args.keep_tokenizer)

    all_samples = [sample for text in files for sample in samples(text, rng)]
    rng.shuffle(all_samples)
    print(len(all_samples), "samples", file=sys.stderr, flush=True)
    kinds = Counter(
        "fim" if s.startswith("<|fim") else "chat" if s.startswith("<|im") else "plain" for s in all_samples
    )
    ids = encode(tokenizer, all_samples, args.tokens)
    ids[: args.tokens].tofile(args.work / "train.bin")
    held = encode(tokenizer, [text + END for text in held_out.values()], sys.maxsize)
    held.tofile(args.work / "held_out.bin")
    report = {
        "python": sys.version.split()[0], "files": len(files), "characters": sum(map(len, files)),
        "packages": {name: sizes[name] for name in sorted(sizes)}, "samples": dict(kinds),
        "tokens": min(len(ids), args.tokens), "available_tokens": len(ids), "held_out_tokens": len(held),
        "held_out_characters": sum(map(len, held_out.values())),
    }  # fmt: skip
    (args.work / "prepare.json").write_text(json.dumps(report, indent=1))
    print(json.dumps({k: v for k, v in report.items() if k != "packages"}))


if __name__ == "__main__":
    main()
