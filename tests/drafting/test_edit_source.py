"""Files of a conversation are recognised where an answer writes them in another spelling, whatever the client."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few
from support.toy import demo_model

from rest_local.chat.tools.answer import _SIGNS
from rest_local.chat.tools.format import ToolFormat
from rest_local.drafting import edit_source as module
from rest_local.drafting.edit_source import EditSource, LineCursor
from rest_local.drafting.sources import N_SHARES, SOURCE_NUMBER, EditRows, Sources
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.rows import Int32Array, Rows

FORMATS = {form.name: form for _, form in _SIGNS}
FILE = """import os
import sys


class Shape:
    \"\"\"A shape with a "name".\"\"\"

    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def scaled(self, factor):
        return Shape(self.width * factor, self.height * factor)


def main():
    shape = Shape(int(sys.argv[1]), int(sys.argv[2]))
\tprint("area:\\t", shape.area(), os.getcwd())
"""
READ = "Please add a colour.\nI will read the file.\n"
NUMBERED: dict[str, Callable[[int], str]] = {
    "arrow": lambda n: f"{n:6}→",
    "bar": lambda n: f"{n} | ",
    "zeros": lambda n: f"{n:05}| ",
    "tab": lambda n: f"{n:6}\t",
    "colon": lambda n: f"{n}:",
}


def numbered(text: str, mark: Callable[[int], str] = NUMBERED["arrow"]) -> str:
    return "\n".join(mark(n) + line for n, line in enumerate(text.split("\n"), 1))


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    with Model.open(demo_model(), vocab_only=True) as model:
        yield model.vocabulary


def ids(vocabulary: Any, text: str) -> list[int]:
    tokens: list[int] = vocabulary.tokenize(text.encode()).tolist()
    return tokens


def hits(vocabulary: Any, prompt: str, answer: str, given: str = "") -> list[bool]:
    """Return for each token of the answer after `given` whether it was drafted as the next token."""
    edits, rows = EditSource(vocabulary), []
    edits.restart(ids(vocabulary, prompt), 0)
    edits.extend(ids(vocabulary, given))
    said = ids(vocabulary, prompt + given)
    for token in ids(vocabulary, answer):
        found, breaks = edits.rows(said[-32:], 16)
        assert len(breaks) == len(found)
        rows.append(token in found.continuations[:, 0].tolist() if len(found) else False)
        edits.extend([token])
        said.append(token)
    return rows


def share(found: Sequence[bool]) -> float:
    return sum(found) / len(found)


def called(form: ToolFormat, name: str, **arguments: Any) -> str:
    return form.write([{"name": name, "arguments": arguments}])


@pytest.mark.parametrize("mark", NUMBERED)
def test_a_numbered_file_is_followed_without_its_numbers(vocabulary: Vocabulary, mark: str) -> None:
    prompt = f"{READ}{numbered(FILE, NUMBERED[mark])}\n\n"
    assert share(hits(vocabulary, prompt, FILE)) > 0.85
    call = json.dumps({"name": "Write", "arguments": {"path": "shape.py", "content": FILE}})
    begin = call.index("import")
    assert share(hits(vocabulary, prompt, call[begin:-3], call[:begin])) > 0.85


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_calls_is_followed(vocabulary: Vocabulary, name: str) -> None:
    call = called(FORMATS[name], "create", file="shape.py", text=FILE)
    begin = call.index("import os")
    answer = call[begin : call.index("getcwd")]
    assert share(hits(vocabulary, f"{READ}{numbered(FILE)}\n\n", answer, call[:begin])) > 0.8


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_inside_json_is_followed_in_text(vocabulary: Vocabulary, name: str) -> None:
    prompt = READ + json.dumps({"output": FILE, "exit": 0}) + "\n"
    call = called(FORMATS[name], "create", file="shape.py", text=FILE)
    begin = call.index("import os")
    assert share(hits(vocabulary, prompt, call[begin : call.index("getcwd")], call[:begin])) > 0.8


def test_text_in_the_same_spelling_is_left_to_the_context(vocabulary: Vocabulary) -> None:
    assert not any(hits(vocabulary, f"{READ}{FILE}\nNow with a colour:\n", FILE))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("qwen", "gemma")])
def test_the_new_text_of_an_edit_is_expected_to_be_the_old_one(vocabulary: Vocabulary, name: str) -> None:
    old = "    def area(self):\n        return self.width * self.height\n"
    call = called(FORMATS[name], "Edit", file="shape.py", before=old, after=old.replace("width", "breadth"))
    begin = [place.start() for place in re.finditer("def area", call)][1] - len("    ")
    found = hits(vocabulary, f"{READ}{numbered(FILE)}\n\n", call[begin:].partition("breadth")[0], call[:begin])
    assert share(found) > 0.9


def test_the_text_between_two_strings_is_that_of_an_earlier_call(vocabulary: Vocabulary) -> None:
    def call(old: str, new: str) -> str:
        return json.dumps({"name": "Edit", "arguments": {"file": "s.py", "before": old, "after": new}}) + "\n"

    old = "        self.height = height\n"
    prompt = f"{READ}{call('import os', 'import re')}{numbered(FILE)}\n\n"
    answer = call(old, old + "        self.colour = None\n")
    begin = answer.index('", "after"')
    assert share(hits(vocabulary, prompt, '", "after": "        self.height = height', answer[:begin])) > 0.9
    end = answer.index('"}}')
    whole = call(old, old)
    begin = whole.rindex("height")
    assert share(hits(vocabulary, prompt, 'height\\n"}}\n', whole[:begin])) > 0.9
    assert answer[end:] == '"}}\n'


def test_a_patch_is_followed_with_its_marks(vocabulary: Vocabulary) -> None:
    patch = f"""*** Update File: shape.py
@@
     def area(self):
-        return self.width * self.height
+        return self.width * self.height / 2
{" "}
     def scaled(self, factor):
         return Shape(self.width * factor, self.height * factor)
"""
    call = json.dumps({"command": ["apply_patch", patch]})
    begin, end = call.index("self):"), call.index("Shape(")
    found = hits(vocabulary, f"{READ}{FILE}\n\n", call[begin:end], call[:begin])
    assert share(found) > 0.7


def test_after_a_change_the_place_is_found_again(vocabulary: Vocabulary) -> None:
    new = FILE.replace("        self.height = height\n", "        self.height = height\n        self.colour = None\n")
    call = json.dumps({"content": new})
    begin = call.index("(self):", call.index("colour"))
    assert share(hits(vocabulary, f"{READ}{numbered(FILE)}\n\n", call[begin : begin + 60], call[:begin])) > 0.9


def test_nothing_is_proposed_for_other_text(vocabulary: Vocabulary) -> None:
    prose = "It is a sunny day. The birds sing, and nothing of this stands in a file.\nSo there is nothing to draft.\n"
    assert not any(hits(vocabulary, f"{READ}{numbered(FILE)}\n\n", prose))


def test_a_conversation_that_goes_on_is_read_from_where_it_differs(vocabulary: Vocabulary) -> None:
    first = ids(vocabulary, READ + numbered(FILE * 9) + "\n")
    second = [*first[: len(first) // 2], *ids(vocabulary, f"\nother text\n{numbered(FILE)}\n")]
    kept, fresh = EditSource(vocabulary), EditSource(vocabulary)
    kept.restart(first, 0)
    kept.rows([], 16)
    kept.extend(ids(vocabulary, "import"))
    kept.restart(second, len(first) // 2)
    fresh.restart(second, 0)
    said = list(second)
    for token in ids(vocabulary, FILE):
        for edits in (kept, fresh):
            edits.extend([token])
        said.append(token)
        assert kept.follows == fresh.follows
        (rows, breaks), (expected, ends) = (edits.rows(said[-32:], 16) for edits in (kept, fresh))
        assert rows.continuations.tolist() == expected.continuations.tolist()
        assert (rows.match.tolist(), breaks) == (expected.match.tolist(), ends)
    assert kept._shown.lines.lines == fresh._shown.lines.lines
    assert kept._shown.lines._places == fresh._shown.lines._places


class Bytes:
    """Tokens are bytes, or a byte and those after it up to the next space."""

    def __init__(self) -> None:
        self.tokenized = 0

    def piece(self, token: int) -> bytes:
        return bytes([token % 256])

    def tokenize(self, text: bytes) -> Int32Array:
        self.tokenized += len(text)
        return np.frombuffer(text, np.uint8).astype(np.int32)


SNIPPETS = st.sampled_from(
    (
        '{"name": "Edit", "old": "', '", "new": "', '"}}\n', "\\n", "\n", "    return value", "  12→", "  13→", "+",
        "-", " ",
        "def function(argument):", '\\"', "\\", '"', "=======\n", "1 | a\n2 | b\n", "\\u00e9", "\xff", '": "',
    )
)  # fmt: skip


@few(30)
@given(st.lists(SNIPPETS, max_size=60), st.lists(st.tuples(SNIPPETS, st.booleans()), max_size=80), st.data())
def test_any_text_gives_rows_of_tokens(prompt: list[str], answer: list[tuple[str, bool]], data: Any) -> None:
    edits = EditSource(Bytes())
    text = list("".join(prompt).encode())
    edits.restart(text, 0)
    for piece, asks in answer:
        new = list(piece.encode())
        edits.extend(new)
        text += new
        if not asks:
            continue
        depth = data.draw(st.sampled_from((1, 16, 63)))
        rows, breaks = edits.rows(text[-32:], depth)
        assert rows.continuations.shape == (len(breaks), depth)
        assert rows.continuations.max(initial=0) < 256
        assert rows.match.min(initial=1) >= 1
        assert sorted(rows.match.tolist(), reverse=True) == rows.match.tolist()
        assert 0 <= edits.evidence_kind < N_SHARES
    same = data.draw(st.integers(0, len(text)))
    edits.restart([*text[:same], 7, 10], same)
    edits.rows([7, 10], 16)


def test_what_is_tokenized_is_paid_by_the_tokens_of_the_answer() -> None:
    spelling = Bytes()
    edits = EditSource(spelling)
    letters = np.random.default_rng(1).integers(97, 123, (90, 60)).tolist()
    lines = [bytes(line).decode() for line in letters]
    edits.restart(list(numbered("\n".join(lines)).encode()), 0)
    answer = "".join(f"{line}\n" for at in range(87, -1, -3) for line in lines[at : at + 3]).encode()
    for number, byte in enumerate(answer):
        edits.extend([byte])
        edits.rows([byte], 16)
        most = module.ALLOWED + module.EARNED * (number + 1) + 2 * module.CHUNK
        assert spelling.tokenized <= 2 * most
    assert spelling.tokenized > module.ALLOWED


@pytest.mark.parametrize("string", [False, True])
def test_tokens_that_are_added_are_those_of_the_whole_text(vocabulary: Vocabulary, string: bool) -> None:
    lines = (FILE * 30).encode().split(b"\n")
    text = LineCursor(vocabulary, lines, string)
    text.begin(0, 0, 8)
    while True:
        text.prediction.extend(text.prediction.tokens[text.prediction.place :].tolist()[:-1])
        text.prediction.catch_up()
        if not text.extend():
            break
    whole = b"\n".join(lines)
    written = json.dumps(whole.decode())[1:-1].encode() if string else whole
    expected = vocabulary.tokenize(written).tolist()
    tokens = text.prediction.tokens.tolist()
    assert b"".join(map(vocabulary.piece, tokens)).strip() == written.strip()
    assert len(tokens) <= 1.01 * len(expected)
    assert len(text._breaks) == len(tokens)


def test_evidence_is_agreement_with_the_context_and_ends_of_lines() -> None:
    def rows(tokens: list[int], match: int) -> Rows:
        return Rows(np.array([tokens], np.int32), np.array([match], np.int32), np.zeros(1, np.int64))

    def cells(context: Rows | None, breaks: bytes) -> list[int]:
        found = EditRows(rows([5, 6, 7], 8), [breaks], 1, context)
        return [found.candidates(range(1), depth)[0][1] for depth in range(3)]

    kinds = [cells(context, b"\0\0\0") for context in (None, rows([5, 9, 9], 8), rows([9, 9, 9], 8))]
    assert len({tuple(kind) for kind in kinds}) == 3
    ended = cells(None, b"\0\1\0")
    assert [a == b for a, b in zip(kinds[0], ended, strict=True)] == [True, False, True]


def test_the_sources_draft_what_is_edited(vocabulary: Vocabulary) -> None:
    sources = Sources([], vocabulary.size, spelling=vocabulary)
    sources.restart(ids(vocabulary, f"{READ}{numbered(FILE)}\n\n"))
    call = json.dumps({"content": FILE})
    tokens = ids(vocabulary, call)
    sources.extend(tokens[:40])
    found = {rows.source: rows for rows in sources.rows()}
    assert found[SOURCE_NUMBER["edit"]].continuations[0] == tokens[40:56]
    assert SOURCE_NUMBER["edit"] == SOURCE_NUMBER["edit"]
    assert sources.repeats(8)
    assert not [rows for rows in Sources([], vocabulary.size).rows() if rows.source == SOURCE_NUMBER["edit"]]
