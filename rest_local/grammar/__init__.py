"""Constrain answers by grammars: GBNF, Lark or JSON schemas, compiled by llguidance, and the state of one answer.

- `grammar`: the notations; each becomes Lark. `Lark` builds grammars from parts.
- `schema`: JSON schemas as llguidance reads them, and refusals.
- `compiler`: compiles grammars for a vocabulary, each in a child process first.
- `constraint`: the state of one answer.

The room knows nothing about llama.cpp: a vocabulary is a list of byte strings.
"""

from rest_local.grammar.grammar import Grammar, any_object, gbnf, json_schema, lark

__all__ = ["Grammar", "any_object", "gbnf", "json_schema", "lark"]
