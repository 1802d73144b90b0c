"""What a request may say next: grammars in four notations, compiled by llguidance, and the state of one answer.

`grammar` holds the notations, `builder` puts Lark together from parts, `trial` compiles each new grammar in a child
process first, `tokens` compiles it for a vocabulary, `constraint` follows one answer. The room knows nothing about
llama.cpp: a vocabulary is a list of byte strings.
"""

from rest_local.grammar.grammar import Grammar, any_object, gbnf, json_schema, lark

__all__ = ["Grammar", "any_object", "gbnf", "json_schema", "lark"]
