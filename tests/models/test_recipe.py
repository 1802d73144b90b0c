"""The demo model's recipe: the choice and the cuts of training text, and the metadata of the exported GGUF."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rest_local.bench.demo import held_out_modules, standard_library, well_known_modules
from rest_local.chat.renderer import render
from rest_local.llama.model import Model

END = "<|endoftext|>"
FUNCTION = '''def total(items, start=0):
    """Add up all the items that are given.

    More about it.
    """
    result = start
    for item in items:
        result += item
    return result
'''


@pytest.fixture(scope="module")
def prepare(recipe: Callable[[str], ModuleType]) -> ModuleType:
    return recipe("prepare")


@pytest.fixture(scope="module")
def demo(demo_gguf: Path) -> Iterator[Model]:
    with Model.open(demo_gguf) as model:
        yield model


def split_fim(sample: str) -> tuple[str, str, str]:
    """Prefix, middle and suffix of a fill-in-the-middle sample."""
    found = re.fullmatch(
        r"<\|fim_prefix\|>(.*)<\|fim_suffix\|>(.*)<\|fim_middle\|>(.*)<\|endoftext\|>", sample, re.DOTALL
    )
    assert found is not None, sample
    return found[1], found[3], found[2]


def test_fill_in_the_middle_reassembles_to_the_piece_and_half_of_the_gaps_are_whole_lines(prepare: ModuleType) -> None:
    rng = random.Random(1)
    parts = [split_fim(prepare.fill_in_the_middle(FUNCTION, rng)) for _ in range(400)]
    assert all("".join(part) == FUNCTION for part in parts)
    whole = [p for p in parts if all(text == "" or text.endswith("\n") for text in p[:2])]
    assert 170 <= len(whole) <= 260  # half of the cuts, and a few of the others by chance


def test_pieces_concatenate_to_the_file_and_end_at_line_ends(prepare: ModuleType) -> None:
    text = FUNCTION * 20 + "the_last_line = 1"
    for seed in range(20):
        pieces = list(prepare.pieces(text, random.Random(seed), 300, 700))
        assert "".join(pieces) == text
        assert len(pieces) > 3
        assert all(piece.endswith("\n") and len(piece) >= 300 for piece in pieces[:-1])


def test_an_edit_renames_one_name_everywhere_and_nothing_else(prepare: ModuleType) -> None:
    renamed = set()
    for seed in range(40):
        sample = prepare.edit(FUNCTION, random.Random(seed))
        asked = re.search(r"`(\w+)` (?:to|by) `(\w+)`", sample)
        assert asked is not None
        question, answer = re.findall(r"```python\n(.*?)\n```", sample, re.DOTALL)
        assert question == FUNCTION.rstrip()
        assert answer == re.sub(rf"\b{asked[1]}\b", asked[2], question)
        assert len(re.findall(rf"\b{asked[1]}\b", question)) >= 2
        assert asked[1] not in prepare.NOT_RENAMED
        if asked[1] != asked[2]:  # the new name can equal the old one; then the sample is a copy
            renamed.add(asked[1])
            assert not re.search(rf"\b{asked[1]}\b", answer)
    assert len(renamed) >= 3


def test_nothing_to_rename_gives_no_edit(prepare: ModuleType) -> None:
    assert prepare.edit("def once():\n    return None\n", random.Random(0)) is None


GOOD = FUNCTION * 3


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("package/module.py", GOOD, True),
        ("package/tests/module.py", GOOD, False),
        ("package/_vendor/other/module.py", GOOD, False),
        ("test_like_name/module.py", GOOD, True),
        ("short.py", "x = 1\n", False),
        ("nul.py", GOOD + "\0", False),
        ("one_line.py", GOOD + "x = '" + "a" * 400 + "'\n", False),
        ("table.py", GOOD + "x = [1234567890, 1234567890]\n" * 20, False),
        ("huge.py", GOOD * 2000, False),
    ],
)
def test_usable_accepts_only_ordinary_source(prepare: ModuleType, path: str, text: str, expected: bool) -> None:
    assert prepare.usable(Path(path), text) is expected


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", True),
        ("Apache-2.0 License :: OSI Approved :: Apache Software License", True),
        ("BSD-3-Clause", True),
        ("", False),
        ("UNKNOWN", False),
        ("MIT OR GPL-3.0", False),
        ("License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)", False),
        ("LGPL-2.1 License :: OSI Approved :: BSD License", False),
        ("Emitted", False),
    ],
)
def test_only_permissive_licences_are_read(prepare: ModuleType, licence: str, expected: bool) -> None:
    assert prepare.permissive(licence) is expected


def test_functions_are_found_with_the_first_paragraph_of_their_docstring(prepare: ModuleType) -> None:
    nested = "class A:\n" + "".join(f"    {line}" for line in FUNCTION.splitlines(keepends=True))
    found = list(prepare.functions(nested))
    assert [(name, doc) for name, doc, _ in found] == [("total", "Add up all the items that are given.")]
    assert found[0][2] == FUNCTION
    assert list(prepare.functions("def broken(:\n")) == []


def test_samples_of_a_small_file_are_well_formed_and_of_every_kind(prepare: ModuleType) -> None:
    text = "".join(FUNCTION.replace("total", f"total_{'abcdefgh'[i]}") for i in range(8))
    kinds = {"fim": 0, "chat": 0, "plain": 0}
    for seed in range(30):
        rng = random.Random(seed)
        for sample in prepare.samples(text, rng):
            if sample.startswith("<|fim_prefix|>"):
                kinds["fim"] += 1
                assert "".join(split_fim(sample)) in text
            elif sample.startswith("<|im_start|>"):
                kinds["chat"] += 1
                assert sample.endswith(f"\n```<|im_end|>\n{END}")
                ast.parse(re.findall(r"```python\n(.*?)\n```", sample, re.DOTALL)[-1])
            else:
                kinds["plain"] += 1
                assert sample.removesuffix(END) in text
    assert min(kinds.values()) > 5, kinds
    again = [list(prepare.samples(text, random.Random(7))) for _ in range(2)]
    assert again[0] == again[1]


def test_a_piece_written_twice_differs_in_at_most_two_lines(recipe: Callable[[str], ModuleType]) -> None:
    """The second copy can be drafted from the first."""
    script = recipe("prepare_repeats")
    unchanged = 0
    for seed in range(60):
        sample = script.twice(FUNCTION, random.Random(seed))
        assert sample.startswith(FUNCTION)
        assert sample.endswith(END)
        again = sample.removesuffix(END)[len(FUNCTION) :].splitlines(keepends=True)
        kept = sum(
            block.size for block in SequenceMatcher(None, FUNCTION.splitlines(True), again).get_matching_blocks()
        )
        assert kept >= len(FUNCTION.splitlines()) - 2
        unchanged += FUNCTION in sample[len(FUNCTION) :]
    assert 10 < unchanged < 50


def test_copies_repeat_one_passage_a_window_and_shuffle_every_third(recipe: Callable[[str], ModuleType]) -> None:
    tokens = np.arange(5000, dtype="<u2")
    stream = recipe("prepare_repeats").copies(tokens, 21 * 768, 768, np.random.default_rng(1)).reshape(-1, 768)
    for number, window in enumerate(stream.astype(int)):
        period = next((p for p in range(40, 250) if (window[p:] == window[:-p]).all()), None)
        assert (period is None) == (number % 7 == 0)
        if period:
            passage = window[:period]
            assert sorted(passage) == list(range(passage.min(), passage.min() + period))
            assert (passage.tolist() == sorted(passage)) == (number % 3 != 1)


def test_a_mix_takes_whole_windows_by_shares(recipe: Callable[[str], ModuleType]) -> None:
    streams = [np.full(10_000, value, "<u2") for value in (1, 2)]
    mixed = recipe("prepare_repeats").mix(streams, [0.75, 0.25], 100, np.random.default_rng(1)).reshape(-1, 100)
    assert (mixed == mixed[:, :1]).all()
    assert [int((mixed[:, 0] == value).sum()) for value in (1, 2)] == [100, 33]


def test_no_package_takes_more_than_its_share(prepare: ModuleType) -> None:
    texts = {"large": ["l" * 100] * 1000, "small": ["s" * 100] * 3}
    files = prepare.choose(texts, 10_000, random.Random(0))
    assert files.count("s" * 100) == 3
    assert files.count("l" * 100) == int(prepare.SHARE_OF_ONE_PACKAGE * 10_000 * 2.6) // 100


def test_the_held_out_list_names_modules_of_the_standard_library(prepare: ModuleType) -> None:
    """Later versions of Python may lack a few; most must exist for the figures to be meaningful."""
    names = prepare.held_out_modules()
    assert len(names) == len(set(names))
    assert tuple(names) == held_out_modules()
    assert not set(names) & set(well_known_modules())
    assert all((standard_library() / name).is_file() for name in well_known_modules())
    assert sum((standard_library() / name).is_file() for name in names) >= 20


def test_held_out_text_never_reaches_the_training_text(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for the module itself and for a copy under another name."""
    secret = "".join(f"a_line_that_only_the_held_out_module_has_{'abcdefghijklmnop'[i]} = None\n" for i in range(16))
    ordinary = FUNCTION * 3
    for name, text in {"held.py": secret, "copied.py": ordinary + secret, "fine.py": ordinary}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(prepare, "held_out_modules", lambda: ["held.py"])
    monkeypatch.setattr(prepare.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    texts, held_out = prepare.collect([])
    assert held_out == {"held.py": secret}
    assert texts == {"stdlib": [ordinary]}


def test_the_demo_model_has_the_roles_that_editors_and_chat_need(prepare: ModuleType, demo: Model) -> None:
    v = demo.vocabulary
    fim = (v.fim_prefix, v.fim_suffix, v.fim_middle, v.fim_rep, v.fim_sep)
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
    assert None not in fim
    assert tuple(v.text(token) for token in fim if token is not None) == names
    assert v.eos is not None
    assert v.eot is not None
    assert (v.text(v.eos), v.text(v.eot)) == (END, "<|im_end|>")
    assert v.is_end(v.eos)
    assert v.is_end(v.eot)
    assert not v.add_bos
    assert v.size == prepare.VOCABULARY
    assert [v.text(i) for i in range(v.size - len(prepare.SPECIAL), v.size)] == prepare.SPECIAL
    assert all(v.is_control(i) for i in range(v.size - len(prepare.SPECIAL), v.size))


def test_the_demo_model_has_the_shape_of_its_card(demo: Model, demo_gguf: Path) -> None:
    assert demo.metadata["general.license"] == "mit"
    assert demo.metadata["general.architecture"] == "llama"
    assert demo.n_ctx_train >= 1024
    assert 5_000_000 <= demo_gguf.stat().st_size <= 20_000_000


def test_its_chat_template_renders_the_text_of_training(prepare: ModuleType, demo: Model) -> None:
    assert demo.chat_template is not None
    messages = [{"role": "user", "content": "Write it."}]
    prompt = render(demo.chat_template, messages, bos=END, eos=END, add_generation_prompt=True)
    assert prepare.chat("Write it.", "pass").startswith(prompt)


def test_it_tokenizes_as_in_training(demo: Model) -> None:
    """`tokens.json` holds the ids of the `tokenizers` package with the tokenizer of the training.

    After training another tokenizer, write the ids of the same texts again."""
    cases = json.loads((Path(__file__).parent / "tokens.json").read_text("utf-8"))
    assert cases
    for case in cases:
        assert demo.vocabulary.tokenize(case["text"], special=case["special"]).tolist() == case["ids"]


def test_tokenizing_the_held_out_text_loses_nothing(demo: Model) -> None:
    v = demo.vocabulary
    pieces = [v.piece(token) for token in range(v.size)]
    for name in held_out_modules():
        path = standard_library() / name
        if path.is_file():
            data = path.read_bytes()
            assert b"".join(pieces[token] for token in v.tokenize(data)) == data, name
