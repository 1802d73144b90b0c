"""The program that runs inside the sandbox (`rest_local.bench.sandbox` starts it): standard library only.

It reads one JSON object from its input, gives up what it can give up, forks, and runs the code in the child:

- As root it becomes the user `nobody`, because limits of processes and permissions of files do not bind root.
- On Linux it enters new namespaces: no network, no other processes, and file systems that are read-only except for a
  small one in memory, which is the working directory. `/proc` and `/run` are empty there. Where the system refuses
  namespaces, it goes on without them and reports so.
- Limits: CPU time, memory, size of a file, open files, no core file, and no further processes or threads.

It reports on the descriptor `verdict` in lines of JSON: first what is isolated, then, if the code and its tests ran to
their end, the token. The token is in the memory of the process that runs the code. Code that ends the process, raises
or prints cannot pass by that; code that searches the interpreter for the token can.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

NEW_USER, NEW_PID, NEW_NET, NEW_IPC, NEW_NS = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION_3 = 0x20080522
SIGKILL = 9
SIGNALLED = 128  # exit status of a process that a signal ended, less the number of the signal
HIDDEN = ("/proc", "/run")
OWN_TMP = "/tmp"
WRITABLE = "size=16m,nr_inodes=512,mode=0777"


class _Attributes(ctypes.Structure):
    """`struct mount_attr` of Linux."""

    _fields_ = [
        ("set", ctypes.c_uint64), ("clear", ctypes.c_uint64), ("propagation", ctypes.c_uint64), ("fd", ctypes.c_uint64),
    ]  # fmt: skip


def main() -> None:
    """Exit status: that of the process which ran the code, or SIGNALLED and the signal that ended it."""
    given: dict[str, Any] = json.load(sys.stdin)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    isolated = isolate(given["folder"]) if given["isolate"] else []
    become_nobody()
    report: dict[str, Any] = {"isolated": isolated}
    if "files" not in isolated and not os.access(os.__file__, os.R_OK):
        report["refused"] = (
            f"root runs such code as the user `nobody`, which cannot read {os.__file__}; be another user"
        )
    os.write(given["verdict"], json.dumps(report).encode() + b"\n")
    if "refused" in report:
        return
    if "processes" in isolated:
        follow(os.fork())  # the child is the first process of its namespace: when it ends, the kernel ends all others
        if sys.platform == "linux":
            die_with_parent()
    follow(os.fork())
    drop_capabilities()
    if sys.platform == "linux":
        die_with_parent()
    set_limits(given["limits"])
    run(given["program"], given["verdict"], given["token"])


def follow(child: int) -> None:
    """In a parent: wait for the child and end with its status. In a child: go on."""
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(SIGNALLED + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def become_nobody() -> None:
    """Root becomes `nobody`, and loses all capabilities by that."""
    if sys.platform != "win32" and os.getuid() == 0:
        import pwd

        user = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def isolate(folder: str) -> list[str]:
    """Enter new namespaces. Returns what is isolated: of "network", "processes" and "files".

    Root needs no namespace of users for this, and one would keep it from becoming `nobody`.
    """
    if sys.platform != "linux":
        return []
    user, group = os.getuid(), os.getgid()
    if libc().unshare(NEW_PID | NEW_NET | NEW_IPC | NEW_NS | (NEW_USER if user else 0)):
        return []
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    isolated = ["network", "processes"]
    library = os.path.dirname(os.path.realpath(os.__file__))
    place = folder if f"{library}/".startswith(f"{OWN_TMP}/") else OWN_TMP
    if _only_writable(place, library):
        isolated.append("files")
        os.chdir(place)
    return isolated


def _only_writable(place: str, library: str) -> bool:
    """Make all file systems read-only but a new one at `place`, and hide those that reach other processes.

    The standard library is mounted once more, because `nobody` may not be allowed to enter the folder that it is in.
    """
    call, name = libc(), place.encode()
    if call.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return False
    again = f"{place}/python"
    if call.mount(b"tmpfs", name, b"tmpfs", 0, WRITABLE.encode()):
        return False
    os.mkdir(again)
    if call.mount(library.encode(), again.encode(), None, MS_BIND, None):
        return False
    sys.path[:0] = [again, f"{again}/lib-dynload"]
    for module in list(sys.modules.values()):  # packages that are imported already find the rest of them there
        for path in list(getattr(module, "__path__", ())):
            module.__path__.append(path.replace(library, again))
    for hidden in HIDDEN:
        if os.path.isdir(hidden) and call.mount(b"tmpfs", hidden.encode(), b"tmpfs", 0, b"size=4k"):
            return False
    return _set_read_only(call, b"/", True) and _set_read_only(call, name, False)


def _set_read_only(call: ctypes.CDLL, path: bytes, on: bool) -> bool:
    attributes = _Attributes(ATTR_RDONLY if on else 0, 0 if on else ATTR_RDONLY, 0, 0)
    how = AT_RECURSIVE if on else 0
    size = ctypes.sizeof(attributes)
    return not call.syscall(MOUNT_SETATTR, AT_FDCWD, path, how, ctypes.byref(attributes), size)


def die_with_parent() -> None:
    libc().prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def drop_capabilities() -> None:
    """In the namespaces this process may do everything, so that it could undo them."""
    if sys.platform != "linux":
        return
    call = libc()
    call.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if call.capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


def set_limits(limits: dict[str, int]) -> None:
    """By name without RLIMIT_. What the system does not know, or sets lower already, is left as it is."""
    import resource

    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):  # macOS refuses a limit of the address space
            continue


def run(program: str, verdict: int, token: str) -> None:
    """Run the code as a module of its own, and say that it reached its end."""
    names: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    try:
        exec(compile(program, "solution.py", "exec"), names)
    except BaseException as error:
        # not the traceback module: the code may have changed what it needs
        os.write(2, f"\n{type(error).__name__}: {error}"[:500].encode())
        os._exit(1)
    os.write(verdict, json.dumps({"token": token}).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
