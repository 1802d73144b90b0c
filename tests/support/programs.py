"""Whether a program that a test started has ended."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path


def gone(pid: int, port: int = 0) -> bool:
    """Whether a process has ended, and the port is free. It may be another process that waits for it, and later."""
    for _ in range(500):
        if not running(pid):
            with socket.socket() as free:
                return not port or free.connect_ex(("127.0.0.1", port)) != 0
        time.sleep(0.02)
    return False


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return sys.platform != "linux" or Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
