"""What a comparison plans: which prompts, on which sides, and what is left out with a reason."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.repository import Repository

from rest_local.bench.comparing.choice import QUICK, WORKLOADS, Choice, fingerprint, selected, wants
from rest_local.bench.comparing.code_tasks import files_of
from rest_local.bench.comparing.plan import Plan, make_plan
from rest_local.bench.comparing.prompting import Prompting, spread
from rest_local.errors import InputInvalid, OptionError

TinyModel = Callable[..., Path]
CATEGORIES = ("qa", "rag")
SOURCE = "".join(f"def number_{n}(value):\n    return value + {n}\n\n\n" for n in range(60))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = Repository(tmp_path / "repository")
    for version in ("one", "two", "three"):
        edited = "".join(f"{version} line {n} of the file\n" for n in range(12))
        made.commit(version, {"edited.txt": edited, "a.py": SOURCE, "b.py": SOURCE[50:], "small.py": "x = 1\n"})
    return made.path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    questions = [
        {"question_id": n, "category": category, "turns": [f"What is {category} {n}? " + "long " * (900 * (n == 1))]}
        for category in CATEGORIES
        for n in range(4)
    ]
    (folder / "spec_bench_questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    with gzip.open(folder / "HumanEval.jsonl.gz", "wt") as file:
        problem = {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "canonical_solution": "    return a + b\n"}
        file.write(json.dumps(problem) + "\n" + json.dumps({**problem, "task_id": "HumanEval/1"}))
    return folder


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def choice(model: Path, **given: object) -> Choice:
    return replace(Choice(model=model, threads=1, size=QUICK), **given)  # type: ignore[arg-type]


def workloads(plan: Plan, stage: str) -> list[str]:
    [found] = [each for each in plan.stages if each.name == stage]
    return [unit.workload for unit in found.units]


def reasons(plan: Plan) -> dict[str, str]:
    return {row["workload"]: row["reason"] for row in plan.left_out if "workload" in row}


def test_every_workload_becomes_units_of_its_stage(
    tiny_model: TinyModel, repository: Path, data: Path, stack: ExitStack
) -> None:
    plan = make_plan(choice(tiny_model("llama"), git=repository, data=data, n_ctx=4096), stack)
    single = ["completion", "edit", "chat", "json", "humaneval", "spec-bench/qa", "spec-bench/rag"]
    assert workloads(plan, "fast") == single
    assert workloads(plan, "exact") == single[:-1]  # of Spec-Bench as many prompts as of another workload
    assert workloads(plan, "batch") == ["batch"]
    assert workloads(plan, "replay") == ["replay/humaneval", "replay/edits"]
    assert set(reasons(plan)) == {"mt-bench"}
    names = [side.name for side in plan.stages[0].sides]
    assert names == ["plain", "rest", "sam", "respec", "auto", "llama-cpp-python prompt lookup"]
    assert [side.name for side in plan.stages[-1].sides][5:8] == ["prompt-lookup", "ngram-simple", "ngram-mod"]
    json.dumps(plan.key())
    [edit] = [unit.tasks[0] for unit in plan.stages[0].units if unit.workload == "edit"]
    assert edit.prediction.startswith("wo line 0")  # from the first changed token on


def test_prompts_over_the_context_are_left_out_and_counted(
    tiny_model: TinyModel, data: Path, repository: Path, stack: ExitStack
) -> None:
    size = replace(QUICK, by_category=4)
    one = choice(tiny_model("llama"), data=data, git=repository, workloads=("spec-bench",), size=size, n_ctx=1024)
    plan = make_plan(one, stack)
    assert [unit.name for unit in plan.stages[0].units] == ["0", "2", "3"] * 2
    over = [row for row in plan.left_out if "context" in row["reason"]]
    assert [(row["workload"], row["prompts"]) for row in over] == [("spec-bench/qa", 1), ("spec-bench/rag", 1)]
    assert plan.n_ctx <= 1024
    with pytest.raises(OptionError, match=r"nothing to compare .*longer than the context of 32"):
        make_plan(replace(one, n_ctx=32), stack)


def test_files_to_complete_are_not_in_the_datastore(tiny_model: TinyModel, repository: Path, stack: ExitStack) -> None:
    said: list[str] = []
    one = choice(tiny_model("llama"), git=repository, workloads=("completion",))
    plan = make_plan(one, stack, said.append)
    assert [source.name for source in files_of(repository, 5)] == ["a.py", "b.py"]
    assert any("without the 2 files to complete" in line for line in said)
    assert plan.stages[0].units[0].name == "a.py"


def test_a_repository_without_edits_or_sources_leaves_out_these_workloads(
    tiny_model: TinyModel, tmp_path: Path, stack: ExitStack
) -> None:
    made = Repository(tmp_path / "bare")
    made.commit("one", {"small.py": "x = 1\n"})
    plan = make_plan(choice(tiny_model("llama"), git=made.path), stack)
    assert workloads(plan, "fast") == ["chat", "json"]
    assert set(reasons(plan)) == {
        "completion", "edit", "batch", "humaneval", "mt-bench", "spec-bench", "replay/edits",
    }  # fmt: skip
    with pytest.raises(OptionError, match=r"nothing to compare .edit: .*no commit changes"):
        make_plan(choice(tiny_model("llama"), git=made.path, workloads=("edit",)), stack)


@pytest.mark.parametrize(("name", "content"), [("spec_bench_questions.jsonl", b"[1]"), ("HumanEval.jsonl.gz", b"{}")])
def test_files_of_the_data_folder_are_checked(
    tiny_model: TinyModel, data: Path, repository: Path, stack: ExitStack, name: str, content: bytes
) -> None:
    (data / name).write_bytes(content)
    with pytest.raises(InputInvalid, match=name):
        make_plan(choice(tiny_model("llama"), data=data, git=repository, workloads=("spec-bench", "humaneval")), stack)


def test_a_drafter_is_one_more_side_and_a_missing_server_is_found_out_later(
    tiny_model: TinyModel, repository: Path, stack: ExitStack, tmp_path: Path
) -> None:
    one = choice(
        tiny_model("llama"),
        git=repository,
        workloads=("chat",),
        draft_models=(tiny_model("llama", seed=2),),
        llama_server=str(tmp_path / "llama-server"),
    )
    names = [side.name for side in make_plan(one, stack).stages[0].sides]
    assert names[5:] == ["auto + llama-seed2", "llama-cpp-python prompt lookup", "llama-server"]


def test_workloads_are_chosen_by_name() -> None:
    assert selected(()) == WORKLOADS
    assert selected(("edit,chat", "Edit")) == ("edit", "chat")
    assert wants(selected(("spec-bench/qa",)), "spec-bench")
    assert wants(selected(("spec-bench/qa",)), "spec-bench/qa")
    assert not wants(selected(("spec-bench/qa",)), "spec-bench/rag")
    assert wants(selected(("spec-bench",)), "spec-bench/rag")
    with pytest.raises(OptionError, match="workload editt: do you mean edit"):
        selected(("editt",))
    with pytest.raises(OptionError, match="choose from completion"):
        selected(("edit/x",))


def test_models_are_told_apart_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"two")
    assert fingerprint(tmp_path / "a").partition(",")[2] != fingerprint(tmp_path / "b").partition(",")[2]


def test_a_spread_takes_items_at_equal_distances() -> None:
    assert spread(range(10), 3) == [0, 3, 6]
    assert spread(range(2), 3) == [0, 1]


def test_a_question_has_the_chat_template_and_one_start_token(tiny_model: TinyModel) -> None:
    with Prompting(tiny_model("llama")) as prompting:
        bos = prompting.vocabulary.bos
        for tokens in (prompting.text("a"), prompting.question("a", "b")):
            assert sum(token == bos for token in tokens) <= 1
        assert len(prompting.question("a", "beginning")) > len(prompting.question("a"))
