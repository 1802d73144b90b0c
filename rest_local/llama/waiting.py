"""How llama.cpp's threads wait for each other: they spin for a moment, then sleep.

Contract: `set_defaults` sets an environment variable of GNU's OpenMP runtime where the user has set none. The runtime
reads it when it is loaded, so this comes before llama.cpp. Between the operations of a forward pass every thread waits
for the slowest, some hundred times. A thread that sleeps at once loses the time to wake up each time; one that spins
for long takes the processor from the very thread it waits for, where other programs run as well.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN = 30_000
"""Turns before a thread sleeps; the runtime's own default is 300 000, about 5 ms. Measured on 2 cores with a model of
0.8 ms a step (docs/LOG.md): from 10 000 on nothing is lost when the machine is quiet (3 000 cost a tenth, sleeping at
once two thirds of the speed); on a busy one 300 000 fell to 0.001 of the speed at times. LLVM's runtime, in a llama.cpp
that clang built, gives the processor away while it spins; no value of its KMP_BLOCKTIME was better than its own."""

_USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Call before llama.cpp is loaded; afterwards it has no effect. Whatever the user has set stays, and is all."""
    if any(name in environment for name in _USERS):
        return
    environment["GOMP_SPINCOUNT"] = str(SPIN)


def described(environment: MutableMapping[str, str] = os.environ) -> str:
    """The variables in effect, for `doctor`."""
    return " ".join(f"{name}={environment[name]}" for name in _USERS if name in environment) or "the runtime's own"
