"""Tuning keeps what the user fixed and chooses the rest, and each measurement has its own key."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.synthetic import Shape, synthetic
from benchmarks.tiny import tiny_adapter
from rest_local import Engine
from rest_local.calibration import tuning
from rest_local.calibration.cost import ESTIMATED, SIZES, CostCurve
from rest_local.calibration.measuring import CHECKED, Measured, Timing, measure
from rest_local.calibration.settings import SAME, Fidelity, candidates
from rest_local.calibration.tuning import Tuning
from rest_local.decoding.opening import key_of
from rest_local.errors import ModelError
from rest_local.llama import row_wise
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.options import Adapter, ModelOptions
from rest_local.paths import cache_dir

TinyModel = Callable[..., Path]


def choices(options: ModelOptions, fidelity: Fidelity) -> list[tuple[bool, str, str]]:
    settings = candidates(ContextSettings(), options, fidelity)
    return [(s.flash_attention, s.cache_type_k, s.cache_type_v) for s in settings]


@pytest.mark.parametrize("fidelity", ["fast", "exact"])
def test_fixed_options_restrict_the_candidates(fidelity: Fidelity) -> None:
    assert choices(ModelOptions(cache_type_k="q8_0", cache_type_v="q4_0"), fidelity) == [(True, "q8_0", "q4_0")]
    on = choices(ModelOptions(flash_attention="on"), fidelity)
    assert on
    assert all(flash for flash, _, _ in on)
    off = choices(ModelOptions(flash_attention="off"), fidelity)
    assert off
    assert not any(flash for flash, _, _ in off)
    assert all(v in ("f16", "bf16") for _, _, v in off)
    only_k = choices(ModelOptions(cache_type_k="f32"), fidelity)
    assert all(k == "f32" for _, k, _ in only_k)
    assert len(only_k) == len(set(only_k))


def test_settings_of_the_same_bits_are_known_ones_or_none() -> None:
    assert choices(ModelOptions(), "same") == list(SAME)
    assert choices(ModelOptions(cache_type_k="q8_0"), "same") == [(True, "q8_0", "f16")]
    one_type = [(True, "f16", "f16")] if row_wise.available() else []
    assert choices(ModelOptions(cache_type_k="f16"), "same") == one_type
    for fixed in ({"flash_attention": "off"}, {"cache_type_v": "bf16"}):
        assert choices(ModelOptions(**fixed), "same") == []


@pytest.mark.usefixtures("own_cache", "measured_prices")
@pytest.mark.parametrize("exact", [None, False])
def test_a_cpu_takes_settings_of_the_same_bits_unless_told_otherwise(tiny_model: TinyModel, exact: bool | None) -> None:
    """Weights of Q8_0 have the same bits in every batch, F32 ones have not."""
    for quant, same in (("Q8_0", exact is None), ("F32", False)):
        with Engine.load(tiny_model("llama", quant=quant), n_ctx=256, exact=exact) as engine:
            settings = engine.settings
            found = (settings["flash_attention"], settings["cache_type_k"], settings["cache_type_v"])
            assert (found in SAME) is same
            assert engine.decoder.context.capability.kind == ("chain" if same else "tree")
            assert not engine.decoder.context.exact


def _generate(engine: Engine) -> list[int]:
    stream = engine.generate("for i in range(3):", max_tokens=40)
    for _ in stream:
        pass
    return stream.result.tokens


@pytest.mark.parametrize("exact", [False, True])
def test_an_engine_uses_the_given_options(tiny_model: TinyModel, exact: bool) -> None:
    options = ModelOptions(
        flash_attention="on", cache_type_k="q8_0", cache_type_v="bf16", n_batch=128, n_ubatch=32, threads_batch=1
    )
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=256, threads=1, exact=exact, options=options) as engine:
        assert engine.settings["flash_attention"] is True
        assert (engine.settings["cache_type_k"], engine.settings["cache_type_v"]) == ("q8_0", "bf16")
        assert (engine.settings["n_batch"], engine.settings["n_ubatch"]) == (128, 32)
        assert (engine.settings["threads"], engine.settings["threads_batch"]) == (1, 1)
        assert len(_generate(engine)) == 40


@pytest.mark.parametrize("exact", [False, True])
def test_an_impossible_setting_is_refused_with_its_cause(tmp_path: Path, exact: bool) -> None:
    """Heads of 16 cannot be cut into blocks of 32."""
    shape = Shape(layers=1, width=128, heads=8, kv_heads=8, feed=256, vocab=512, tied=True)
    path = synthetic(shape, "Q8_0", tmp_path / "narrow.gguf")
    with pytest.raises(ModelError, match="does not divide") as caught:
        Engine.load(path, n_ctx=128, exact=exact, options=ModelOptions(flash_attention="on", cache_type_k="q8_0"))
    assert "\n" not in str(caught.value)
    Engine.load(path, n_ctx=128, exact=exact).close()


def test_each_adapter_has_its_own_measurements_and_history(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("llama", quant="Q8_0", seed=31)
    one, two = (tiny_adapter("llama", tmp_path / f"{seed}.gguf", seed=seed, strength=0.1) for seed in (1, 2))
    plain = ModelOptions()
    several = [plain, *(ModelOptions(lora=(Adapter(p, s),)) for p, s in ((one, 1.0), (one, 0.5), (two, 1.0)))]
    answers, keys = [], []
    before = set((cache_dir() / "tuning").glob("*.json"))
    for options in (*several, *several[2:]):
        with Engine.load(path, n_ctx=128, threads=1, options=options) as engine:
            answers.append(_generate(engine))
            keys.append(key_of(engine.model))
    assert len(set((cache_dir() / "tuning").glob("*.json")) - before) == len(several)
    assert keys[2:4] == keys[4:]
    assert len(set(keys)) == 4
    assert answers[0] != answers[1] != answers[3] != answers[0]


@pytest.mark.parametrize(("n_batch", "n_ubatch", "exact"), [(1, 0, False), (9, 4, True), (100_000, 0, True)])
def test_batches_of_any_size_generate_the_same_tokens(
    tiny_model: TinyModel, n_batch: int, n_ubatch: int, exact: bool
) -> None:
    path = tiny_model("llama")
    with Engine.load(path, n_ctx=128, threads=1) as engine:
        whole = _generate(engine)
    options = ModelOptions(n_batch=n_batch, n_ubatch=n_ubatch)
    with Engine.load(path, n_ctx=128, threads=1, options=options, exact=exact) as engine:
        assert _generate(engine)[:3] == whole[:3]  # further on a near-tie may fall the other way


@pytest.mark.parametrize("n_batch", [2, 3])
def test_more_prompts_than_a_batch_has_rows_are_answered(tiny_model: TinyModel, n_batch: int) -> None:
    options = ModelOptions(n_batch=n_batch)
    with Engine.load(tiny_model("llama"), n_ctx=128, threads=1, options=options, exact=False, slots=4) as engine:
        asked = [engine.request(f"def f{i}(", max_tokens=5) for i in range(6)]
        assert [len(each.result.tokens) for each in engine.batch(asked)] == [5] * 6


def stored() -> list[Path]:
    return sorted((cache_dir() / "tuning").glob("*.json"))


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path))


@pytest.mark.usefixtures("own_cache", "measured_prices")
def test_the_first_run_times_few_steps_and_stays_provisional(tiny_model: TinyModel) -> None:
    """The bound counts tokens, not seconds: a batch of n tokens costs at most n plain steps."""
    path, spent = tiny_model("llama"), list[int]()
    decode = Context.decode

    def counted(context: Context) -> int:
        spent.append(context.batch.n_tokens)
        return decode(context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "decode", counted)
        engine = Engine.load(path, n_ctx=256)
    with engine:
        # Where the weights are not the same in every batch, the first setting ends after 12 tokens.
        assert 0 < sum(spent) <= 12 + 8 + sum(CHECKED)
        assert engine.decoder.context.tuning.state()["state"] == "provisional"
        assert engine.decoder.context.tuning.state()["estimated_from"]
        assert engine.decoder.context.tuning.self_test == {}
        engine.decoder.context.compare()
        assert engine.decoder.context.tuning.self_test["rows"] >= 24
    (file,) = stored()
    assert json.loads(file.read_text())["final"] is False


@pytest.fixture
def tuned_model(own_cache: None, tiny_model: TinyModel) -> Path:
    """Return a model whose tuning is the only one in the cache."""
    path = tiny_model("llama")
    Engine.load(path, n_ctx=128).close()
    return path


def test_another_context_size_or_slot_count_needs_no_new_measurement(
    tuned_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "first_steps", lambda *_: pytest.fail("measured again"))
    for n_ctx, slots, cells in ((128, 1, None), (512, 3, None), (256, 2, 300)):
        with Engine.load(tuned_model, n_ctx=n_ctx, slots=slots, cells=cells) as engine:
            assert engine.n_ctx == n_ctx
            assert len(engine.decoder.slots) == slots
            assert len(_generate(engine)) > 0
    assert len(stored()) == 1


def tuning_of(curve: CostCurve) -> Tuning:
    return Tuning(ContextSettings(), curve, {}, False, 1e9)


def damage() -> list[str]:
    whole = json.loads(tuning_of(CostCurve.from_points([0, 512], SIZES, [SIZES, SIZES])).to_json())
    curve = whole["curve"]
    negative, falling = ([[-1.0] * 64] * 2), ([[64.0 - n for n in range(64)]] * 2)
    changes = [
        {"format": 7}, {"format": "8"}, {"settings": None}, {"settings": {"n_ctx": 2}}, {"curve": None}, {"curve": []},
        {"curve": curve | {"ms": negative}}, {"curve": curve | {"ms": falling}}, {"curve": curve | {"contexts": [0]}},
        {"curve": curve | {"ms": [[float("nan")] * 64] * 2}}, {"measured_at": "today"}, {"measured_at": float("inf")},
        {"self_test": 3}, {"self_test": {"rows": "many"}},
        {"curve": curve | {"covariance": [[1e9]]}},
    ]  # fmt: skip
    return ["", "{", "[]", "null", "\0" * 99, *(json.dumps(whole | change) for change in changes)]


@pytest.mark.parametrize("text", damage())
def test_a_damaged_or_foreign_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Tuning.from_json(text)


def test_a_damaged_file_is_measured_again_with_a_warning(tuned_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = stored()
    whole = json.loads(file.read_text())
    for text in ("", json.dumps(whole | {"curve": whole["curve"] | {"ms": [[-1.0] * 64] * 2}})):
        file.write_text(text)
        caplog.clear()
        with Engine.load(tuned_model, n_ctx=128) as engine:
            assert (engine.decoder.context.tuning.curve.at(100) > 0).all()
        assert "measuring again" in caplog.text
        assert Tuning.from_json(file.read_text()).curve


def test_a_partial_curve_is_never_stored_as_final() -> None:
    partial = CostCurve.from_points([0, 4096], SIZES, [[10.0 * n**0.5 for n in SIZES]] * 2, ESTIMATED)
    assert not tuning_of(partial).final
    for busy in (True, False):
        for _ in range(40):
            for n in (1, 2, 4, 8):
                partial.observe(n, 20, 10.0 * n**0.5, busy)
        again = Tuning.from_json(tuning_of(partial).to_json())
        assert not again.final  # no size from 16 on was observed
        assert json.loads(again.to_json())["final"] is False
    whole = measure(lambda n, n_ctx: Timing(10.0 * n**0.5 + 0.001 * n_ctx), [64, 512, 2048]).curve
    assert Tuning.from_json(tuning_of(whole).to_json()).final


@pytest.mark.usefixtures("own_cache", "measured_prices")
@pytest.mark.parametrize("complete", [True, False])
def test_a_thorough_measurement_is_stored_if_it_is_complete(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    path = tiny_model("llama")
    steep = CostCurve.from_points([64, 512], SIZES, [[500.0 * n**0.5 for n in SIZES]] * 2)
    noise = 0.01 if complete else 0.5
    found = Measured(steep, complete, noise, 0.0)
    monkeypatch.setattr(tuning, "measure", lambda *_, **__: found)
    with Engine.load(path, n_ctx=256) as engine:
        before = engine.decoder.context.tuning.curve.expected(64)[0]
        assert engine.decoder.context.tune() is found
    with Engine.load(path, n_ctx=256) as engine:
        plain = engine.decoder.context.tuning.curve.expected(64)[0]
        if complete:
            assert plain == pytest.approx(500.0)
            assert engine.decoder.context.tuning.state()["estimated_from"] is None
        else:
            assert before < plain
            assert engine.decoder.context.tuning.state()["state"] == "provisional"
            assert engine.decoder.context.tuning.state()["estimated_from"]
