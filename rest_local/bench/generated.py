"""Text for measurements: Python sources of this machine, then the same with edits, without end.

A document is the tokens of a file. After the last file, documents are edited ones: the paragraphs of a file in another
order, and EDITED of their tokens replaced. The module knows nothing about datastores.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.rows import Int32Array
from rest_local.retrieval.sources.corpus import walk

EDITED = 0.02  # share of the tokens of a repeated file that are replaced

SYNTHETIC_SIZE = 32_000  # ids of the synthetic text
WALK = 5_000  # tokens of a synthetic document


def sources(vocabulary: Vocabulary) -> Iterator[Int32Array]:
    """The tokens of every Python file of the interpreter and its packages, int32 [length] each."""
    paths = sysconfig.get_paths()
    for _, text, *_ in walk(dict.fromkeys((paths["stdlib"], paths["purelib"])), ["*.py"]):
        tokens = vocabulary.tokenize(text)
        if len(tokens):
            yield tokens


def sources_and_edits(
    vocabulary: Vocabulary, tokens: int, random: np.random.Generator
) -> tuple[list[Int32Array], float]:
    """Documents of `tokens` tokens: `sources`, then edited copies of them; and the share of the copies."""
    real = list(up_to(sources(vocabulary), tokens))
    copies = edited(real, ends_of_paragraphs(vocabulary), random)
    return list(up_to(chain(real, copies), tokens)), 1 - sum(map(len, real)) / tokens


def ends_of_paragraphs(vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
    """For each id whether its text holds an empty line. bool [size]."""
    return np.array([b"\n\n" in vocabulary.piece(token) for token in range(vocabulary.size)], np.bool_)


def edited(
    originals: Sequence[Int32Array], ends: npt.NDArray[np.bool_], random: np.random.Generator
) -> Iterator[Int32Array]:
    """The originals in a random order, each with shuffled paragraphs and replaced tokens, again and again."""
    while True:
        for number in random.permutation(len(originals)):
            yield _edit(originals[number], ends, random)


def _edit(tokens: Int32Array, ends: npt.NDArray[np.bool_], random: np.random.Generator) -> Int32Array:
    paragraphs = np.split(tokens, np.flatnonzero(ends[tokens]) + 1)
    changed = np.concatenate([paragraphs[at] for at in random.permutation(len(paragraphs))])
    places = random.integers(0, len(tokens), random.binomial(len(tokens), EDITED))
    changed[places] = tokens[random.integers(0, len(tokens), len(places))]
    return changed


def synthetic(random: np.random.Generator) -> Iterator[Int32Array]:
    """Walks over a graph in which each of SYNTHETIC_SIZE tokens has 64 successors, chosen by Zipf's law."""
    successors = (random.zipf(1.2, (SYNTHETIC_SIZE, 64)) - 1) % SYNTHETIC_SIZE
    while True:
        walks = np.empty((WALK, 200), np.int32)
        at = random.integers(0, SYNTHETIC_SIZE, 200)
        for step in range(WALK):
            walks[step] = at
            at = successors[at, (random.zipf(1.5, 200) - 1) % 64]
        yield from np.ascontiguousarray(walks.T)


def up_to(documents: Iterable[Int32Array], tokens: int) -> Iterator[Int32Array]:
    """Documents of `tokens` tokens in all; the last one is cut."""
    for document in documents:
        yield document[:tokens]
        tokens -= len(document)
        if tokens <= 0:
            return
