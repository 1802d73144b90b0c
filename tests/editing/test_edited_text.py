"""The file in an answer: blocks of code in all the ways in which models write them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.editing.edit import NoFile, fence_for, file_in

OLD = "import os\n\n\ndef f(a):\n    return a\n"
NEW = "import os\n\n\ndef f(b):\n    return b\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"```py\n{NEW}```",
        f"```py\n{NEW}```\n",
        f"```\n{NEW}```",
        f"````python title='f.py'\n{NEW}````",
        f"~~~py\n{NEW}~~~",
        f"Sure! Here is the file:\n\n```python\n{NEW}```\n\nI renamed `a` to `b`.\n",
        NEW,
        NEW.removesuffix("\n"),
        f"```py\n{NEW}```".replace("\n", "\r\n"),
        f"First install it:\n\n```sh\npip install f\n```\n\nThen:\n\n```py\n{NEW}```\n",
        f"```py\n{NEW}```\n\nRun it with\n\n```sh\npython f.py\n```\n",
        "1. The file:\n\n   ```py\n" + "".join(f"   {line}\n".replace("   \n", "\n") for line in NEW.split("\n")[:-1])
        + "   ```\n",
    ],
)  # fmt: skip
def test_the_file_is_found(answer: str) -> None:
    assert file_in(answer, OLD) == NEW


def test_blocks_in_the_file_stay() -> None:
    inner = "# Title\n\n```sh\npip install f\n```\n\nText.\n\n```\nplain\n```\n\nEnd.\n"
    for outer in ("```", "````", "~~~"):
        for language in ("", "md"):
            assert file_in(f"Here:\n\n{outer}{language}\n{inner}{outer}\n\nDone.", inner) == inner, outer


def test_a_block_that_the_edit_adds_stays() -> None:
    old = "# Title\n\nText.\n\nEnd.\n"
    new = "# Title\n\nText.\n\n```\nplain\n```\n\nEnd.\n"
    assert file_in(f"```md\n{new}```\n", old) == new


@pytest.mark.parametrize(
    "answer",
    [
        f"```py\n{NEW}",
        f"```sh\npip install f\n```\n\n```py\n{NEW}",
        f"````py\n{NEW}```",
        f"```py\n{NEW}```py\n",
        f"```py\n{NEW}~~~",
    ],
)
def test_a_block_without_an_end_is_refused(answer: str) -> None:
    with pytest.raises(NoFile, match="has no end"):
        file_in(answer, OLD)


@pytest.mark.parametrize(("text", "fence"), [("a\n", "```"), ("```py\n```\n", "````"), ("   `````\n", "``````")])
def test_the_fence_is_longer_than_those_of_the_file(text: str, fence: str) -> None:
    assert fence_for(text) == fence


LINES = st.lists(st.sampled_from(["", "a", "  b", "```", "```py", "````", "    ```", "~~~", "`x`"]), min_size=1)


@given(LINES.filter(lambda lines: any(line.strip() for line in lines)), st.sampled_from(["", "Here it is:\n\n"]))
def test_an_answer_in_the_fence_that_was_asked_for_is_the_file_whatever_it_holds(lines: list[str], head: str) -> None:
    text = "".join(f"{line}\n" for line in lines)
    fence = fence_for(text)
    assert file_in(f"{head}{fence}py\n{text}{fence}\n\nDone.", text) == text


@given(st.text(st.sampled_from("`~a \n\r"), max_size=60), LINES)
def test_no_answer_breaks_it(answer: str, lines: list[str]) -> None:
    with suppress(NoFile):
        assert file_in(answer, "\n".join(lines)).endswith("\n")
