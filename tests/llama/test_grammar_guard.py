"""Grammars that would hold up llama.cpp are refused before it sees them, and ordinary ones are not.

The oracle is a simulator of its own, on tuples: what is let pass is read in few ways, counted over all short texts; and
llama.cpp itself, token by token: it takes the texts that the rules as read here take."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rest_local.errors import OptionError
from rest_local.llama import gbnf, grammar_guard
from rest_local.llama.constraint import Constraint
from rest_local.llama.gbnf import MOST_ELEMENTS, Grammar, read
from rest_local.llama.grammar import json_object, json_schema
from rest_local.llama.grammar_guard import check
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary

ORDINARY = {
    "json": json_object(),
    "schema": json_schema({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(12)}}),
    "sums": r"""
        root   ::= (sum "=" blank value "\n")+   # one a line
        sum    ::= value ([-+*/] blank value)*
        value  ::= name | number | "(" blank sum ")" blank
        name   ::= [a-z] [a-z0-9]* blank
        number ::= [0-9]+ blank
        blank  ::= [ \t\n]*""",
    "list": r"root ::= entry+" + "\n" + r'entry ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"',
    "chess": r"""
        root   ::= "1. " half " " half "\n" ([1-9] [0-9]? ". " half " " half "\n")+
        half   ::= (pawn | piece | castle) [+#]?
        piece  ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
        pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
        castle ::= "O-O" "-O"?""",
    "like C": r"""
        root      ::= function*
        function  ::= type name "(" (type name)? ")" "{" statement* "}"
        type      ::= ("int" | "float" | "char") blank
        name      ::= [a-zA-Z_] [a-zA-Z_0-9]*
        statement ::= (type name blank "=" blank sum ";") | (name blank "=" blank sum ";") |
                      (name blank "(" list? ")" ";") | ("return" blank sum ";") |
                      ("while" "(" test ")" "{" statement* "}") |
                      ("if" "(" test ")" "{" statement* "}" ("else" "{" statement* "}")?) | comment
        test      ::= sum ("<=" | "<" | "==" | "!=" | ">=" | ">") sum
        sum       ::= product (("+" | "-") product)*
        product   ::= factor (("*" | "/") factor)*
        factor    ::= name | [0-9]+ | "-" factor | name "(" list? ")" | "(" sum ")"
        list      ::= sum ("," blank sum)*
        comment   ::= "//" [^\n]* "\n"
        blank     ::= [ \t\n]+""",
    "200 words": "root ::= " + " | ".join(f'"word {number}"' for number in range(200)),
    "long": 'root ::= "a"{0,500} "b"{3} [c-e]{2,}',
    "lines": 'root ::= (line "\\n")*\nline ::= [^\\n]*',
    "a few ways": 'root ::= ("a"?){5}',
    "what is repeated may be empty": 'root ::= ("a"?)*',
    "the same by hand": 'maybe ::= | "x"\nhidden ::= maybe\nroot ::= hidden root | "y"',
    "tokens": 'root ::= <think> !<[3]> "x" .+',
}
SLOW = {
    "the next may be skipped": 'root ::= ("a"?){200}',
    "only 20 of them": 'root ::= ("a"?){20}',
    "behind a beginning": 'root ::= "go: " (" "? [a-z]?){60} "."',
    "repeated and repeated": 'root ::= ("a"+)+',
    "alternatives that begin alike, in each other": 'root ::= "(" root ")" | "(" root "]" | "x"',
    "after some characters": 'root ::= "{name:" root "}" | "{name:" root "}!" | "x"',
    "deep inside": 'root ::= "x" [0-9]{3} item\nitem ::= "[" (item | item "!") "]" | "."',
    "too many at once": "root ::= " + " | ".join(f'"{number}"' for number in range(1100)),
}
ENDLESS = {
    "itself": 'root ::= root "a" | "b"',
    "nothing but itself": 'root ::= root | "a"',
    "behind what turns out to be empty": 'maybe ::= | "x"\nhidden ::= maybe\nroot ::= hidden root "z" | "y"',
    "in a ring through it": 'maybe ::= "x"?\nroot ::= maybe one\none ::= maybe root "z" | "y"',
    "in a ring": 'root ::= one\none ::= two "1"\ntwo ::= one "2" | "2"',
}
LARGE = {
    "gigabytes": 'root ::= "' + "a" * 5000 + '"{2000}',
    "a million bytes": 'root ::= "' + "a" * 1_000_000 + '"',
    "a million ranges": "root ::= [" + "a" * 1_000_000 + "]",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_grammars_pass(name: str) -> None:
    check(ORDINARY[name])


@pytest.mark.parametrize("name", SLOW)
def test_what_can_be_read_in_too_many_ways_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="too many ways"):
        check(SLOW[name])


@pytest.mark.parametrize("pattern", ["^([a-z]+)+$", "^(a|aa)*b$", "(x+x+)+y"])
def test_patterns_of_schemas_that_can_be_read_in_too_many_ways_are_refused(pattern: str) -> None:
    with pytest.raises(OptionError, match=r"pattern .*too many ways"):
        json_schema({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})


@pytest.mark.parametrize("name", ENDLESS)
def test_what_begins_with_itself_is_refused(name: str) -> None:
    """Where that is behind a rule that turns out to be empty llama.cpp does not notice: its stacks grow without end."""
    with pytest.raises(OptionError, match="begins with itself"):
        check(ENDLESS[name])


@pytest.mark.parametrize("name", LARGE)
def test_what_is_written_out_to_too_much_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"more than {MOST_ELEMENTS} elements"):
        check(LARGE[name])


def _chain(count: int, ways: int) -> str:
    rules = [f"r{number} ::= " + " | ".join([f"r{number + 1}"] * ways) for number in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "x"'])


@pytest.mark.parametrize(("count", "ways"), [(40, 2), (20_000, 1)])
def test_ways_through_the_beginnings_of_rules_are_counted(count: int, ways: int) -> None:
    with pytest.raises(OptionError, match="the beginning of rule"):
        check(_chain(count, ways))
    check(_chain(count // 200 + 1, ways))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rule `root`"),
        ('other ::= "x"', "no rule `root`"),
        ("root ::= other", "`other` is used and not defined"),
        ("root = 'x'", "`::=` is missing"),
        ("::=", "name is missing"),
        ('root ::= ("a"', r"`\)` is missing"),
        ('root ::= "a")', "has to end here"),
        ('root ::= "a', "does not end"),
        ("root ::= [a", "does not end"),
        (r'root ::= "\q"', "escape"),
        ("root ::= *", "nothing precedes"),
        ('root ::= ("a" | +)', "nothing precedes"),
        ('root ::= "a"{}', "a repetition is"),
        ('root ::= "a"{3,2}', "the lower number first"),
        ('root ::= "a"{2001}', "at most 2000"),
        ('root ::= "x"\nroot2 := "y"', "line 2"),
        ('root ::= "x" # ' + "long" * 300_000, "longer than"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "nested deeper"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        check(text)


def test_classes_are_the_characters_they_name() -> None:
    (((element,),),) = (read(r"root ::= [^a-c\x64\]-]").rules,)
    assert element == [((0, 0x2C), (0x2E, 0x5C), (0x5E, 0x60), (0x65, gbnf.LAST))]


# An oracle on tuples of what is left to read, with none of the guard's numbers.
Left = tuple[gbnf.Element, ...]


def _begun(grammar: Grammar, left: Left) -> set[Left]:
    found: set[Left] = set()
    todo, seen = [left], {left}
    while todo:
        here = todo.pop()
        if not here or not isinstance(here[0], int):
            found.add(here)
            continue
        for sequence in grammar.rules[here[0]]:
            longer = (*sequence, *here[1:])
            if longer not in seen:
                seen.add(longer)
                todo.append(longer)
    return found


def _read_on(grammar: Grammar, ways: Counter[Left], character: str) -> Counter[Left]:
    after: Counter[Left] = Counter()
    for left, count in ways.items():
        if left and any(low <= ord(character) <= high for low, high in left[0]):  # type: ignore[union-attr]
            for begun in _begun(grammar, left[1:]):
                after[begun] += count
    return after


def _most(grammar: Grammar, length: int) -> tuple[int, int]:
    """Over all texts of a and b: the most stacks at a time, the most ways to read one, over all its beginnings."""
    most_stacks = most_ways = 0
    start = Counter(_begun(grammar, (grammar.root,)))
    for text in itertools.product("ab", repeat=length):
        ways, total = start, 0
        for character in text:
            ways = _read_on(grammar, ways, character)
            total += sum(ways.values())
            most_stacks = max(most_stacks, len(ways))
        most_ways = max(most_ways, total)
    return most_stacks, most_ways


_LEAVES = st.sampled_from(['"a"', '"b"', "[ab]", '"ab"', "one", "two", '""'])
_BODIES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(" ".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda ways: "(" + " | ".join(ways) + ")"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{0,2}", "{1,3}", "{2,}"])).map("(%s)%s".__mod__),
    ),
    max_leaves=6,
)
GRAMMARS = st.tuples(_BODIES, _BODIES, _BODIES).map("root ::= %s\none ::= %s\ntwo ::= %s\n".__mod__)


def _passes(text: str) -> bool:
    try:
        check.__wrapped__(text)  # not what was found with other bounds
    except OptionError:
        return False
    return True


@given(GRAMMARS)
@settings(max_examples=150)
def test_what_passes_is_read_in_few_ways(text: str) -> None:
    """With small bounds, so that small grammars come near them. Twice as many ways: of the texts of a length only some
    are followed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_guard, "MOST_STACKS", 8)
        patch.setattr(grammar_guard, "MOST_WAYS", 40)
        assume(_passes(text))
    stacks, ways = _most(read(text), 6)
    assert stacks <= 8
    assert ways <= 80


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Callable[..., Path]) -> Iterator[Vocabulary]:
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        yield model.vocabulary


@given(text=GRAMMARS, said=st.text("ab", max_size=8))
@settings(max_examples=150)
def test_llama_cpp_reads_the_rules_the_same(vocabulary: Vocabulary, text: str, said: str) -> None:
    assume(_passes(text))
    grammar = read(text)
    letters = {letter: int(vocabulary.tokenize(letter)[-1]) for letter in "ab"}
    ways = Counter(_begun(grammar, (grammar.root,)))
    constraint = Constraint(vocabulary, text)
    try:
        for letter in said:
            assert constraint.allows(int(vocabulary.ends[0])) == (() in ways)
            after = _read_on(grammar, ways, letter)
            assert constraint.follow(letters[letter]) == bool(after)
            ways = after or ways
    finally:
        constraint.close()
