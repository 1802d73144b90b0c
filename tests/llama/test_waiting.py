"""How threads wait is decided before llama.cpp is loaded, and by the user where he has said something."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rest_local.llama.waiting import SPIN, described, set_defaults


@pytest.mark.parametrize(
    "users", [{"GOMP_SPINCOUNT": "0"}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"KMP_BLOCKTIME": "5"}, {"OMP_WAIT_POLICY": ""}]
)
def test_what_the_user_has_set_stays(users: dict[str, str]) -> None:
    environment = dict(users)
    set_defaults(environment)
    assert environment == users


def test_without_it_threads_spin_for_a_moment() -> None:
    environment: dict[str, str] = {}
    assert described(environment) == "the runtime's own"
    set_defaults(environment)
    assert environment == {"GOMP_SPINCOUNT": str(SPIN)}
    assert described(environment) == f"GOMP_SPINCOUNT={SPIN}"


def test_it_is_set_when_the_library_is_loaded() -> None:
    """Whatever module of the package comes first: seen from an import of llama_cpp."""
    program = """
import importlib.abc, json, os, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "llama_cpp":
            print(json.dumps(os.environ.get("GOMP_SPINCOUNT")))
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Watch())
import rest_local.llama.batch
"""
    clean = {name: text for name, text in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean, check=True)
    assert json.loads(done.stdout) == str(SPIN)
