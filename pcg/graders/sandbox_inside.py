"""The program inside the sandbox: restricts itself, then runs a grader's source.

The program is started by path with `-I -S` and an empty environment, so that only the standard
library can be imported. Its input is JSON: `source`, `sample`, `item`, and limits. After loading
the modules that a source may use, the program irrevocably gives up, in this order: resources beyond
the limits; the network, mounts and other processes, by own namespaces, if the machine allows them;
and all system calls outside a short list, by a seccomp filter, which is mandatory. No call on the
list opens a file or a socket, starts a program or a thread, or reaches another process.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import platform
import resource
import struct
import sys
from typing import Any

MODULES = (
    *("ast", "base64", "binascii", "bisect", "builtins", "collections", "collections.abc", "copy"),
    *("csv", "dataclasses", "datetime", "_strptime", "decimal", "difflib", "enum", "fractions"),
    *("functools", "hashlib", "heapq", "html", "io", "itertools", "json", "math", "numbers"),
    *("operator", "random", "re", "statistics", "string", "textwrap", "time", "traceback"),
    *("typing", "unicodedata", "urllib.parse", "encodings.ascii", "encodings.latin_1"),
)
"""The modules that a source may import."""

_CALLS: dict[str, tuple[int, tuple[int, ...]]] = {
    # machine: its number in audit.h, and the calls read, write, close, fstat, lseek, mmap,
    # mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, mremap, madvise, getpid,
    # gettid, exit, exit_group, futex, sched_yield, sigaltstack, gettimeofday, clock_gettime,
    # clock_getres, clock_nanosleep, nanosleep, restart_syscall, getrandom.
    "x86_64": (
        0xC000003E,
        (
            *(0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 25, 28, 39),
            *(186, 60, 231, 202, 24, 131, 96, 228, 229, 230, 35, 219, 318),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 216, 233, 172),
            *(178, 93, 94, 98, 124, 132, 169, 113, 114, 115, 101, 128, 278),
        ),
    ),
}
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1  # linux/seccomp.h; errno EPERM
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # linux/prctl.h
_NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000
"""User, network, IPC, host name and mounts, of linux/sched.h."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def limit(cpu_s: int, memory_bytes: int) -> None:
    """Limit the resources of this process irrevocably."""
    bounds = (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
    )
    for kind, most in bounds:
        resource.setrlimit(kind, (most, most))


def shut() -> None:
    """Give up system calls irrevocably. OSError: the machine has no seccomp filter."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        raise OSError(f"no filter of system calls for {sys.platform} on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(_NAMESPACES)  # where the machine lets it: the filter does not depend on it
    machine, calls = _CALLS[platform.machine()]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    steps += [(_JUMP_EQUAL, len(calls) - index, 0, call) for index, call in enumerate(calls)]
    steps += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(steps), ctypes.addressof(held))
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
        _SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the filter of system calls cannot be set")


def grade(job: dict[str, Any]) -> dict[str, Any]:
    """Run a source's `grade`; return its `score`, or the `error` that was raised."""
    try:
        space: dict[str, Any] = {"__name__": "grader"}
        exec(compile(job["source"], "grader.py", "exec"), space)
        score = float(space["grade"](job["sample"], job["item"]))
        if not math.isfinite(score):
            return {"error": f"grade returned {score}"}
        return {"score": score}
    except MemoryError:
        return {"error": "MemoryError: the grader takes too much memory"}
    except BaseException as error:
        try:
            return {"error": f"{type(error).__name__}: {error}"[:1024]}
        except BaseException:
            return {"error": "it raised an error that cannot be shown"}


def main() -> None:
    """Read the input, shut in, run, and write the outcome."""
    job = json.loads(sys.stdin.buffer.read())
    for name in MODULES:
        importlib.import_module(name)
    try:
        limit(job["cpu_s"], job["memory_bytes"])
        shut()
    except (OSError, ValueError) as error:
        outcome: dict[str, Any] = {"broken": str(error)}
    else:
        sys.stdout = sys.stderr  # which nobody reads
        outcome = grade(job)
    os.write(1, json.dumps(outcome).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
