"""Programming problems with tests: HumanEval's, and functions of the standard library that are to be completed.

A `Problem` holds what the model reads and makes a program of a completion, which `bench.sandbox` runs. HumanEval's
problems bring their tests. A function of the standard library is tested against the real one: both are called in the
same way, and have to return the same or raise the same kind of error. The model may have memorised such a function;
that is the purpose, since a small model solves nothing else. Held-out modules (`bench.prompts`) are those that the demo
model never saw.

Each function gives two problems: the whole body is missing, or only its last statement.
"""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rest_local.bench.prompts import standard_library
from rest_local.errors import InputInvalid

PROMPT = 3000  # characters of a module before a function that the model reads


@dataclass(frozen=True)
class Problem:
    """before: the program up to the completion, of which the prompt is the end. after: the rest, with the tests.

    kind    "HumanEval", "memorised, body", "memorised, last statement", or the same with "held out"
    answer  a completion that is known to be right
    """

    name: str
    kind: str
    before: str
    after: str
    answer: str
    prompt: str

    def program(self, completion: str) -> str:
        """To run in the sandbox: it ends without an error if the completion is right."""
        return f"{self.before}{first_block(completion)}\n{self.after}"


def first_block(completion: str) -> str:
    """A completion up to the first line that is not indented: what follows is no part of the function."""
    lines = completion.splitlines(keepends=True)
    end = next((number for number, line in enumerate(lines) if line.strip() and not line[0].isspace()), len(lines))
    return "".join(lines[:end])


def human_eval(path: Path) -> list[Problem]:
    """Raises InputInvalid, OSError."""
    found = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                task = json.loads(line)
                after = f"{task['test']}\ncheck({task['entry_point']})\n"
                prompt, answer = task["prompt"], task["canonical_solution"]
                found.append(Problem(task["task_id"], "HumanEval", prompt, after, answer, prompt))
    except (ValueError, KeyError, EOFError, gzip.BadGzipFile) as error:
        raise InputInvalid("file", path, f"no problems of HumanEval ({error!r})") from error
    return found


MEMORISED: Mapping[str, Mapping[str, str]] = {
    "operator.py": {
        "truth": "F([]); F([0])",
        "concat": "F([1], [2]); F('a', 'b'); F(1, 2)",
        "contains": "F([1, 2], 2); F([1], 2)",
        "countOf": "F([1, 2, 1, 1], 1); F('abc', 'd')",
        "indexOf": "F([1, 2], 2); F([1], 9)",
        "length_hint": "F([1, 2]); F(iter('abc')); F(3, 4); F([], 'x')",
        "iconcat": "F([1], [2]); F(1, 2)",
        "floordiv": "F(7, 2); F(1, 0)",
    },
    "shlex.py": {
        "split": 'F(\'a "b c" d\'); F("it\'s")',
        "join": "F(['a b', 'c', \"it's\"]); F([])",
        "quote": "F(''); F('a b'); F(\"it's\"); F('plain')",
    },
    "string.py": {"capwords": "F('a bc  d'); F('a-b c-d', '-')"},
    "functools.py": {
        "reduce": "F(lambda a, b: a * b, [1, 2, 4]); F(max, [], 7); F(max, [])",
        "cmp_to_key": "sorted([3, 1, 2], key=F(lambda a, b: b - a))",
        "update_wrapper": "F(lambda: 1, sorted).__name__; F(lambda: 1, sorted).__wrapped__ is sorted",
        "_unwrap_partial": "F(len)",
        "_c3_merge": "F([[1, 3], [2, 3], [1, 2]])",
    },
    "fnmatch.py": {
        "fnmatch": "F('a.py', '*.py'); F('a', 'b')",
        "filter": "F(['a.py', 'b', 'c.py'], '*.py')",
        "fnmatchcase": "F('a.py', '[ab].??'); F('A', 'a')",
        "translate": "F('a*[!b]?'); F('[')",
    },
    "glob.py": {"has_magic": "F('a*'); F('a')", "escape": "F('a*b[c]?')", "_ishidden": "F('.a'); F('a')"},
    "copy.py": {
        "copy": "F([1, [2]]); F({'a': 1}); F(__import__('types').SimpleNamespace(a=1))",
        "deepcopy": "F({'a': [1, (2, [3])]})",
    },
    "getopt.py": {
        "getopt": "F(['-a', 'x', '-b'], 'a:b'); F(['--long', 'y'], '', ['long']); F(['-z'], 'a')",
        "short_has_arg": "F('a', 'a:b'); F('b', 'a:b'); F('z', 'ab')",
    },
    "timeit.py": {"reindent": "F('a\\nb', 4)"},
}
"""By module and function: calls with `F` as the function, separated by semicolons. The demo's training repeats them."""

HELD_OUT: Mapping[str, Mapping[str, str]] = {
    "calendar.py": {
        "isleap": "F(2000); F(1900); F(2023)",
        "leapdays": "F(1990, 2011)",
        "weekday": "F(2024, 2, 29); F(1970, 1, 1)",
    },
    "textwrap.py": {
        "indent": "F('a\\n\\nb', '> ')",
        "dedent": "F('  a\\n    b\\n')",
        "shorten": "F('one two three', 10)",
    },
    "statistics.py": {
        "median": "F([3, 1, 2]); F([4, 1, 2, 3]); F([])",
        "median_low": "F([4, 1, 2, 3])",
        "median_high": "F([4, 1, 2, 3])",
    },
    "bisect.py": {"bisect_left": "F([1, 2, 2, 3], 2)", "bisect_right": "F([1, 2, 2, 3], 2)"},
    "heapq.py": {"heappushpop": "F([2, 3], 1); F([2, 3], 9)"},
    "difflib.py": {"IS_CHARACTER_JUNK": "F(' '); F('x')"},
}


def of_library(functions: Mapping[str, Mapping[str, str]], kind: str) -> list[Problem]:
    """Two problems for each function, of the running interpreter's source. One that its source lacks is left out."""
    found: list[Problem] = []
    for module, calls in functions.items():
        path = standard_library() / module
        if path.is_file():
            text = path.read_text("utf-8")
            nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
            for name, expressions in calls.items():
                if name in nodes:
                    found += _of_function(path.stem, text, nodes[name], expressions, kind)
    return found


def _of_function(module: str, text: str, node: ast.FunctionDef, calls: str, kind: str) -> Iterator[Problem]:
    lines = text.splitlines(keepends=True)
    body = node.body[1:] if len(node.body) > 1 and ast.get_docstring(node) is not None else node.body
    rest = "".join(lines[node.end_lineno :])
    after = f"_candidate = {node.name}\n{rest}\n{_TESTS.format(module=module, name=node.name, calls=calls.split('; '))}"
    starts = {"body": body[0].lineno, "last statement": body[-1].lineno}
    for part, start in starts.items():
        before, answer = "".join(lines[: start - 1]), "".join(lines[start - 1 : node.end_lineno])
        yield Problem(f"{module}.{node.name}", f"{kind}, {part}", before, after, answer, before[-PROMPT:])


_TESTS = """
def _outcome(_call, _function):
    try:
        return "value", eval(_call, {{"F": _function}})
    except Exception as _error:
        return "error", type(_error).__name__


import {module} as _real

for _call in {calls!r}:
    _found, _wanted = _outcome(_call, _candidate), _outcome(_call, _real.{name})
    assert _found == _wanted, f"{{_call}}: {{_found}}, not {{_wanted}}"
"""
