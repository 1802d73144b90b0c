"""Completion in bash of words with a colon, such as the model llama3.2:3b.

Bash splits the command line at colons and replaces only what follows the last one. `JoinedWords` joins the words again,
and offers only what follows. Of a word that really ends with a colon it takes the next one for a part.
"""

from __future__ import annotations

from click.shell_completion import BashComplete, CompletionItem


class JoinedWords(BashComplete):
    """Click's completion in bash, for words with colons as well."""

    _cut = 0  # characters of the word that bash keeps

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one that is completed, and that one."""
        args, last = super().get_completion_args()
        words: list[str] = []
        for word in (*args, last):
            if words and (word.startswith(":") or words[-1].endswith(":")):
                words[-1] += word
            else:
                words.append(word)
        if words[-1] != last:
            self._cut = words[-1].rindex(":") + 1
        return words[:-1], words[-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """What bash may put in the place of what follows the last colon."""
        items = super().get_completions(args, incomplete)
        for item in items:
            if item.type == "plain":
                item.value = item.value[self._cut :]
        return items
