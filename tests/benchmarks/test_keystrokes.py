"""Keystrokes of recorded edits: their prompts are recognised, share their beginning, and cost less with drafts."""

import subprocess
from dataclasses import replace

import pytest
from support.toy import demo_model

from benchmarks.curves import load_curve
from benchmarks.next_edit import by_curve, by_model, places_of, sides_of, table, tokenized
from rest_local.api.next_edit import window_of
from rest_local.llama.model import Model

OLD = "".join(f"value_{number} = {number} * {number + 1}\n" for number in range(40))
NEW = OLD.replace("value_20 = 20 * 21\n", "value_20 = 20 * compute_more(21)\nother_20 = value_20\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Return the keystrokes of the only change of a repository."""
    folder = tmp_path_factory.mktemp("repository")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    for text in (OLD, NEW):
        (folder / "values.py").write_text(text)
        subprocess.run([*git, "add", "values.py"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "change"], check=True)
    (found,) = places_of(folder)
    return found


def test_a_keystroke_asks_for_the_window_with_the_change(place: list[tuple[str, str]]) -> None:
    assert [prompt[: prompt.index("updated:")] for prompt, _ in place] == [place[0][0].partition("updated:")[0]] * 4
    for letters, (prompt, answer) in zip((2, 3, 4, 5), place, strict=True):
        window = window_of(prompt).splitlines()
        assert window[10] == "value_20 = 20 * " + "compute_more"[:letters]
        assert len(window) == 21
        assert answer.splitlines() == [*window[:10], *NEW.splitlines()[20:22], *window[11:]]
        assert f"\n{OLD.splitlines()[20]}\n" in prompt


def test_the_replay_counts_the_tokens_that_are_not_cached(place: list[tuple[str, str]]) -> None:
    curve = load_curve("rtx3090-8b-q4_0")
    with Model.open(demo_model(), vocab_only=True) as model:
        times = by_curve([tokenized(place, model.vocabulary)], curve, model.n_vocab)
    assert {len(pairs) for pairs in times.values()} == {3}, "the first keystroke is not counted"
    (prompt, plain), (same, drafted) = times["plain"][0], times["window"][0]
    assert prompt == same
    assert drafted < plain / 2
    assert len(table("a curve", times)) == 1 + len(times)


def test_the_forward_passes_of_a_model_are_timed(place: list[tuple[str, str]]) -> None:
    with Model.open(demo_model(), vocab_only=True) as model:
        keystrokes = [replace(each, answer=each.answer[:24]) for each in tokenized(place[:2], model.vocabulary)]
        n_vocab = model.n_vocab
    times = by_model([keystrokes], demo_model(), n_vocab)
    assert list(times) == list(sides_of(load_curve("rtx3090-8b-q4_0"), n_vocab))
    assert all(prompt > 0 and answer > 0 for pairs in times.values() for prompt, answer in pairs)
