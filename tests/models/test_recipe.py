"""The demo model's recipe: the choice and the cuts of training text, and the metadata of the exported GGUF."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.spelling import text_of

from benchmarks.library import held_out_modules, standard_library, well_known_modules
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
    fim = (v.ids.fim_prefix, v.ids.fim_suffix, v.ids.fim_middle, v.ids.fim_rep, v.ids.fim_sep)
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
    assert None not in fim
    assert tuple(text_of(v, token) for token in fim if token is not None) == names
    assert v.ids.eos is not None
    assert v.ids.eot is not None
    assert (text_of(v, v.ids.eos), text_of(v, v.ids.eot)) == (END, "<|im_end|>")
    assert v.is_end(v.ids.eos)
    assert v.is_end(v.ids.eot)
    assert not v.ids.add_bos
    assert v.size == prepare.VOCABULARY
    assert [text_of(v, i) for i in range(v.size - len(prepare.SPECIAL), v.size)] == prepare.SPECIAL
    assert all(v.is_control(i) for i in range(v.size - len(prepare.SPECIAL), v.size))


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
