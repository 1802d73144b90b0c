"""The memory of this process, for tests that look for leaks."""

import ctypes
import gc
import platform
from pathlib import Path


def resident_mb() -> float:
    """Return the resident memory in MB, without what the allocator keeps for later, or 0 if the kernel does not tell.

    Threads that open connections at the same time leave up to 20 MB of that, which is no leak.
    """
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    try:
        status = Path("/proc/self/status").read_text("ascii")
    except OSError:
        return 0.0
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024
