"""The documents: what they name exists, their links lead somewhere, and nothing outside the repository is cited."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click

import rest_local
import rest_local.errors
from rest_local.cli.main import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/*.md")])
FOLDERS = ("rest_local", "benchmarks", "tests", "scripts", "docs", "datastore", "models")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".toml") and "work" not in path.relative_to(ROOT).parts
)
ROOMS = sorted(
    path.name for path in (ROOT / "rest_local").iterdir() if (path / "__init__.py").exists() or path.is_dir()
)
EXTERNAL = re.compile(r"[a-z]+:")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def prose_of(path: Path) -> str:
    """Return the text without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text_of(path), flags=re.MULTILINE | re.DOTALL)


@cache
def definitions_of(path: Path) -> frozenset[str]:
    """Return every function and class that a file defines."""
    nodes = ast.walk(ast.parse(text_of(path)))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in nodes if isinstance(node, kinds))


@cache
def anchors_of(path: Path) -> frozenset[str]:
    """Return the anchors of the headings of a document, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(path), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.strip().lower()) for heading in headings)
    return frozenset(re.sub(r"\s+", "-", heading) for heading in plain)


REASON = re.compile(r"<!-- not run: \w[^\n]{8,} -->")
COMMAND = re.compile(r"(?:rest-local|make|pip|python|pytest|git|curl|docker|systemctl) ")
RUN_BY_TUTORIAL = {"README.md", "index.md", "tutorial.md", "DRAFTERS.md", "SERVER.md"}
RUN_BY_TUTORIAL |= {path.name for path in ROOT.glob("docs/howto/*.md")}


def blocks_of(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the line before each block, its language, and its lines."""
    for found in re.finditer(r"(?:^|(?<=\n))([^\n]*)\n```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield found[1], found[2], found[3]


def not_run(text: str) -> list[str]:
    """Return what no test runs, and no reason is given for: blocks of `console`, and commands outside of blocks."""
    found = [lines for before, language, lines in blocks_of(text) if language == "console" and not REASON.match(before)]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return found + [line for line in re.findall(r"^(?: {4}|\$ )(.*)$", prose, re.MULTILINE) if COMMAND.match(line)]


def test_a_command_that_is_not_run_is_found() -> None:
    reason = "<!-- not run: needs a GPU -->"
    assert not_run(f"a\n\n{reason}\n```console\nmake x\n```\n") == []
    assert not_run("a\n\n```console\nmake x\n```\n") == ["make x\n"]
    assert not_run("```console\nmake x\n```\n".join(["\n", f"{reason}\n\n", ""])) == ["make x\n"] * 2
    assert not_run("Do:\n\n    make x\n") == ["make x"]


def test_every_command_is_run_by_a_test_or_says_why_not() -> None:
    """Blocks of `sh` and `python` of the README and the tutorial's pages are run by test_tutorial.py, and blocks of
    `curl` by server/clients/test_documented_commands.py."""
    for document in DOCUMENTS:
        text = text_of(document)
        assert document.name == "CLI.md" or not_run(text) == [], document
        for _, language, lines in () if document.name in (*RUN_BY_TUTORIAL, "CLI.md") else blocks_of(text):
            starts = [line for line in lines.splitlines() if re.match(r"\w", line)]
            assert language != "sh" or all(line.startswith("curl ") for line in starts), lines


def words_of(lines: str) -> Iterator[list[str]]:
    """Yield the arguments of each `rest-local` in lines of shell."""
    for line in lines.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        try:
            split = [*list(lexer), "|"]
        except ValueError:  # an open quote: the output of a command, or a text of several lines
            continue
        for word in split:
            if re.fullmatch(r"[|&;<>]+", word):
                if words[:1] == ["rest-local"]:
                    yield words[1:]
                words = []
            else:
                words.append(word)


def refused(words: list[str]) -> str | None:
    """Return what the command line says against arguments, without looking at any value."""
    command: click.Command = cli
    context = click.Context(cli)
    try:
        while isinstance(command, click.Group) and words:
            _, found, words = command.resolve_command(context, words)
            assert found is not None
            command, context = found, click.Context(found)
        command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        return error.format_message()
    return None


def test_commands_that_are_not_run_have_options_that_exist() -> None:
    said, n = [], 0
    for document in DOCUMENTS:
        for _, language, lines in blocks_of(text_of(document)):
            for words in words_of(lines) if language == "console" else ():
                n += 1
                wrong = refused(words)
                if wrong is not None and "Missing" not in wrong:
                    said.append(f"{name_of(document)}: {' '.join(words)}: {wrong}")
    assert said == []
    assert n > 20
    assert refused(["serve", "--no-such-option"]), "it does look"


def test_the_readme_is_short() -> None:
    assert len(text_of(ROOT / "README.md").split()) <= 650


def cited_tests() -> list[tuple[str, str]]:
    return re.findall(r"`([\w/]+\.py)::(\w+)`", text_of(ROOT / "docs" / "RELIABILITY.md"))


def test_every_test_that_reliability_names_exists() -> None:
    cited = cited_tests()
    assert len(cited) > 100
    missing = [
        f"{file}::{test}"
        for file, test in cited
        if not (ROOT / "tests" / file).exists() or test not in definitions_of(ROOT / "tests" / file)
    ]
    assert missing == []


def test_links_lead_somewhere() -> None:
    missing = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(document)):
            if EXTERNAL.match(target):
                continue
            name, _, anchor = target.partition("#")
            path = (document.parent / name).resolve() if name else document
            if not path.exists() or (anchor and anchor not in anchors_of(path)):
                missing.append(f"{name_of(document)}: {target}")
    assert missing == []


def test_no_file_cites_a_document_outside_the_repository() -> None:
    known = {document.name for document in DOCUMENTS}
    missing = {
        f"{name_of(source)}: {cited}"
        for source in SOURCES
        for cited in re.findall(r"\b[A-Z][A-Z_]+\.md\b", text_of(source))
        if cited not in known
    }
    assert missing == set()


def test_sections_of_the_design_that_are_cited_exist() -> None:
    sections = set(re.findall(r"^## (\d+)\.", text_of(ROOT / "docs" / "DESIGN.md"), re.MULTILINE))
    cited = {
        (name_of(source), number)
        for source in SOURCES
        for number in re.findall(r"DESIGN\.md\s+section\s+(\d+)", text_of(source))
    }
    assert len(cited) > 5
    assert {place for place in cited if place[1] not in sections} == set()


def dotted_names(document: Path) -> Iterator[str]:
    """Return names such as `planning.budget` or `rest_local.decoding.engine.Engine` in a document's prose."""
    for name in re.findall(r"`((?:rest_local\.)?[a-z_]+(?:\.\w+)+)`", prose_of(document)):
        bare = name.removeprefix("rest_local.")
        if bare.split(".")[0] in ROOMS and not bare.endswith(".py"):
            yield bare


def exists(name: str) -> bool:
    """Return True if a dotted name below `rest_local` is a module, or something in one."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        path = ROOT / "rest_local" / Path(*parts[:n])
        if path.is_dir() or path.with_suffix(".py").exists():
            found: object = importlib.import_module(".".join(["rest_local", *parts[:n]]))
            for attribute in parts[n:]:
                if not hasattr(found, attribute) and attribute not in getattr(found, "__annotations__", {}):
                    return False
                found = getattr(found, attribute, None)
            return True
    return False


def test_the_reference_of_the_api_is_complete() -> None:
    text = text_of(ROOT / "docs" / "api.md")
    described = {*re.findall(r"^::: rest_local\.(\w+)$", text, re.MULTILINE), "__version__"}
    described |= {name for name in rest_local.__all__ if hasattr(rest_local.errors, name)}
    assert described >= set(rest_local.__all__)
    assert "::: rest_local.errors\n" in text, "where the errors are"


def test_modules_that_are_named_exist() -> None:
    for document in ("ARCHITECTURE.md", "DESIGN.md", "FORMAT.md"):
        path = ROOT / "docs" / document
        assert [name for name in dotted_names(path) if not exists(name)] == []
        files = re.findall(r"`(?:rest_local/)?((?:" + "|".join(ROOMS) + r")/[\w/]+\.py)`", prose_of(path))
        assert [name for name in files if not (ROOT / "rest_local" / name).exists()] == []
