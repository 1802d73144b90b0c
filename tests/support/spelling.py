"""The tokens that spell a text, random text of a grammar, and a constraint that goes its own way from another one."""

import copy
from collections.abc import Sequence

import numpy as np

from rest_local.grammar import Grammar
from rest_local.grammar.constraint import Constraint
from rest_local.llama.loaded import bindings
from rest_local.llama.sampler import Sampler, Sampling
from rest_local.llama.vocabulary import Vocabulary, pieces_of


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    """Return the vocabulary's tokens of a text that begins a line, whose pieces are exactly this text.

    SentencePiece would add a space in front.
    """
    tokens = vocabulary.tokenize("\n" + text).tolist()
    while b"".join(map(vocabulary.piece, tokens)) != text.encode():
        first = vocabulary.piece(tokens.pop(0))
        assert not first.strip(), first
    return [int(token) for token in tokens]


def twin_of(constraint: Constraint) -> Constraint:
    """Return a copy in the same state, without looking ahead. What becomes of one leaves the other."""
    twin = copy.copy(constraint)
    twin._forced = None
    twin._matcher = constraint._matcher and constraint._matcher.deep_copy()
    return twin


def generated(
    vocabulary: Vocabulary, grammar: Grammar, seed: int, marks: Sequence[str] = (), marks_until: bytes = b"never"
) -> str:
    """Generate random text in the language, which ends, since what closes becomes likelier over fifty tokens.

    `marks`, which end texts, are tried too, until `marks_until` was said.
    """
    rng = np.random.default_rng(seed)
    pieces = pieces_of(vocabulary)
    halves = [token for token, piece in enumerate(pieces) if "\ufffd" in piece.decode("utf-8", "replace")]
    closing = [token for token, piece in enumerate(pieces) if piece and piece in b'"}])<>|/0\n']
    marked = [vocabulary.tokenize(text).tolist() for text in marks]
    said, wanted = b"", list[int]()
    with Sampler(vocabulary, Sampling(grammar=grammar, temperature=1.0, seed=seed, top_k=0)) as sampler:
        for step in range(4000):
            row = rng.standard_normal(vocabulary.size).astype(np.float32)
            row[halves] -= 60
            row[closing] += 1 + step % 50 / 4
            row[vocabulary.ends] += 1 + step / 2
            if marked and step % 60 > 40 and not wanted and marks_until not in said:
                wanted = list(marked[rng.integers(len(marked))])
            if wanted:
                row[wanted.pop(0)] += 30
            token = sampler.sample(row)
            sampler.accept(token)
            if vocabulary.is_end(token):
                return said.decode()
            said += pieces[token]
    raise AssertionError(f"no end: {said[:500]!r}")


def text_of(vocabulary: Vocabulary, token: int) -> str:
    """Return the token as the vocabulary spells it (`Ġdef`, `<0x0A>`, `<|im_end|>`)."""
    return str(bindings.llama_vocab_get_text(vocabulary.pointer, token).decode("utf-8", "replace"))
