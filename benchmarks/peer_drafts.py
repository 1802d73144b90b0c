"""Drafts of llama.cpp's own driver: record them, and compare the drafters of this project with them.

    python -m benchmarks peer_drafts record FILE --server LLAMA_SERVER --target GGUF --head TYPE[=GGUF]
    python -m benchmarks peer_drafts compare FILE --target GGUF --head TYPE[=GGUF] [--json]

docs/howto/measure.md says how to build `llama-server`. TYPE is its `--spec-type`: `draft-simple`, `draft-eagle3`,
`draft-mtp`, `draft-dflash` or `draft-dspark`. Without a file, the MTP layers are those of the target's own. DFlash 2 is
recorded with LLAMA_BATCH_DEBUG=2 in the environment, because the log has its drafts only as batches of the target.

`record` completes PROMPTS greedily and writes, for every decode step, the drafted tokens with their probabilities and
the accepted length. It reads them from the server's debug log. The prompts are stored as tokens, so a recording does
not depend on the version of Python.

`compare` goes through the same steps with the drafter of this project: it drafts a chain at each step, then accepts
what the recording accepted, whatever the drafter said. A step that differs so does not change those after it.

tests/benchmarks/test_peer_drafts.py makes the models of the recordings in tests/data/peer-drafts again. `draft-simple`
was recorded with `--tokens 64`, `draft-dflash2` with `--tokens 40`, `draft-mtp-chained`, `draft-assistant` (its type is
`draft-mtp`), `draft-dflash` and `draft-dspark`, this one with `--n-max 9`, with `--tokens 48`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.program import Binary, Server
from benchmarks.workloads import prompts
from rest_local.drafting.models.drafter import Drafter, Evaluated, Query
from rest_local.drafting.models.opening import mtp_inside, opener_of
from rest_local.errors import DecodeFailed
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

PROMPTS = (
    ("stored", "queue.py"),
    ("stored", "shlex.py"),
    ("stored", "string.py"),
    ("unseen", "fractions.py"),
    ("unseen", "shelve.py"),
    ("unseen", "uuid.py"),
)
"""Of the held-out modules those whose greedy continuations loop least: a drafter that knows a loop is flattered."""
TOKENS = 128
N_MAX = 8  # The server's default is 3 drafted tokens a step.
N_CTX = 2048
NEAR = 0.95  # A token with this share of the likeliest one's probability may be drafted instead.
START_SECONDS, LIMIT_SECONDS = 60.0, 600.0

_ARGUMENTS = (
    *("-c", str(N_CTX), "-np", "1", "-t", "1"),
    *("-fa", "off", "--swa-full", "--ctx-checkpoints", "0"),  # The contexts of this project compute so, too.
    *("--poll", "0", "--no-warmup", "--offline", "--log-colors", "off", "--host", "127.0.0.1"),
)
_CANDIDATE = re.compile(r"draft candidate +(\d+), pos +(\d+): +(\d+) \( *([\d.]+)\)")
_VERIFIED = re.compile(r"generate_draft: id=(\d+), .*#draft=(\d+),")
_BATCH_TOKEN = re.compile(r"ubatch_print: +\d+: id = +(\d+) ")
_ACCEPTED = re.compile(r"add accepted tokens: sampled=(\d+), ids\.size=(\d+), n_draft=(\d+)")


@dataclass(frozen=True)
class Drafted:
    """A drafted token and its probability among the ten likeliest, rounded to three digits.

    If the second token has at least NEAR of that probability, it is kept with its own.
    """

    token: int
    probability: float
    second: int | None = None
    second_probability: float = 0.0

    def to_json(self) -> list[Any]:
        known = [self.token, self.probability]
        return known if self.second is None else [*known, self.second, self.second_probability]


@dataclass(frozen=True)
class Step:
    """A decode step after `root`, the last token of the answer so far.

    It has the draft, the number of drafted tokens that the target accepted, and the token that the target chose then.
    """

    root: int
    draft: tuple[Drafted, ...]
    accepted: int
    following: int

    @property
    def tokens(self) -> list[int]:
        return [drafted.token for drafted in self.draft]

    def to_json(self) -> list[Any]:
        return [self.root, self.accepted, self.following, *(drafted.to_json() for drafted in self.draft)]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Step:
        root, accepted, following, *draft = data
        return cls(root, tuple(Drafted(*row) for row in draft), accepted, following)


@dataclass(frozen=True)
class Answer:
    """The steps of one prompt. `prompt` has its tokens."""

    kind: str
    module: str
    prompt: tuple[int, ...]
    steps: tuple[Step, ...]

    def to_json(self) -> dict[str, Any]:
        steps = [step.to_json() for step in self.steps]
        return {"kind": self.kind, "module": self.module, "prompt": list(self.prompt), "steps": steps}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answer:
        steps = tuple(Step.from_json(step) for step in data["steps"])
        return cls(data["kind"], data["module"], tuple(data["prompt"]), steps)


@dataclass(frozen=True)
class Recording:
    """The drafts of a server of version `server`. `target` and `head` are SHA-256 of the files.

    `head` is None if the target's own file has it.
    """

    server: str
    type: str
    n_max: int
    arguments: tuple[str, ...]
    target: str
    head: str | None
    answers: tuple[Answer, ...]

    def write(self, path: Path) -> None:
        """Write one line of JSON for every step, so that two recordings can be compared as text."""
        about = {name: value for name, value in vars(self).items() if name != "answers"}
        lines = [json.dumps(about)]
        for answer in self.answers:
            data = answer.to_json()
            steps = data.pop("steps")
            lines += [json.dumps({**data, "n_steps": len(steps)}), *(json.dumps(step) for step in steps)]
        path.write_text("".join(line + "\n" for line in lines), "ascii")

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a recording. Raises ValueError, KeyError or OSError if the file is none."""
        first, *lines = (json.loads(line) for line in path.read_text("ascii").splitlines())
        answers = []
        while lines:
            about, n = lines[0], lines[0]["n_steps"]
            answers.append(Answer.from_json({**about, "steps": lines[1 : 1 + n]}))
            if len(answers[-1].steps) != n:
                raise ValueError(f"recording {path}: cut off; record it again")
            del lines[: 1 + n]
        return cls(**{**first, "arguments": tuple(first["arguments"])}, answers=tuple(answers))


def serving(binary: Path, target: Path, arguments: Iterable[str]) -> Server:
    """Start a server to complete prompts with, and keep all of its log."""
    return Server([str(binary), "-m", str(target), *_ARGUMENTS, *arguments])


def complete(server: Server, prompt: Sequence[int], n_tokens: int) -> dict[str, Any]:
    """Return the server's answer to a greedy completion."""
    body = {
        "prompt": list(prompt),
        "n_predict": n_tokens,
        "temperature": 0,
        "return_tokens": True,
        "cache_prompt": False,
    }
    return server.post("/completion", body, LIMIT_SECONDS)[0]


def read_log(log: str) -> tuple[Step, ...]:
    """Return the steps of the one request of a debug log, without the steps that have no draft.

    The log names up to three candidates for each drafted token, before the line of the verification, or the tokens of
    the batch after that line. A chain that exceeds the rest of the answer is verified in part, so the remaining
    candidates are dropped here too.
    """
    steps: list[Step] = []
    candidates: list[list[tuple[int, float]]] = []
    verified: list[int] = []
    root, n_draft = -1, 0
    for line in log.splitlines():
        if found := _CANDIDATE.search(line):
            rank, at = int(found[1]), int(found[2])
            if rank == 0:
                del candidates[at:]
                candidates.append([])
            candidates[at].append((int(found[3]), float(found[4])))
        elif found := _VERIFIED.search(line):
            root, n_draft = int(found[1]), int(found[2])
            verified.clear()
        elif found := _BATCH_TOKEN.search(line):
            verified.append(int(found[1]))
        elif found := _ACCEPTED.search(line):
            if not candidates and verified[:1] == [root]:
                candidates = [[(token, 1.0), (token, 0.0)] for token in verified[1 : 1 + n_draft]]
            if n_draft != int(found[3]) or n_draft > len(candidates):
                raise ValueError(f"log: {len(candidates)} candidates of {n_draft} drafted tokens at: {line}")
            draft = tuple(_drafted(*likely[:2]) for likely in candidates[:n_draft])
            if verified:
                candidates = []
            steps.append(Step(root, draft, int(found[2]) - 1, int(found[1])))
    return tuple(steps)


def _drafted(first: tuple[int, float], second: tuple[int, float]) -> Drafted:
    return Drafted(*first, *second) if second[1] >= NEAR * first[1] else Drafted(*first)


def check(steps: Sequence[Step], answer: Sequence[int]) -> None:
    """Raise ValueError if the steps do not make the answer that the server returned."""
    made: list[int] = []
    for at, step in enumerate(steps):
        if at and step.root != steps[at - 1].following:
            raise ValueError(f"log: step {at} begins with token {step.root}, not {steps[at - 1].following}")
        made += [step.root, *step.tokens[: step.accepted]]
    n = min(len(made), len(answer))
    if made[:n] != list(answer)[:n] or not len(answer) - 2 <= len(made) <= len(answer) + 1:
        raise ValueError(f"log: {len(made)} tokens differ from the {len(answer)} of the answer")


def prompt_tokens(target: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Yield (kind, module, tokens) of PROMPTS. Raises SystemExit if the interpreter lacks one of the modules."""
    texts = {(prompt.kind, prompt.title): prompt.text for prompt in prompts()}
    with Model.open(target, vocab_only=True) as model:
        for kind, module in PROMPTS:
            if (kind, module) not in texts:
                raise SystemExit(f"{module}: this Python does not have it")
            yield kind, module, [int(token) for token in model.vocabulary.tokenize(texts[kind, module])]


def drafting(kind: str, n_max: int, head: Path | None) -> list[str]:
    """Return the server's arguments for a drafter."""
    model = ["-md", str(head)] if head else []
    return ["--spec-type", kind, "--spec-draft-n-max", str(n_max), "--spec-draft-p-min", "0", *model]


def record(binary: Path, target: Path, head: Path | None, kind: str, n_max: int, n_tokens: int) -> Recording:
    """Complete PROMPTS, each with a server of its own: the driver of MTP layers pairs the first token of a prompt with
    the last hidden state of the request before it. Takes a minute. Raises ValueError if the log does not say the steps.
    """
    server_version, answers = Binary.of(binary).version, []
    for group, module, tokens in prompt_tokens(target):
        with serving(binary, target, [*drafting(kind, n_max, head), "-lv", "5"]) as server:
            server.start(START_SECONDS)
            answer = complete(server, tokens, n_tokens)["tokens"]
        steps = read_log(server.output)
        check(steps, answer)
        answers.append(Answer(group, module, tuple(tokens), steps))
    return Recording(
        server_version, kind, n_max, _ARGUMENTS, digest(target), digest(head) if head else None, tuple(answers)
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


Choice = list[int]
"""The likeliest token, and those that have at least NEAR of its probability."""


class Chain(Protocol):
    """A target and its drafter, as `follow` uses them."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Evaluate a prompt from its first token on."""

    def draft(self, root: int, n_max: int) -> list[tuple[int, float]]:
        """Greedily draft `n_max` tokens after `root`, which follows what was accepted: tokens and probabilities."""

    def verify(self, root: int, tokens: Sequence[int]) -> list[Choice]:
        """Evaluate `root` and a draft. Returns the target's choice after each of them."""

    def accept(self, n: int) -> None:
        """Keep the root and the first `n` tokens of the verified draft."""


@dataclass(frozen=True)
class Difference:
    """The first difference in a step, at position `at` of the draft. `ours` is None if this project's draft is shorter.

    `near` means that the server's probability of our token is at least NEAR of that of its own.
    """

    step: int
    at: int
    theirs: Drafted
    ours: int | None
    our_probability: float
    near: bool


@dataclass(frozen=True)
class Followed:
    """An answer compared step by step: the differences of drafts, and by step the different choices of the target.

    `choices` says whether the server's choice is as likely as NEAR says.
    """

    answer: Answer
    drafts: tuple[Difference, ...]
    choices: dict[int, bool]


def follow(answer: Answer, chain: Chain) -> Followed:
    """Go through the steps of a recording. Each is drafted and verified on its own, from what the server had accepted
    before. The server's draft is verified, so that the target's batches are the same.
    """
    differences: list[Difference] = []
    choices: dict[int, bool] = {}
    chain.begin(answer.prompt)
    for number, step in enumerate(answer.steps):
        ours = chain.draft(step.root, len(step.draft))
        if found := difference(number, step, ours):
            differences.append(found)
        theirs = [*step.tokens[: step.accepted], step.following]
        for token, choice in zip(theirs, chain.verify(step.root, step.tokens), strict=False):
            if token != choice[0]:
                choices[number] = choices.get(number, True) and token in choice
        chain.accept(step.accepted)
    return Followed(answer, tuple(differences), choices)


def difference(number: int, step: Step, ours: Sequence[tuple[int, float]]) -> Difference | None:
    """Return the first difference between the server's draft of a step and ours."""
    for at, theirs in enumerate(step.draft):
        token, probability = ours[at] if at < len(ours) else (None, 0.0)
        if token != theirs.token:
            return Difference(number, at, theirs, token, probability, token is not None and token == theirs.second)
    return None


def compare(recording: Recording, target: Path, head: Path | None) -> list[Followed]:
    """Follow all answers of a recording. Raises SystemExit if it was made with other files."""
    if (recording.target, recording.head) != (digest(target), digest(head) if head else None):
        raise SystemExit(f"{target.name}: not the model of the recording, or its head is another; record again")
    with opened(target, head) as chain:
        return [follow(answer, chain) for answer in recording.answers]


@contextmanager
def opened(target: Path, head: Path | None) -> Iterator[Drafting]:
    """Open a target and the drafter in the file `head`, or with None the MTP layers in the target's own file."""
    with ExitStack() as stack:
        model = stack.enter_context(Model.open(target, n_gpu_layers=0, mtp=head is None))
        verifier = stack.enter_context(closing(Target(model)))
        opener = mtp_inside(model) if head is None else opener_of(head, model, N_CTX, 1, 1, 0)
        drafter = opener(verifier.context)
        assert drafter is not None
        yield Drafting(verifier, stack.enter_context(closing(drafter)))


class Drafting:
    """The `Chain` of a target and one of this project's drafters."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self._target, self._drafter, self._text = target, drafter, drafter.text()
        self._tokens: list[int] = []
        self._verified: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        """See `Chain`."""
        self._tokens = list(prompt)
        self._text.restart(self._tokens, 0)
        self._text.rewind(0)
        for start, part in self._target.begin(prompt):
            self._drafter.observe([Evaluated(self._text, start, part, range(len(part)))])

    def draft(self, root: int, n_max: int) -> list[tuple[int, float]]:
        """See `Chain`."""
        drafted: list[tuple[int, float]] = []
        self._tokens.append(root)
        self._text.begin_step()
        while not self._text.caught_up(math.inf):
            pass
        while len(drafted) < n_max:
            (likely,) = self._drafter.answer([Query(self._text, tuple(token for token, _ in drafted))])
            drafted += likely[:1]
            if not likely:
                break
        return drafted

    def verify(self, root: int, tokens: Sequence[int]) -> list[Choice]:
        """See `Chain`."""
        self._verified = [root, *tokens]
        return self._target.verify(root, tokens)

    def accept(self, n: int) -> None:
        """See `Chain`."""
        kept = self._verified[: 1 + n]
        self._drafter.observe([Evaluated(self._text, len(self._tokens) - 1, kept, range(len(kept)))])
        self._tokens += kept[1:]
        self._target.accept(n)


class Target:
    """A target that verifies chains, in a context with the settings of the server's."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.context = Context(model, ContextSettings(n_ctx=N_CTX, n_branches=1, n_rs_seq=16, threads=1))
        self._at = 0

    def begin(self, prompt: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Evaluate a prompt from its first token on. Yields each part after its batch, with its position."""
        self.context.clear()
        self._at = 0
        while self._at < len(prompt):
            part = prompt[self._at : self._at + self.context.n_batch]
            self._decode(part, [0] * (len(part) - 1) + [1])
            yield self._at, part
            self._at += len(part)

    def verify(self, root: int, tokens: Sequence[int]) -> list[Choice]:
        """See `Chain`."""
        self._decode([root, *tokens], [1] * (1 + len(tokens)))
        return [_choice(row) for row in self.context.logits(1 + len(tokens))]

    def accept(self, n: int) -> None:
        """See `Chain`."""
        self._at += 1 + n
        self.context.remove(0, self._at)

    def _decode(self, tokens: Sequence[int], output: list[int]) -> None:
        self.context.batch.fill(tokens, np.arange(self._at, self._at + len(tokens)), 0, 1, output)
        if code := self.context.decode():
            raise DecodeFailed(code, len(tokens))

    def close(self) -> None:
        """Free the context. A second call does nothing."""
        self.context.close()


def _choice(logits: NDArray[np.float32]) -> Choice:
    near = np.flatnonzero(logits >= logits.max() + math.log(NEAR))
    return [int(token) for token in near[np.argsort(-logits[near], kind="stable")]]


def report(followed: Sequence[Followed]) -> Iterator[str]:
    """Yield a line for each answer, and one for each difference."""
    for each in followed:
        answer = each.answer
        n, near = len(answer.steps), sum(found.near for found in each.drafts)
        yield (
            f"{answer.kind:7} {answer.module:14} {n:4} steps  the same drafts {1 - len(each.drafts) / n:6.1%}  "
            f"the same accepted lengths {1 - len(each.choices) / n:6.1%}  near-ties {near} of {len(each.drafts)}"
        )
        for found in each.drafts:
            theirs = found.theirs
            second = f", then {theirs.second} at {theirs.second_probability}" if theirs.second is not None else ""
            yield (
                f"  step {found.step}, token {found.at}: theirs {theirs.token} at {theirs.probability}{second}; "
                f"ours {found.ours} at {found.our_probability:.3f}"
            )


def summary(followed: Sequence[Followed]) -> dict[str, Any]:
    """Return the line of JSON."""
    steps = sum(len(each.answer.steps) for each in followed)
    drafts = [found for each in followed for found in each.drafts]
    accepted = sum(step.accepted for each in followed for step in each.answer.steps)
    return {
        "steps": steps,
        "drafted": sum(len(step.draft) for each in followed for step in each.answer.steps),
        "mat": round(1 + accepted / steps, 3),
        "different_drafts": len(drafts),
        "near_ties": sum(found.near for found in drafts),
        "different_accepted_lengths": sum(len(each.choices) for each in followed),
        "of_near_ties": sum(sum(each.choices.values()) for each in followed),
    }


def head_of(argument: str) -> tuple[str, Path | None]:
    """TYPE or TYPE=GGUF."""
    kind, _, path = argument.partition("=")
    return kind, Path(path) if path else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="the recording")
    parser.add_argument("--server", type=Path, help="llama-server")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument(
        "--head", type=head_of, required=True, metavar="TYPE[=GGUF]",
        help="the server's --spec-type, and the file of the head; without a file, the target has it",
    )  # fmt: skip
    parser.add_argument("--n-max", type=int, default=N_MAX, help="drafted tokens of a step")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    if (args.command == "record") != (args.server is not None):
        parser.error("only record needs --server")
    kind, head = args.head
    if args.command == "record":
        record(args.server, args.target, head, kind, args.n_max, args.tokens).write(args.file)
        result = {"recorded": args.file.name}
    else:
        followed = compare(Recording.read(args.file), args.target, head)
        if not args.json:
            print("\n".join(report(followed)))
        result = summary(followed)
    print(json.dumps(result))
