"""Load llama-cpp-python. No other module imports it.

Importing this module takes 0.3 s. It raises LibraryUnfit, again at every attempt, if the library cannot be loaded or is
too old.
"""

from __future__ import annotations

from typing import Any

from rest_local.errors import LibraryUnfit

__all__ = ["bindings", "llama_cpp", "set_fields"]

TESTED = "0.3.36"  # the newest version of llama-cpp-python that docs/COMPATIBILITY.md lists as working
_WAY_OUT = f"install one that rest-local was tested with: pip install 'llama-cpp-python=={TESTED}'"

try:
    import llama_cpp
    from llama_cpp import llama_cpp as bindings
except (ImportError, OSError, RuntimeError, AttributeError) as error:  # AttributeError: its library lacks a symbol
    raise LibraryUnfit(f"llama-cpp-python cannot be loaded ({error}); {_WAY_OUT}") from error

if not hasattr(bindings, "llama_version"):
    raise LibraryUnfit(f"llama-cpp-python {llama_cpp.__version__} is too old; {_WAY_OUT}")


def set_fields(structure: Any, **values: Any) -> None:
    """Set fields of a structure of llama.cpp. Raises LibraryUnfit for one that this version does not have: ctypes would
    take any attribute, and llama.cpp would never see it.
    """
    known = {name for name, *_ in structure._fields_}
    for name, value in values.items():
        if name not in known:
            lacks = f"{type(structure).__name__}.{name}"
            raise LibraryUnfit(f"llama-cpp-python {llama_cpp.__version__} lacks {lacks}; {_WAY_OUT}")
        setattr(structure, name, value)
