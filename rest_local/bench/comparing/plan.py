"""From a choice to stages: which tasks there are, which sides they run on, and what is left out and why.

- "fast": all sides in the default settings, one request at a time.
- "batch": the sides that decode requests together.
- "exact": plain decoding and the policies in settings in which a draft changes no bit, for the claim that the output is
  identical; fewer prompts.
- "replay": recorded answers on a model that pays for the forward passes.

Tasks over the context are left out and counted, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rest_local.bench import prompts
from rest_local.bench.comparing import code_tasks, question_tasks
from rest_local.bench.comparing.choice import DATA, Choice, wants
from rest_local.bench.comparing.engine_sides import EngineSide, SharedEngine, policy_sides
from rest_local.bench.comparing.prompt_lookup import PromptLookupSide
from rest_local.bench.comparing.prompting import Prompting, spread
from rest_local.bench.comparing.replay_sides import PayingModel, replay_sides, tasks_of
from rest_local.bench.comparing.run import Stage, Unit, single
from rest_local.bench.comparing.sides import Side, Task
from rest_local.bench.recorded import Recorded, load
from rest_local.bench.workload import Workload, load_edits
from rest_local.decoding.config import NO_DRAFT_MODEL, EngineConfig
from rest_local.drafting.models.kinds import kind_of
from rest_local.errors import CorpusEmpty, InputInvalid, OptionError
from rest_local.llama.gguf_content import content_of
from rest_local.llama.model import Model
from rest_local.retrieval.building.indexing import build_datastore

SERVER_TYPES = {"model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp"}
RECORDED = {
    "mt-bench": "mt_bench_answers_vicuna-7b-v1.5.jsonl",
    "alpaca": "alpaca_eval_outputs_llama-3-8b-instruct.jsonl",
    "humaneval": "HumanEval.jsonl.gz",
}
SETTING_OUT = "longer than the context"


@dataclass
class Plan:
    """`left_out`: {"workload", "reason", "prompts"}, with 0 prompts for a workload that was not made at all; or
    {"side", "reason"}.
    """

    stages: list[Stage] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    n_ctx: int = 0

    def leave_out(self, workload: str, reason: str, n: int = 0) -> None:
        self.left_out.append({"workload": workload, "reason": reason, "prompts": n})

    def key(self) -> dict[str, Any]:
        return {"n_ctx": self.n_ctx, **{stage.name: stage.key() for stage in self.stages}}


def make_plan(choice: Choice, stack: ExitStack, say: Callable[[str], None] = lambda line: None) -> Plan:
    """Tokenizes all prompts and builds the datastore; loads no model. What was opened is closed with `stack`. Raises
    InputInvalid, OptionError, ModelError, DatastoreError, OSError.
    """
    plan = Plan()
    if set(choice.workloads) != {name for name in choice.workloads if name.partition("/")[0] == "replay"}:
        _plan_real(plan, choice, stack, say)
    if wants(choice.workloads, "replay"):
        _plan_replay(plan, choice)
    if not any(stage.units for stage in plan.stages):
        reasons = "; ".join(f"{row.get('workload', '')}: {row['reason']}" for row in plan.left_out)
        raise OptionError(f"nothing to compare ({reasons or 'no prompts'})")
    return plan


def _plan_real(plan: Plan, choice: Choice, stack: ExitStack, say: Callable[[str], None]) -> None:
    with Prompting(choice.model) as prompting:
        completed = _sources(plan, choice)
        tasks = list(_tasks(plan, choice, prompting, completed))
        config = EngineConfig(n_ctx=choice.n_ctx)
        most = config.context_length(prompting.model.n_ctx_train or 0)
        tasks = _fitting(plan, tasks, most, choice)
        n_vocab, ends = prompting.model.n_vocab, prompting.ends()
    if not tasks:
        return
    longest = max(len(task.prompt) + task.max_tokens for task in tasks)
    plan.n_ctx = min(most, max(512, (longest + 64 + 255) // 256 * 256))
    config = EngineConfig(
        model=choice.model,
        datastores=_datastores(choice, completed, stack, say),
        n_ctx=plan.n_ctx,
        threads=choice.threads,
        n_gpu_layers=choice.n_gpu_layers,
        draft_model=NO_DRAFT_MODEL,
    )
    alone, at_once = [t for t in tasks if t.workload != "batch"], [t for t in tasks if t.workload == "batch"]
    drafters = _drafters(choice)
    layers = _gpu_layers(choice)
    lookup = PromptLookupSide(
        choice.model, n_ctx=plan.n_ctx, threads=choice.threads, n_gpu_layers=layers, n_vocab=n_vocab, ends=ends
    )
    if alone:
        ours = [*policy_sides(config), *_with_drafters(config, drafters)]
        servers = _servers(choice, drafters, plan.n_ctx, layers)
        plan.stages.append(Stage("fast", "real", "fast", [*ours, lookup, *servers], single(alone)))
    if at_once:
        slots = replace(config, slots=len(at_once))
        units = [Unit(f"{len(at_once)} requests at once", "batch", tuple(at_once))]
        sides: list[Side] = [*policy_sides(slots), *_with_drafters(slots, drafters), lookup]
        plan.stages.append(Stage("batch", "real", "fast", sides, units))
        if choice.llama_server is not None:
            plan.leave_out("batch", "llama-server is measured with one slot, so it has no figures here")
    if alone:
        few = _first_of_each(alone, choice.size.exact)
        plan.stages.append(Stage("exact", "real", "exact", policy_sides(replace(config, exact=True)), single(few)))


def _sources(plan: Plan, choice: Choice) -> list[code_tasks.Source]:
    """The files to complete."""
    if choice.git is None:
        return code_tasks.held_out()
    try:
        return code_tasks.files_of(choice.git, max(choice.size.prompts, choice.size.at_once))
    except InputInvalid as error:
        for workload in ("completion", "batch"):
            if wants(choice.workloads, workload):
                plan.leave_out(workload, str(error))
        return []


def _edits(plan: Plan, choice: Choice, prompting: Prompting, repository: Path) -> list[Task]:
    """More than are run: many do not fit the context."""
    try:
        return list(code_tasks.edits(prompting, repository, choice.size.tokens))
    except InputInvalid as error:
        plan.leave_out("edit", str(error))
        return []


def _tasks(plan: Plan, choice: Choice, prompting: Prompting, completed: Sequence[code_tasks.Source]) -> Iterable[Task]:
    """The tasks of the chosen workloads."""
    size, chosen = choice.size, choice.workloads
    few = spread(completed, size.prompts)
    if wants(chosen, "completion"):
        yield from code_tasks.completions(prompting, few, size.tokens)
    if wants(chosen, "edit"):
        if choice.git is not None:
            yield from _edits(plan, choice, prompting, choice.git)
        else:
            yield from spread(list(code_tasks.renamings(prompting, completed, size.tokens)), size.prompts)
    if wants(chosen, "chat"):
        yield from question_tasks.chat(prompting, size.prompts, size.tokens)
    if wants(chosen, "json"):
        yield from question_tasks.json_answers(prompting, size.prompts, size.tokens)
    if wants(chosen, "batch"):
        at_once = spread(completed, size.at_once)
        yield from code_tasks.together(prompting, at_once, size.tokens)
    for name in DATA:
        if wants(chosen, name):
            yield from _of_data(plan, choice, prompting, name)


def _of_data(plan: Plan, choice: Choice, prompting: Prompting, name: str) -> Iterable[Task]:
    """Tasks of a file of --data, or the reason why there are none."""
    if choice.data is None:
        plan.leave_out(name, f"its prompts are not shipped: give a folder with {DATA[name]} with --data")
        return ()
    path, size = choice.data / DATA[name], choice.size
    if not path.is_file():
        plan.leave_out(name, f"{DATA[name]} is not in {choice.data}")
        return ()
    if name == "humaneval":
        return code_tasks.humaneval(prompting, path, size.prompts, size.tokens)
    if name == "mt-bench":
        return question_tasks.mt_bench(prompting, path, size.prompts, size.tokens)
    return (
        task
        for task in question_tasks.spec_bench(prompting, path, size.by_category, size.tokens)
        if wants(choice.workloads, task.workload)
    )


def _fitting(plan: Plan, tasks: Sequence[Task], most: int, choice: Choice) -> list[Task]:
    """Without those over the context, and of the edits of a repository as many as wanted."""
    fitting, edits = [], 0
    over: dict[str, int] = {}
    for task in tasks:
        if choice.git is not None and task.workload == "edit" and edits == choice.size.prompts:
            continue
        if len(task.prompt) + task.max_tokens > most:
            over[task.workload] = over.get(task.workload, 0) + 1
            continue
        edits += task.workload == "edit"
        fitting.append(task)
    for workload, n in over.items():
        plan.leave_out(workload, f"{SETTING_OUT} of {most} tokens", n)
    return fitting


def _first_of_each(tasks: Sequence[Task], n: int) -> list[Task]:
    """`n` tasks of each workload; of Spec-Bench the first of `n` categories."""
    found: list[Task] = []
    for task in tasks:
        family = task.workload.partition("/")[0]
        known = [other for other in found if other.workload.partition("/")[0] == family]
        if len(known) < n and (family == task.workload or task.workload not in {other.workload for other in known}):
            found.append(task)
    return found


def _datastores(
    choice: Choice, completed: Sequence[code_tasks.Source], stack: ExitStack, say: Callable[[str], None]
) -> tuple[Path, ...]:
    """Of the repository without the files to complete, else of the standard library without the held-out modules. None
    where nothing is left of a repository.
    """
    if choice.git is None:
        return (prompts.ensure(choice.model, report=say),)
    folder = stack.enter_context(TemporaryDirectory(prefix="rest-local-compare-"))
    exclude = [f"/{source.name}" for source in completed]
    with Model.open(choice.model, vocab_only=True) as model:
        try:
            built = build_datastore(
                Path(folder) / "repository", [choice.git], vocabulary=model.vocabulary, exclude=exclude
            )
        except CorpusEmpty:
            say(f"no datastore: {choice.git} holds no text besides the files to complete")
            return ()
    say(f"datastore of {choice.git}: {built.tokens:,} tokens, without the {len(exclude)} files to complete")
    return (built.path,)


Drafters = dict[str, Path | None]
"""By the name that follows "auto + ": the file, None for the MTP layers in the model's own file."""


def _drafters(choice: Choice) -> Drafters:
    found: Drafters = {path.stem: path for path in choice.draft_models}
    if content_of(choice.model).has_mtp:
        found["own MTP layers"] = None
    return found


def _with_drafters(config: EngineConfig, drafters: Drafters) -> list[EngineSide]:
    """Each on an engine of its own."""
    return [
        EngineSide(f"auto + {name}", "auto", SharedEngine(replace(config, draft_model=path)))
        for name, path in drafters.items()
    ]


def _servers(choice: Choice, drafters: Drafters, n_ctx: int, layers: int) -> list[Side]:
    if choice.llama_server is None:
        return []
    from rest_local.bench.comparing.llama_server import sides_of

    heads: dict[str, Path | None] = {}
    for path in drafters.values():
        heads[SERVER_TYPES["mtp" if path is None else kind_of(path)]] = path
    arguments = ("-ngl", str(layers)) if layers else ()
    return sides_of(choice.llama_server, choice.model, heads, choice.threads, n_ctx, arguments=arguments)


def _gpu_layers(choice: Choice) -> int:
    """For peers, which do not choose: all layers where llama.cpp was built for a GPU, unless the choice says."""
    from rest_local.llama.library import supports_gpu

    if choice.n_gpu_layers is not None:
        return choice.n_gpu_layers
    return -1 if supports_gpu() else 0


def _plan_replay(plan: Plan, choice: Choice) -> None:
    """Recorded answers of --replay, of --data, and the edits of --git. The answers that are not tested are the earlier
    answers of all sides.
    """
    files = {path.name.partition(".")[0]: path for path in choice.replay}
    if not choice.replay and choice.data is not None:
        files = {name: choice.data / file for name, file in RECORDED.items() if (choice.data / file).is_file()}
    if not files and choice.git is None:
        plan.leave_out("replay", "no recorded answers: give a file with --replay, a folder with --data, or --git")
        return
    paying = choice.replay_model or choice.model
    workloads: dict[str, Workload] = {}
    with Model.open(paying, vocab_only=True) as model:
        for name, path in files.items():
            workloads[name] = _split(load(path, model.vocabulary), choice.size.answers, model.n_vocab)
        if choice.git is not None:
            try:
                edits = load_edits(choice.git, model.vocabulary, 4 * choice.size.answers, predict=True)
                workloads["edits"] = _split(edits, choice.size.answers, model.n_vocab)
            except InputInvalid as error:
                plan.leave_out("replay/edits", str(error))
        most = EngineConfig(n_ctx=choice.n_ctx).context_length(model.n_ctx_train or 0)
    tasks, answers = tasks_of(workloads, choice.size.replayed)
    chosen = [task for task in tasks if wants(choice.workloads, task.workload)]
    fitting = _fitting(plan, chosen, most, replace(choice, git=None))
    if not fitting:
        return
    kept = {f"{task.workload}/{task.name}" for task in fitting}
    shared = PayingModel(paying, {name: answer for name, answer in answers.items() if name in kept}, choice.threads)
    sides, absent = replay_sides(shared, workloads)
    plan.left_out += [{"side": name, "reason": reason} for name, reason in absent.items()]
    plan.stages.append(Stage("replay", "replay", "fast", sides, single(fitting)))


def _split(recorded: Sequence[Recorded], n: int, n_vocab: int) -> Workload:
    """The first `n` answers under test; all others are earlier answers. Both at least one, if there are two."""
    n = min(n, max(len(recorded) - 1, 1))
    return Workload(list(recorded[:n]), [answer.answer for answer in recorded[n:]] or None, n_vocab)
