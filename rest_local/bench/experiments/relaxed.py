"""Functional correctness under relaxed verification: are the programs still right that a model writes?

A model solves problems greedily: plain, with drafts and `--exact`, with drafts in fast mode, and with two settings of
relaxed verification, the default and a loose one. Each program is run with its tests in a sandbox (`bench.sandbox`).
Drafts come from the standard library without its held-out modules and from the request.

- HumanEval's problems, where the data folder has them. A small model solves none of them; then they say nothing about
  verification, and the section says so.
- Functions of the standard library of which the body or the last statement is missing (`bench.problems`): some that
  the demo model memorised in training, and some of modules that it never saw.

The machinery is checked first: every canonical solution of HumanEval has to pass, the same with a function that
returns a new object has to fail, and one comparison, operator or constant changed in a solution has to fail where the
change is no equivalent one, so most of these fail.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Sequence
from typing import Any

from rest_local.bench.experiments.inputs import ANSWERS, Inputs
from rest_local.bench.experiments.respec_parts import code_datastore
from rest_local.bench.problems import HELD_OUT, MEMORISED, Problem, first_block, human_eval, of_library
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.bench.sandbox import run as run_program
from rest_local.bench.sandbox import why_not
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import STRICT, Strict
from rest_local.decoding.verify import Relaxed

NAME = "relaxed"
SUMMARY = "Whether programs still pass their tests under exact, fast and relaxed verification."

LOOSE = Relaxed(k=10, ratio=0.05)
MODES: dict[str, tuple[bool, str | None, Relaxed | Strict]] = {
    "plain": (False, "off", STRICT),
    "exact": (True, None, STRICT),
    "fast": (False, None, STRICT),
    str(Relaxed()): (False, None, Relaxed()),
    str(LOOSE): (False, None, LOOSE),
}
"""By name: whether the engine is exact, the policy (None: the default), and the verification."""
DEMO_PROBLEMS, EACH, QUICK_PROBLEMS, QUICK_CHECKED = 10, 10, 1, 6
"""Of HumanEval for the demo model, of each other kind, of each kind in a quick run, and canonical solutions there."""
ENDS = tuple(f"\n{character}" for character in f"{string.ascii_letters}_@#\"'(")  # of a function: a line at the margin
CONTEXT = 2048
MOST_TOKENS, MOST_TOKENS_DEMO = 400, 120  # of a solution


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """Pass rates by kind of problem and mode. About 2 minutes with the demo model, quick: 10 s.

    Where no sandbox is possible, nothing is run and the result has the reason. Raises SandboxMissing, ModelError.
    """
    if reason := why_not():
        return {"why_not": reason}
    known = human_eval(inputs.file(ANSWERS["HumanEval"].file)) if inputs.has("HumanEval") else []
    if "machinery" not in journal:
        journal.put("machinery", _machinery(known[:QUICK_CHECKED] if inputs.quick else known))
        inputs.tell(f"checked: {len(known)} canonical solutions")
    problems = _chosen(inputs, known)
    for exact in (False, True):
        missing = [name for name, mode in MODES.items() if mode[0] == exact and name not in journal]
        if missing:
            _generate(inputs, journal, problems, missing, exact)
    plain = journal["plain"]
    return {
        "why_not": None,
        "model": "the demo model" if inputs.model is None else inputs.model.name,
        "human_eval": bool(known),
        "machinery": journal["machinery"],
        "modes": {name: _rates(problems, journal[name], plain) for name in MODES},
    }


def _machinery(known: Sequence[Problem]) -> dict[str, Any]:
    """How many of the canonical solutions pass, of those that return a new object, and of those with one change."""
    failed = [problem.name for problem in known if not run_program(problem.program(problem.answer)).passed]
    wrong = [problem.name for problem in known if run_program(problem.program("    return object()\n")).passed]
    changed = [(problem, other) for problem in known if (other := mutated(problem)) is not None]
    survived = [problem.name for problem, other in changed if run_program(other).passed]
    isolated = list(run_program("").isolated)
    return {
        "solutions": len(known),
        "failed": failed,
        "wrong_passed": wrong,
        "changed": len(changed),
        "changed_passed": survived,
        "isolated": isolated,
    }


def mutated(problem: Problem) -> str | None:
    """The program with the first change that `_Change` finds in the solution; None if it finds none."""
    tree = ast.parse(f"{problem.before}{problem.answer}")
    change = _Change(after=problem.before.count("\n"))
    changed = ast.unparse(ast.fix_missing_locations(change.visit(tree)))
    return f"{changed}\n{problem.after}" if change.done else None


class _Change(ast.NodeTransformer):
    """Changes one comparison, arithmetic operator or number below line `after`."""

    OTHERS: dict[type[ast.AST], type[ast.AST]] = {  # noqa: RUF012
        ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
        ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.Mult, ast.In: ast.NotIn, ast.NotIn: ast.In,
    }  # fmt: skip

    def __init__(self, after: int) -> None:
        self.after, self.done = after, False

    def visit(self, node: ast.AST) -> Any:
        line = getattr(node, "lineno", self.after + 1)
        if not self.done and line > self.after:
            if isinstance(node, ast.Compare) and type(node.ops[0]) in self.OTHERS:
                node.ops[0] = self.OTHERS[type(node.ops[0])]()  # type: ignore[call-overload]
                self.done = True
            elif isinstance(node, ast.BinOp) and type(node.op) in self.OTHERS:
                node.op = self.OTHERS[type(node.op)]()  # type: ignore[assignment]
                self.done = True
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                self.done = True
                return ast.copy_location(ast.Constant(node.value + 1), node)
        return self.generic_visit(node)


def _chosen(inputs: Inputs, known: Sequence[Problem]) -> list[Problem]:
    if inputs.quick:
        known = known[:QUICK_PROBLEMS]
    elif inputs.model is None:
        known = known[:DEMO_PROBLEMS]
    of_kinds: dict[str, list[Problem]] = {}
    for problem in (*of_library(MEMORISED, "memorised"), *of_library(HELD_OUT, "held out")):
        of_kinds.setdefault(problem.kind, []).append(problem)
    each = QUICK_PROBLEMS if inputs.quick else EACH
    sampled = [some[:: max(1, len(some) // each)][:each] for some in of_kinds.values()]
    return [*known, *(problem for some in sampled for problem in some)]


def _generate(inputs: Inputs, journal: Journal, problems: Sequence[Problem], modes: Sequence[str], exact: bool) -> None:
    """Put a unit for each mode: a row for each problem."""
    most = MOST_TOKENS_DEMO if inputs.model is None else MOST_TOKENS
    store = code_datastore(inputs)
    with Engine.load(inputs.model_path, datastores=[store], n_ctx=CONTEXT, exact=exact) as engine:
        if exact:
            engine.compare()  # until it is done, exact requests are decoded plainly
        for name in modes:
            _, policy, verify = MODES[name]
            rows = []
            for problem in problems:
                tokens = min(most, len(problem.answer) // 2 + 24)
                stream = engine.generate(problem.prompt, max_tokens=tokens, policy=policy, verify=verify, stop=ENDS)
                for _ in stream:
                    pass
                result = stream.result
                outcome = run_program(problem.program(result.text))
                rows.append(
                    {
                        "passed": outcome.passed,
                        "reason": outcome.reason,
                        "code": first_block(result.text),
                        "tokens": len(result.tokens),
                        "relaxed": result.draft.relaxed,
                        "steps": result.draft.steps,
                        "generated": result.draft.generated,
                    }
                )
            journal.put(name, rows)
            inputs.tell(f"solved: {name}")


def _rates(
    problems: Sequence[Problem], rows: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """By kind: problems, passed, programs that differ from plain decoding's, tokens, relaxed tokens, and MAT."""
    found: dict[str, dict[str, Any]] = {}
    for problem, row, before in zip(problems, rows, plain, strict=True):
        counts = found.setdefault(
            problem.kind,
            dict.fromkeys(("problems", "passed", "lost", "changed", "tokens", "relaxed", "steps", "generated"), 0),
        )
        counts["problems"] += 1
        counts["passed"] += row["passed"]
        counts["lost"] += before["passed"] and not row["passed"]
        counts["changed"] += row["code"] != before["code"]
        for key in ("tokens", "relaxed", "steps", "generated"):
            counts[key] += row[key]
    return found


def section(result: Result) -> Section:
    """Words, the pass rates by mode, and the check of the machinery."""
    data = result.data
    title = "Are the programs still right?"
    if data["why_not"]:
        return Section(title, result.command, [f"No program was run: {data['why_not']}."])
    modes: dict[str, dict[str, dict[str, Any]]] = data["modes"]
    kinds = list(modes["plain"])
    columns = ("problems", "passed", "lost", "changed", "relaxed", "tokens")
    rows = [
        [kind, mode, *(of[kind][column] for column in columns), _mat(of[kind])]
        for kind in kinds
        for mode, of in modes.items()
    ]
    return Section(
        title=title,
        command=result.command,
        words=[
            f"Programs were completed greedily by {data['model']}, and each was run with its tests.",
            _machinery_words(data["machinery"]),
            *_words(modes, kinds),
        ],
        tables=[
            Table(
                "Programs that pass, by verification",
                ("kind", "verification", *columns, "MAT"),
                rows,
                note="Lost: passed with plain decoding, and not here. Changed: programs that differ from plain "
                "decoding's. Relaxed: tokens that are not the model's choice.",
            )
        ],
        figures=[_figure(modes, kinds)],
        machine=result.machine.line(),
        footnotes=[] if data["human_eval"] else ["HumanEval is left out: its file was not given."],
    )


def _mat(counts: dict[str, Any]) -> float:
    return round(float(counts["generated"] / max(counts["steps"], 1)), 3)


def _machinery_words(found: dict[str, Any]) -> str:
    isolated = ", ".join(found["isolated"]) or "nothing but the limits"
    if not found["solutions"]:
        return f"The machinery was not checked with HumanEval's solutions. Isolated were: {isolated}."
    passed, wrong = found["solutions"] - len(found["failed"]), len(found["wrong_passed"])
    text = (
        f"The machinery: {passed} of {found['solutions']} canonical solutions pass, {wrong} of as many that return a "
        f"wrong object, and {len(found['changed_passed'])} of {found['changed']} with one operator or number changed"
    )
    survived = f" ({', '.join(found['changed_passed'])}: changes that their tests do not see)"
    return f"{text}{survived if found['changed_passed'] else ''}. Isolated were: {isolated}."


def _words(modes: dict[str, dict[str, dict[str, Any]]], kinds: Sequence[str]) -> list[str]:
    words = []
    for kind in kinds:
        plain = modes["plain"][kind]
        solved = ", ".join(f"{mode} {of[kind]['passed']}" for mode, of in modes.items())
        text = f"{kind}: of {plain['problems']} problems are solved: {solved}."
        if not any(of[kind]["passed"] for of in modes.values()):
            text += " The model solves none in any mode, so these problems say nothing about verification."
        words.append(text)
    return [*words, *(_mode_words(mode, of) for mode, of in modes.items() if mode != "plain")]


def _mode_words(mode: str, of: dict[str, dict[str, Any]]) -> str:
    def total(key: str) -> int:
        return sum(counts[key] for counts in of.values())

    return (
        f"{mode}: {total('changed')} of {total('problems')} programs differ from those of plain decoding, "
        f"{total('lost')} no longer pass, {total('relaxed')} of {total('tokens'):,} tokens are not the model's choice."
    )


def _figure(modes: dict[str, dict[str, dict[str, Any]]], kinds: Sequence[str]) -> Figure:
    return Figure(
        name="relaxed",
        title="Share of programs that pass",
        x="problems",
        y="share",
        series=[
            Series(mode, [of[kind]["passed"] / of[kind]["problems"] for kind in kinds]) for mode, of in modes.items()
        ],
        alt="Bars: the share of programs that pass their tests, by kind of problem and verification.",
        categories=kinds,
    )
