"""Problems with tests: right completions pass in the sandbox and wrong ones fail; a completion ends with its function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local.bench import sandbox
from rest_local.bench.experiments.relaxed import mutated
from rest_local.bench.problems import HELD_OUT, MEMORISED, Problem, first_block, human_eval, of_library
from rest_local.bench.prompts import held_out_modules, well_known_modules
from rest_local.errors import InputInvalid

in_sandbox = pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))
LIBRARY = [*of_library(MEMORISED, "memorised"), *of_library(HELD_OUT, "held out")]


def test_a_completion_ends_with_the_function() -> None:
    assert first_block("    a = 1\n\n    return a\n\ndef other():\n    pass\n") == "    a = 1\n\n    return a\n\n"
    assert first_block("    return 1") == "    return 1"
    assert first_block("return 1\n") == ""


def test_functions_belong_to_the_kind_that_they_are_listed_under() -> None:
    assert set(MEMORISED) <= set(well_known_modules())
    assert set(HELD_OUT) <= set(held_out_modules())


def test_a_prompt_ends_where_the_completion_begins() -> None:
    assert len(LIBRARY) > 60
    for problem in LIBRARY:
        assert problem.before.endswith(problem.prompt)
        assert problem.answer[0].isspace()
        assert first_block(problem.answer) == problem.answer


@in_sandbox
@pytest.mark.parametrize("problem", LIBRARY[::14], ids=lambda problem: problem.name)
def test_the_real_function_passes_and_another_does_not(problem: Problem) -> None:
    assert sandbox.run(problem.program(problem.answer)).reason == ""
    assert not sandbox.run(problem.program("    return object()\n")).passed


@in_sandbox
def test_solutions_of_human_eval_pass_and_changed_ones_do_not(shared_data: Callable[[str], Path]) -> None:
    problems = human_eval(shared_data("HumanEval.jsonl.gz"))
    assert len(problems) == 164
    for problem in problems[::60]:
        assert sandbox.run(problem.program(problem.answer)).reason == ""
        assert not sandbox.run(problem.program("    pass\n")).passed


@in_sandbox
def test_a_mutant_differs_in_the_solution_only_and_fails() -> None:
    problem = Problem("p", "k", "def f(a=1):\n", "assert f(3) == 4\n", "    return a + 1\n", "")
    changed = mutated(problem)
    assert changed == "def f(a=1):\n    return a - 1\nassert f(3) == 4\n"
    assert not sandbox.run(changed).passed
    assert mutated(Problem("p", "k", "def f(a=1):\n", "", "    return a\n", "")) is None


def test_a_file_without_problems_is_refused(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "HumanEval.jsonl.gz"
    for content in (b"{}", b"[", b'{"prompt": 1}'):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(InputInvalid, match="HumanEval"):
            human_eval(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(InputInvalid):
        human_eval(path)
