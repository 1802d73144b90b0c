"""What is known of models without loading them, compared with what llama.cpp says once they are loaded."""

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp import llama_cpp as bindings
from support.toy import demo_model

from benchmarks.tiny import ARCHITECTURES
from rest_local import Engine
from rest_local.catalog import describe
from rest_local.catalog.describe import ModelFacts, header_of, list_models
from rest_local.errors import ModelInvalid
from rest_local.llama.context import ANY
from rest_local.llama.gguf import Gguf, read_gguf, shards_of
from rest_local.paths import cache_dir

MOST_ARCHITECTURES = 512
TinyModel = Callable[..., Path]
Put = Callable[..., Path]


@pytest.fixture
def own(no_models: Path) -> Callable[[Path], Path]:
    """Return a function that links a model's files into the user's own folder."""
    folder = no_models / "models"
    folder.mkdir()

    def link(path: Path) -> Path:
        for part in shards_of(path):
            (folder / part.name).symlink_to(part)
        return folder / path.name

    return link


def facts_of(stem: str) -> ModelFacts:
    (facts,) = [facts for facts in list_models() if facts.name == stem]
    return facts


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_header_says_what_llama_cpp_says(arch: str, tiny_model: TinyModel, own: Callable[[Path], Path]) -> None:
    path = own(tiny_model(arch))
    facts = facts_of(path.stem)
    with Engine.load(path, n_ctx=64, threads=1) as engine:
        model, kind, backend = engine.model, engine.decoder.context.capability.kind, engine.decoder.context.backend
        engine.generate("abc", max_tokens=1).wait()
        state = len(backend.save(0, partial=True)) if facts.header.state_bytes else 0
    assert (facts.bytes, facts.error) == (path.stat().st_size, "")
    assert facts.header.architecture == model.metadata["general.architecture"]
    assert facts.header.n_ctx_train == model.n_ctx_train
    assert facts.header.chat_template == (model.chat_template is not None)
    assert facts.header.vocabulary == model.vocabulary.name
    assert facts.header.drafting == kind
    assert facts.header.state_bytes <= state <= facts.header.state_bytes + 1024
    assert backend.rollback == (describe.snapshots_of(facts.header) if facts.header.state_bytes else ANY)


def test_a_damaged_model_is_listed_with_its_error(store: Put, tiny_model: TinyModel) -> None:
    whole = tiny_model("llama").read_bytes()
    store("models", "cut.gguf", content=whole[:500])
    store("models", "page.gguf", content=b"<!DOCTYPE html>" * 10)
    store("models", "part-00001-of-00002.gguf", content=whole)
    assert "truncated" in facts_of("cut").error
    assert facts_of("page").error == "is a web page, not a GGUF file"
    assert facts_of("part").error == "is in 2 files, of which part-00002-of-00002.gguf is not there"


@given(st.data())
def test_no_damage_is_more_than_an_error(data: st.DataObject) -> None:
    """A file with any bytes replaced, or cut anywhere, gives a header or ModelInvalid."""
    content = bytearray(demo_model().read_bytes()[:4096])
    at = data.draw(st.integers(24, len(content) - 9))
    content[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    path = cache_dir() / "damaged.gguf"
    path.write_bytes(bytes(content[: data.draw(st.integers(24, len(content)))]))
    try:
        found = read_gguf(path)
    except ModelInvalid:
        return
    assert found.values


def test_a_header_that_names_billions_is_refused_at_once(store: Put) -> None:
    key = b"tokenizer.ggml.tokens"
    array = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 1 << 40)
    path = store("models", "hostile.gguf", content=struct.pack("<4sIqq", b"GGUF", 3, 0, 1) + array + b"\0" * 4096)
    with pytest.raises(ModelInvalid, match="damaged or truncated in its header"):
        read_gguf(path)


def test_texts_of_a_header_reach_no_terminal_as_they_are() -> None:
    metadata = Gguf({"general.architecture": "llama\x1b[2J", "general.size_label": "7B\n"}, {}, 1)
    header = header_of(metadata, Path("x.gguf"))
    assert header.architecture.isprintable()
    assert header.parameters.isprintable()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"general.architecture": "llama", "general.type": "adapter"}, "adapter"),
        ({"general.architecture": "clip", "general.type": "mmproj"}, "mmproj"),
        ({"general.architecture": "clip"}, "mmproj"),
        ({"general.architecture": "llama"}, "vocabulary"),
    ],
)
def test_what_is_no_model_is_not_listed(values: dict[str, str], kind: str, no_models: Path) -> None:
    path = no_models / "models" / "other.gguf"
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, values["general.architecture"])
    if "general.type" in values:
        writer.add_type(values["general.type"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert header_of(read_gguf(path), path).kind == kind
    assert list_models() == []


def test_recurrent_architectures_are_those_of_llama_cpp() -> None:
    name = library_function("_Z13llm_arch_name8llm_arch", ctypes.c_char_p, ctypes.c_int)
    questions = ("_Z21llm_arch_is_recurrentRK8llm_arch", "_Z18llm_arch_is_hybridRK8llm_arch")
    is_one, is_other = (library_function(symbol, ctypes.c_bool, ctypes.POINTER(ctypes.c_int)) for symbol in questions)
    can = library_function("_Z29llm_arch_supports_rs_rollbackRK8llm_arch", ctypes.c_bool, ctypes.POINTER(ctypes.c_int))
    names = [name(number).decode() for number in range(MOST_ARCHITECTURES)]
    count = names.index("(unknown)") if "(unknown)" in names else names.index("unknown")
    assert count > 100
    numbers = [ctypes.byref(ctypes.c_int(number)) for number in range(count)]
    recurrent = [number for number in range(count) if is_one(numbers[number]) or is_other(numbers[number])]
    assert {names[number] for number in recurrent if can(numbers[number])} == describe.ROLLED_BACK


def library_function(symbol: str, result: type, argument: type) -> Callable[..., Any]:
    """Return a function of libllama that is no part of its interface, or skip the test without one."""
    try:
        function = getattr(bindings._lib, symbol)
    except AttributeError:
        pytest.skip(f"this build of llama.cpp does not export {symbol}")
    function.restype, function.argtypes = result, [argument]
    return function  # type: ignore[no-any-return]


def test_the_kv_cache_counts_each_layers_heads() -> None:
    keys = {
        "general.architecture": "x", "x.block_count": 3, "x.embedding_length": 1024, "x.attention.head_count": 8,
        "x.attention.head_count_kv": [2, 0, 4],
    }  # fmt: skip
    assert header_of(Gguf(keys, {}, 1), Path("x.gguf")).kv_bytes == (2 + 0 + 4) * (128 + 128) * 2  # type: ignore[arg-type]
