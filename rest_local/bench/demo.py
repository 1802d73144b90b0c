"""The demo: its prompts, its datastore, and the measurement, plain and drafted runs of one prompt on one engine.

Prompts are real source files, cut at the start of a function or to be edited. The held-out modules are neither in the
demo model's training nor in the demo's datastore, which is the running interpreter's standard library without them and
without tests. Its name is `demo-stdlib-` and the beginning of the vocabulary's hash, and its recipe marks it as the
demo's. A datastore of that name without this mark belongs to the user and is left alone.

- The first pair of runs is shown and warms the caches; showing text takes time on the same cores. The later pairs are
  timed and run silently. Where the first pair took longer than all may take, it is the one that counts.
- The speed-up is the median of the ratios within pairs.
- If greedy decoding loops, both sides sample with the same seed, so that they make the same draws. A small model that
  loops flatters every drafter, so each output states how much of it repeats.
"""

from __future__ import annotations

import keyword
import math
import platform
import re
import shutil
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from rest_local.errors import DatastoreCorrupt, DatastoreNotFound, DatastoreUnwritable, OptionError
from rest_local.llama.model import Model
from rest_local.llama.options import Sampling
from rest_local.paths import demo_model
from rest_local.retrieval.building.indexing import build_datastore, recipe_of
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.home import datastore_path
from rest_local.retrieval.sources.walk import Walk

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Piece, Result

SOURCE_FILES = (".py", ".js", ".ts", ".go", ".rs", ".c", ".cc", ".cpp", ".h", ".java", ".rb", ".kt", ".swift", ".cs")


@dataclass(frozen=True)
class Prompt:
    """One prompt. `kind` says where its answer can be drafted from: "unseen" (nowhere), "stored" (the datastore),
    "copy" (the prompt) or "edit" (the prompt and `prediction`). `chat`: the text is a question for the model's chat
    template. `answer`: what a player writes after `tokens`, which are the prompt then.
    """

    kind: str
    title: str
    text: str
    chat: bool = False
    prediction: str = ""
    tokens: Sequence[int] = ()
    answer: Sequence[int] = ()


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_modules() -> tuple[str, ...]:
    """The modules that the demo model never saw, paths relative to the standard library. Raises OptionError."""
    return _listed("held_out.txt")


def well_known_modules() -> tuple[str, ...]:
    """The modules that its training repeats, so that it has memorised them. Raises OptionError."""
    return _listed("well_known.txt")


def _listed(name: str) -> tuple[str, ...]:
    package = Path(__file__).resolve().parent.parent
    for path in (package / "data" / name, package.parent / "models" / name):
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            return tuple(line for line in lines if line and not line.startswith("#"))
    raise OptionError(f"{package}: the list of modules {name} is missing; install rest-local again")


def begin_of(text: str, characters: int) -> str:
    """`text` up to and including the first one-line `def` that starts at or after `characters`."""
    at = 0
    for line in text.splitlines(keepends=True):
        begins = at >= characters and line.lstrip().startswith("def ") and line.rstrip().endswith(":")
        at += len(line)
        if begins:
            return text[:at]
    return text[:characters]


def window(text: str, landmark: str, characters: int) -> str:
    """About `characters` of `text` from the line that starts with `landmark`, or from the top if no line does."""
    at = 0 if text.startswith(landmark) else text.find(f"\n{landmark}") + 1
    return begin_of(text[at:], characters)


def functions_in(text: str, most: int) -> Iterator[str]:
    """The functions and methods of 400 to `most` characters, with their indentation."""
    for found in re.finditer(r"(?m)^( *)def .*\n(?:(?:\1 +.*)?\n)+", text):
        if 400 <= len(found.group()) <= most:
            yield found.group().rstrip() + "\n"


def unseen_prompt(chat: bool) -> Prompt:
    """A prompt whose answer cannot be looked up: a held-out module or, with `chat`, a story. Raises OSError."""
    if chat:
        return Prompt("unseen", "a short story", "Write a story of 200 words about a lighthouse keeper.", chat=True)
    text = (standard_library() / "csv.py").read_text(encoding="utf-8")
    return Prompt("unseen", "csv.py", window(text, "class DictReader", 700))


def copy_prompt(code: Path | None) -> Prompt:
    """For a model that follows no instructions: a function of the folder `code`, else of the standard library, and the
    first line of a changed copy of it. Without a function in Python, the beginning of a file.

    Raises OptionError if the folder holds no source file, and OSError.
    """
    path, text = _file_of(code)
    text = text if code else window(text, "    def put(", 2000)
    for function in functions_in(text, 1500):
        name = re.match(r" *def (\w+)\(.*\):\n", function)
        if name and not name[1].startswith("__"):
            begun = name[0].replace(name[1], f"{name[1]}_all", 1)
            return Prompt("edit", f"{path.name}, {name[1]} changed", f"{function}\n{begun}")
    return Prompt("stored", path.name, begin_of(text, 800)[-1600:])


def edit_prompt(code: Path | None) -> Prompt:
    """A request to rename the most common name of a file, with the file as prediction. Raises OptionError, OSError."""
    path, text, name = _renamed(code)
    return Prompt("edit", f"{path.name}, one name changed", _request(name, text), chat=True, prediction=text)


def _renamed(code: Path | None) -> tuple[Path, str, str]:
    """A file, the text of it that is edited, and the name in it that is changed."""
    path, text = _file_of(code)
    text = begin_of(text, 2000) if code else window(text, "class Queue", 2000)
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", text))
    name = next((name for name, _ in names.most_common() if not keyword.iskeyword(name) and name != "self"), "name")
    return path, text, name


def _request(name: str, text: str) -> str:
    return f"Rename `{name}` to `new_{name}` in this file. Answer with the whole file and nothing else.\n\n{text}"


def written(folder: Path, code: Path | None, max_tokens: int) -> tuple[Path, list[Prompt]]:
    """A player at the pace of a model of 1B in `folder`, and its prompts: an edit of a file, which `edit_prompt`
    chooses, and a module that is stored nowhere. It answers each with up to `max_tokens` tokens.

    3 s and 600 MB of disk. Raises OptionError, also where the disk has no room for it, and OSError.
    """
    from rest_local.bench import player

    width, layers = PLAYER
    needed = 7 * layers * width * width + 2**25  # bytes; Q4_0 has 18 for 32 weights
    if shutil.disk_usage(folder).free < needed:
        raise OptionError(f"{folder.parent}: no room for {needed / 1e6:.0f} MB; TMPDIR names another folder")
    max_tokens = min(max_tokens, width // 4)
    (file, text, name), unseen = _renamed(code), unseen_prompt(chat=False)
    with Model.open(demo_model(), vocab_only=True) as model:
        piece, tokenize = model.vocabulary.piece, model.vocabulary.tokenize
        text = b"".join(map(piece, tokenize(text)[: width // 4].tolist())).decode("utf-8", "replace")
        edited = tokenize(re.sub(rf"\b{name}\b", f"new_{name}", text))[:max_tokens].tolist()
        question = tokenize(f"{_request(name, text)}\n").tolist()
        module = tokenize((standard_library() / unseen.title).read_text(encoding="utf-8")).tolist()
    begin = max(len(question) + len(edited), width // 4)  # the texts of a player follow one another
    prompts = [
        Prompt("edit", f"{file.name}, one name changed", "", prediction=text, tokens=question, answer=edited),
        Prompt(unseen.kind, unseen.title, "", tokens=module[:begin], answer=module[begin : begin + max_tokens]),
    ]
    path = player.write(demo_model(), folder / "player.gguf", width=width, layers=layers)
    player.play(path, *((prompt.tokens, prompt.answer) for prompt in prompts))
    return path, prompts


def _file_of(code: Path | None) -> tuple[Path, str]:
    """`code`, or the file in it nearest to 6 000 bytes, else `queue.py`; and its text. Raises OptionError, OSError."""
    if code is None or code.is_file():
        path = code or standard_library() / "queue.py"
        return path, path.read_text(encoding="utf-8", errors="replace")
    files = [path for path in sorted(code.rglob("*")) if path.suffix in SOURCE_FILES and path.is_file()]
    sizes = {path: path.stat().st_size for path in files if not any(part.startswith(".") for part in path.parts[-3:])}
    if not sizes:
        raise OptionError(f"--code {code}: holds no source file ({', '.join(SOURCE_FILES)})")
    path = min(sizes, key=lambda path: abs(sizes[path] - 6000))
    return path, path.read_text(encoding="utf-8", errors="replace")


KIND = "demo"
LEFT_OUT = ("test/", "tests/", "idle_test/", "site-packages/", "dist-packages/")


def ensure(model: Path, report: Callable[[str], None] = lambda line: None) -> Path:
    """The datastore's path; models with the same vocabulary share it. Builds it within seconds, unless it exists for
    this vocabulary and interpreter.

    Raises ModelError, DatastoreVersion, DatastoreLocked, and DatastoreUnwritable, also if the demo did not make the
    datastore of that name.
    """
    library, (include, exclude) = standard_library(), filters()
    marked = {"kind": KIND, "python": platform.python_version()}
    walk = Walk((str(library),), include=include, exclude=exclude)
    wanted = {**recipe_of([walk.prepared()]), **marked}
    with Model.open(model, vocab_only=True) as opened:
        vocabulary = opened.vocabulary
        path = datastore_path(f"demo-stdlib-{vocabulary.hash[:12]}")
        try:
            with Datastore.open(path) as store:
                manifest = store.manifest
        except (DatastoreNotFound, DatastoreCorrupt):  # the name is the demo's own, so it may build it again
            pass
        else:
            if manifest.recipe.get("kind") != KIND:
                cause = "it is not the demo's, which would overwrite it; move it to another name"
                raise DatastoreUnwritable(path, cause)
            if manifest.vocabulary.hash == vocabulary.hash and dict(manifest.recipe) == wanted:
                return path
        begun = time.perf_counter()
        built = build_datastore(path, [library], vocabulary=vocabulary, include=include, exclude=exclude, recipe=marked)
    report(f"datastore {path.name}: {built.tokens:,} tokens of {library} in {time.perf_counter() - begun:.1f} s")
    return path


def filters() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns of files to include and to exclude."""
    return ("*.py",), (*LEFT_OUT, *(f"/{module}" for module in held_out_modules()))


PLAYER = (2048, 20)  # width and layers: 1.0B parameters, the pace of such a model
SIDES = ("plain", "drafted")
CONTEXT = 2048
SEED = 1
TEMPERATURE = 0.8
LOOPING = 0.3  # share of repeated n-grams from which on greedy decoding loops, and the demo samples instead
NGRAM = 8
DISTURBED = 1.3  # times the slowest of the plain runs; on a quiet machine they differ by 1 to 5%


class Display(Protocol):
    """Shows the first pair of runs."""

    def begin(self, prompt: Prompt, mode: str) -> None: ...

    def piece(self, side: str, piece: Piece) -> None: ...


@dataclass(frozen=True)
class Side:
    """The timed runs of one side: the last result, and tokens per second of each."""

    result: Result
    speeds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return median(self.speeds)

    def to_json(self) -> dict[str, Any]:
        draft = self.result.draft.to_dict()
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "runs": [round(speed, 2) for speed in self.speeds],  # how noisy the machine was
            **{name: draft[name] for name in ("mat", "accepted", "drafted", "by_source")},
            "n_tokens": len(self.result.tokens),
            "repeated_8grams": round(repeated_share(self.result.tokens), 4),
        }


@dataclass(frozen=True)
class Comparison:
    """One prompt in one mode ("exact" or "fast"). `identical`: all runs of both sides give the same tokens."""

    prompt: Prompt
    mode: str
    sampled: bool
    plain: Side
    drafted: Side
    identical: bool
    speedup: float

    @property
    def disturbed(self) -> bool:
        """Whether plain runs of the same tokens differ so much that other programs must have run."""
        return max(self.plain.speeds) > DISTURBED * min(self.plain.speeds)

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt.kind,
            "title": self.prompt.title,
            "mode": self.mode,
            "sampling": f"temperature {TEMPERATURE}, seed {SEED}" if self.sampled else "greedy",
            "identical": self.identical,
            "speedup": round(self.speedup, 3),
            "plain": self.plain.to_json(),
            "drafted": self.drafted.to_json(),
        }


def compare(
    engine: Engine,
    prompt: Prompt,
    mode: str,
    *,
    max_tokens: int,
    repeats: int,
    display: Display | None = None,
    seconds: float = math.inf,
) -> Comparison:
    """Measure a prompt by up to `2 * repeats + 3` runs; after `seconds` no pair begins. Raises as `Engine.generate`."""
    over = time.perf_counter() + seconds
    sampling = Sampling()
    if not prompt.answer and repeated_share(run(engine, prompt, "plain", sampling, max_tokens).tokens) > LOOPING:
        sampling = replace(sampling, temperature=TEMPERATURE, seed=SEED)
    if display is not None:
        display.begin(prompt, mode)
    shown = {side: run(engine, prompt, side, sampling, max_tokens, display) for side in SIDES}
    timed: list[dict[str, Result]] = []
    while len(timed) < repeats and time.perf_counter() < over:
        timed.append({side: run(engine, prompt, side, sampling, max_tokens) for side in SIDES})
    outputs = {tuple(pair[side].tokens) for pair in [shown, *timed] for side in SIDES}
    timed = timed or [shown]
    speeds = {side: tuple(pair[side].timings.predicted_per_second for pair in timed) for side in SIDES}
    plain, drafted = (Side(timed[-1][side], speeds[side]) for side in SIDES)
    return Comparison(
        prompt=prompt,
        mode=mode,
        sampled=not sampling.is_greedy,
        plain=plain,
        drafted=drafted,
        identical=len(outputs) == 1,
        speedup=median(fast / (slow or 1.0) for slow, fast in zip(plain.speeds, drafted.speeds, strict=True)),
    )


def run(
    engine: Engine, prompt: Prompt, side: str, sampling: Sampling, max_tokens: int, display: Display | None = None
) -> Result:
    text = engine.chat_prompt([{"role": "user", "content": prompt.text}]) if prompt.chat else prompt.text
    stream = engine.generate(
        prompt.tokens or text,
        max_tokens=max_tokens,
        sampling=sampling,
        policy="off" if side == "plain" else None,
        prediction=prompt.prediction,
    )
    for piece in stream:
        if display is not None:
            display.piece(side, piece)
    return stream.result


def to_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The output of `demo --json`: the first drafted run in the form of `generate --json`, and all comparisons."""
    first = comparisons[0]
    return {
        **first.drafted.result.to_dict(),
        "identical": first.identical,
        "speedup": round(first.speedup, 3),
        "prompts": [comparison.to_json() for comparison in comparisons],
    }


def repeated_share(tokens: Sequence[int]) -> float:
    """The share, 0 to 1, of the sequences of NGRAM tokens that occur earlier in `tokens`; 0 for too few tokens."""
    grams = list(zip(*(tokens[i:] for i in range(NGRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
