"""Load llama-cpp-python. No other module imports it.

Importing this module takes 0.3 s. It raises LibraryUnfit, again at every attempt, if the library cannot be loaded or
lacks something that this package uses.
"""

from __future__ import annotations

from rest_local.errors import LibraryUnfit
from rest_local.llama import needed

__all__ = ["bindings", "llama_cpp"]

_WAY_OUT = f"install one that rest-local was tested with: pip install 'llama-cpp-python=={needed.TESTED[-1]}'"

try:
    import llama_cpp
    from llama_cpp import llama_cpp as bindings
except (ImportError, OSError, RuntimeError, AttributeError) as error:  # AttributeError: its library lacks a symbol
    raise LibraryUnfit(f"llama-cpp-python cannot be loaded ({error}); {_WAY_OUT}") from error

if _lacks := needed.lacking(bindings):
    raise LibraryUnfit(f"llama-cpp-python {llama_cpp.__version__} lacks {needed.few(_lacks)}; {_WAY_OUT}", _lacks)
