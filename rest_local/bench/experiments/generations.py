"""Answers that a model of this machine gives now, as a replay takes them: prompts are beginnings of Python modules.

The demo model never saw the held-out modules; its training repeated the well-known ones. Each answer is plain decoding,
greedy unless that loops (`bench.demo.choose_sampling`), and a unit of the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rest_local.bench.demo import choose_sampling, run
from rest_local.bench.experiments.inputs import Inputs
from rest_local.bench.prompts import Prompt, begin_of, held_out_modules, standard_library, well_known_modules
from rest_local.bench.recorded import Recorded
from rest_local.bench.results import Journal

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine

CONTEXT = 1024
PROMPT = 900  # characters before the function that the model goes on with, and at most as many again


def module_prompts(kind: str) -> Iterator[Prompt]:
    """The beginnings of modules: "unseen" (held out) or "stored" (in the datastore of installed sources)."""
    library = standard_library()
    for name in held_out_modules() if kind == "unseen" else well_known_modules():
        path = library / name
        if path.is_file():
            yield Prompt(kind, name, begin_of(path.read_text("utf-8"), PROMPT)[-1600:])


def generate(inputs: Inputs, journal: Journal, kind: str, number: int, tokens: int) -> list[Recorded]:
    """The answers to `number` prompts of a kind, of `tokens` tokens at most. Raises the errors of `Engine`."""
    prompts = list(module_prompts(kind))[:number]
    missing = [prompt for prompt in prompts if _unit(prompt) not in journal]
    if missing:
        from rest_local.decoding.engine import Engine

        with Engine.load(inputs.model_path, datastores=[], n_ctx=CONTEXT, policy="off", threads=1) as engine:
            for prompt in missing:
                journal.put(_unit(prompt), _answer(engine, prompt, tokens))
                inputs.tell(f"generated: {kind} {prompt.title}")
    found = [(prompt.title, journal[_unit(prompt)]) for prompt in prompts]
    return [Recorded(title, unit["prompt"], unit["answer"]) for title, unit in found]


def _unit(prompt: Prompt) -> str:
    return f"generated/{prompt.kind}/{prompt.title}"


def _answer(engine: Engine, prompt: Prompt, tokens: int) -> dict[str, object]:
    sampling = choose_sampling(engine, prompt, tokens)
    result = run(engine, prompt, "plain", sampling, tokens)
    ids = engine.model.vocabulary.tokenize(prompt.text, special=False).tolist()
    return {"prompt": ids, "answer": list(result.tokens), "sampled": not sampling.is_greedy}
