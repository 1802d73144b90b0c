"""Find the current window of a next edit: the text that the answer writes again, with the edit in it.

Sweep's and Zeta's prompts are completions, as Zed and others build them; Continue's are the last message of a chat. The
formats are those of Zed (`crates/zeta_prompt` 0a854ec, `crates/edit_prediction/src/sweep_prompt.rs` 24e24d8), of
`run_model.py` in sweep-next-edit, and of Continue (`core/nextEdit` f6b44d7). A prompt that lacks one of the marks of
its format, or ends in another way, is an ordinary prompt.
"""

from __future__ import annotations

CURSORS = ("<|user_cursor|>", "<|user_cursor_is_here|>", "<|cursor|>")
SWEEP_FILE = "<|file_sep|>"
ZETA_1 = "<|editable_region_start|>\n", "\n<|editable_region_end|>"
ZETA_2 = "<<<<<<< CURRENT\n", "=======\n"
ZETA_2_END = ">>>>>>> UPDATED\n"
ZETA_2_ANSWER = "<[fim-middle]>"
MARKER = "<|marker_"
MERCURY = "<|code_to_edit|>\n", "\n<|/code_to_edit|>"
MERCURY_ENDS = "<|/edit_diff_history|>\n", "<|/edit_diff_history|>\n<|!@#IS_NEXT_EDIT!@#|>"


def window_of(prompt: str) -> str:
    """Return the answer to a next-edit prompt that changes nothing. It is empty for other prompts.

    It takes a few passes over the text: 0.1 ms for 100 kB.
    """
    if prompt.endswith("### Response:\n"):  # Zeta 1
        found = _marked(prompt, ZETA_1)
    elif prompt.endswith("### Response:"):  # Continue's Instinct, which answers without the marks
        found = _marked(prompt, ZETA_1).removeprefix(ZETA_1[0]).removesuffix(ZETA_1[1])
    elif prompt.endswith(MERCURY_ENDS):
        found = _marked(prompt, MERCURY)
    elif prompt.endswith(ZETA_2[1] + ZETA_2_ANSWER):
        old = _marked(prompt, ZETA_2).removeprefix(ZETA_2[0]).removesuffix(ZETA_2[1])
        found = old and old + ZETA_2_END
    elif prompt.endswith(ZETA_2_ANSWER):
        found = _zeta_2_1(prompt)
    else:
        found = _sweep(prompt)
    for cursor in CURSORS:
        found = found.replace(cursor, "")
    return found


def _marked(prompt: str, marks: tuple[str, str]) -> str:
    """Return the text from the last first mark to the second mark after it, with both, or an empty text."""
    _, begin, text = prompt.rpartition(marks[0])
    window, end, _ = text.partition(marks[1])
    return begin + window + end if begin and end else ""


def _zeta_2_1(prompt: str) -> str:
    """Return the blocks between numbered marks, those from the cursor on first.

    The answer is a block that changes, or several, between the marks that they stand between.
    """
    text = prompt.removesuffix(ZETA_2_ANSWER).rstrip("\n")
    first, last = text.rfind(f"{MARKER}1|>"), text.rfind(MARKER)
    number, end, after = text[last + len(MARKER) :].partition("|>")
    if first < 0 or first == last or not (number.isdecimal() and end) or after:
        return ""
    cursor = max(text.rfind(mark, first) for mark in CURSORS)
    block = max(text.rfind(MARKER, first, cursor), first)
    return text[block:] + text[first:block]


def _sweep(prompt: str) -> str:
    """Return the file `current/NAME`, where the prompt ends in the title of `updated/NAME` or in the file's beginning.

    There must also be an `original/NAME`.
    """
    before, updated, answer = prompt.rpartition(f"{SWEEP_FILE}updated/")
    name, line_end, begun = answer.partition("\n")
    before, current, window = before.rpartition(f"{SWEEP_FILE}current/{name}\n")
    is_whole = updated and current and f"{SWEEP_FILE}original/{name}\n" in before
    if not is_whole or SWEEP_FILE in window or SWEEP_FILE in answer:
        return ""
    return window.removeprefix(begun) if line_end else "\n" + window
