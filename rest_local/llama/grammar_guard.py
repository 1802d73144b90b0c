"""Whether llama.cpp may be given a grammar that somebody else wrote: what it costs is found out before.

llama.cpp follows every way to read a text side by side, one stack a way, and within one token it does not see that two
ways have met. `("a"?){200}` reads "aaa" in as many ways as three of 200 can be chosen, for every token that begins so,
in the thread that serves everybody. A rule that comes back to itself before a character was read makes llama.cpp's
stacks grow until memory ends where it does not notice (only a rule with an empty alternative does it take for one that
can be empty), and its own look for such rules takes as long as there are ways through the beginnings of rules.

Contract: `check` raises OptionError with the rule and the way out. Exact: what is written out to too much, rules that
begin with themselves, ways through the beginnings of rules. Of the ways to read a text it is a search in a bounded
number of steps, the most ambiguous texts first: it finds what multiplies, and cannot prove that nothing does (for
context-free grammars nobody can). What it lets pass wrongly is ended by `constraint`, which looks at the clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from rest_local.errors import OptionError
from rest_local.llama.gbnf import Grammar, Ranges, read

MOST_STACKS = 512  # ways to read a text that are apart: each is compared with every token
MOST_WAYS = 4096  # ways to read a token's text, met again or not
MOST_BEGINNINGS = 100_000
DEEPEST = 1000  # llama.cpp recurses once for each rule that begins with a rule
TOKEN_LENGTH = 16  # characters; tokens with more are rare
WATCHED_TEXTS = 4
MOST_STEPS = 40_000  # of the search: some 0.1 s


def check(text: str) -> None:
    """Raises OptionError where the grammar cannot be read or would hold up the engine."""
    grammar = read(text)
    _check_beginnings(grammar)
    _check_growth(grammar, _possibly_empty(grammar))
    _Search(grammar).run()


def _possibly_empty(grammar: Grammar) -> list[bool]:
    """Which rules can be empty, in time linear in the rules: each alternative counts what it waits for."""
    empty = [False] * len(grammar.rules)
    users: list[list[list[int]]] = [[] for _ in empty]
    found: list[int] = []
    for rule, alternatives in enumerate(grammar.rules):
        for sequence in alternatives:
            names = [element for element in sequence if isinstance(element, int)]
            if len(names) < len(sequence):
                continue
            waiting = [len(names), rule]
            for name in names:
                users[name].append(waiting)
            if not names:
                found.append(rule)
    while found:
        rule = found.pop()
        if empty[rule]:
            continue
        empty[rule] = True
        for waiting in users[rule]:
            waiting[0] -= 1
            if waiting[0] == 0:
                found.append(waiting[1])
    return empty


def _begins_with(grammar: Grammar, empty: list[bool], rule: int) -> Iterator[tuple[int, bool]]:
    """The rules that stand first in a rule, or behind what can be empty, as often as they do; and whether something
    stands behind them."""
    for sequence in grammar.rules[rule]:
        for at, element in enumerate(sequence, 1):
            if not isinstance(element, int):
                break
            yield element, at < len(sequence)
            if not empty[element]:
                break


def _check_growth(grammar: Grammar, empty: list[bool]) -> None:
    """A ring of rules that begin with each other, where one leaves something behind at each turn: stacks without end.
    Without, llama.cpp meets the same stack again and stops: `("a"?)*` is in order."""
    rings = _rings([[below for below, _ in _begins_with(grammar, empty, rule)] for rule in range(len(empty))])
    for rule, ring in enumerate(rings):
        if any(more and rings[below] == ring for below, more in _begins_with(grammar, empty, rule)):
            raise _endless(grammar.names[rule])


def _rings(edges: list[list[int]]) -> list[int]:
    """For each node the number of its strongly connected component (Kosaraju's way), without Python's stack."""
    back: list[list[int]] = [[] for _ in edges]
    for node, following in enumerate(edges):
        for other in following:
            back[other].append(node)
    found = [-1] * len(edges)
    for root in reversed(_left_in_order(edges)):
        todo = [root] if found[root] < 0 else []
        while todo:
            node = todo.pop()
            if found[node] < 0:
                found[node] = root
                todo += back[node]
    return found


def _left_in_order(edges: list[list[int]]) -> list[int]:
    """The nodes in the order in which a search in depth is done with them."""
    order: list[int] = []
    seen = [False] * len(edges)
    for first in range(len(edges)):
        path = [] if seen[first] else [(first, iter(edges[first]))]
        seen[first] = True
        while path:
            below = next(path[-1][1], None)
            if below is None:
                order.append(path.pop()[0])
            elif not seen[below]:
                seen[below] = True
                path.append((below, iter(edges[below])))
    return order


def _check_beginnings(grammar: Grammar) -> None:
    """llama.cpp's own look for rules that begin with themselves, which comes by at a rule once for every way to it:
    here those ways are counted. What it takes for possibly empty is what has an empty alternative."""
    empty = [any(not sequence for sequence in alternatives) for alternatives in grammar.rules]
    edges = [[below for below, _ in _begins_with(grammar, empty, rule)] for rule in range(len(empty))]
    ways, depth = [0] * len(edges), [0] * len(edges)
    for rule in _left_in_order(edges):  # what a rule begins with comes before it, but in a ring
        if any(ways[below] == 0 for below in edges[rule]):
            raise _endless(grammar.names[rule])
        ways[rule] = 1 + sum(ways[below] for below in edges[rule])
        depth[rule] = 1 + max((depth[below] for below in edges[rule]), default=0)
        _check_counts(grammar.names[rule], ways[rule], depth[rule])


def _endless(name: str) -> OptionError:
    return OptionError(
        f"grammar: rule `{name[:60]}` begins with itself before a character is read; repeat with * or put the "
        "recursion behind a character"
    )


def _check_counts(name: str, ways: int, depth: int) -> None:
    if ways > MOST_BEGINNINGS or depth > DEEPEST:
        raise OptionError(
            f"grammar: the beginning of rule `{name[:60]}` leads through more than "
            f"{MOST_BEGINNINGS if ways > MOST_BEGINNINGS else DEEPEST} rules; write fewer alternatives that begin alike"
        )


class _Stacks:
    """llama.cpp's stacks, as numbers: a stack is its top and the number of what is below; 0 is the empty one."""

    def __init__(self, grammar: Grammar) -> None:
        self._rules = grammar.rules
        self._names = grammar.names
        self._numbers: dict[tuple[int, int, int, int], int] = {}
        self.tops: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]  # rule, alternative, element, stack below
        self._opened: dict[int, list[int]] = {}
        self.steps = 0

    def first(self, root: int) -> list[int]:
        """Those before the first character."""
        found: dict[int, None] = {}
        for alternative in range(len(self._rules[root])):
            found |= dict.fromkeys(self.opened(self._pushed(root, alternative, 0, 0)))
        return list(found)

    def characters(self, stack: int) -> Ranges:
        """What can follow; nothing behind the end."""
        if stack == 0:
            return ()
        rule, alternative, at, _ = self.tops[stack]
        element = self._rules[rule][alternative][at]
        assert not isinstance(element, int)
        return element

    def after(self, stack: int) -> list[int]:
        """The stacks when a character of the top was read."""
        rule, alternative, at, below = self.tops[stack]
        return self.opened(self._pushed(rule, alternative, at + 1, below))

    def name(self, stack: int) -> str:
        return self._names[self.tops[stack][0]] if stack else "root"

    def opened(self, stack: int) -> list[int]:
        """The stacks with a character at the top that this one leads to. Remembered: they are the same every time."""
        if stack in self._opened:
            return self._opened[stack]
        found: list[int] = []
        todo, seen = [stack], {stack}
        while todo:
            self.steps += 1
            here = todo.pop()
            rule, alternative, at, below = self.tops[here]
            element = self._rules[rule][alternative][at] if here else ()
            if not isinstance(element, int):
                found.append(here)
                if len(found) > MOST_STACKS:
                    raise _too_many(self._names[rule])
                continue
            rest = self._pushed(rule, alternative, at + 1, below)
            for number in range(len(self._rules[element])):
                inner = self._pushed(element, number, 0, rest)
                if inner not in seen:
                    seen.add(inner)
                    todo.append(inner)
        self._opened[stack] = found
        return found

    def _pushed(self, rule: int, alternative: int, at: int, below: int) -> int:
        if at == len(self._rules[rule][alternative]):
            return below
        key = (rule, alternative, at, below)
        if key not in self._numbers:
            self._numbers[key] = len(self.tops)
            self.tops.append(key)
        return self._numbers[key]


class _Search:
    """Over texts, those first that are read in the most ways."""

    def __init__(self, grammar: Grammar) -> None:
        self._stacks = _Stacks(grammar)
        self._root = grammar.root
        self._seen: set[frozenset[tuple[int, ...]]] = set()
        self._todo: list[tuple[int, int, list[int]]] = []

    def run(self) -> None:
        self._found(self._stacks.first(self._root))
        turn = 0
        while self._todo and self._stacks.steps < MOST_STEPS:
            turn += 1
            _, _, stacks = heapq.heappop(self._todo) if turn % 2 else self._todo.pop(0)
            if turn % 2 == 0:
                heapq.heapify(self._todo)
            self._token(stacks)
            for ways in self._each(dict.fromkeys(stacks, 1)):
                self._found(list(ways))

    def _found(self, stacks: list[int]) -> None:
        """Stacks whose tops were met are not looked at again: recursion only makes what is below deeper."""
        if len(stacks) > MOST_STACKS:
            raise _too_many(self._stacks.name(stacks[-1]))
        tops = frozenset(self._near(stack) for stack in stacks)
        if stacks and tops not in self._seen:
            self._seen.add(tops)
            heapq.heappush(self._todo, (-len(stacks), len(self._seen), stacks))

    def _near(self, stack: int, count: int = 4) -> tuple[int, ...]:
        found: list[int] = []
        while stack and count:
            rule, alternative, at, stack = self._stacks.tops[stack]
            found += (rule, alternative, at)
            count -= 1
        return tuple(found)

    def _token(self, stacks: list[int]) -> None:
        """Texts of one token from here on: of each length the few that are read in the most ways."""
        found = [(0, dict.fromkeys(stacks, 1))]
        for _ in range(TOKEN_LENGTH):
            longer = [(total + sum(after.values()), after) for total, ways in found for after in self._each(ways)]
            found = heapq.nlargest(WATCHED_TEXTS, longer, key=lambda text: (sum(text[1].values()), text[0]))
            for total, ways in found:
                if total > MOST_WAYS:
                    raise _too_many(self._stacks.name(max(ways, key=lambda stack: ways[stack])))
            if all(sum(ways.values()) <= 1 for _, ways in found):
                return

    def _each(self, ways: dict[int, int]) -> Iterator[dict[int, int]]:
        """For each character that is told from others: the stacks behind it, and in how many ways each is reached."""
        ranges = {stack: self._stacks.characters(stack) for stack in ways}
        edges = sorted({edge for found in ranges.values() for low, high in found for edge in (low, high + 1)})
        for point in edges[:512]:
            found: dict[int, int] = {}
            for stack, count in ways.items():
                self._stacks.steps += 1
                if any(low <= point <= high for low, high in ranges[stack]):
                    for behind in self._stacks.after(stack):
                        found[behind] = found.get(behind, 0) + count
            if found:
                yield found
            if self._stacks.steps > MOST_STEPS:
                return


def _too_many(name: str) -> OptionError:
    return OptionError(
        f"grammar: a text can be read in too many ways (rule `{name[:60]}`), which would hold up the engine; write it "
        'so that the next character decides: "a"{0,200} for ("a"?){200}, and the common beginning of alternatives once'
    )
