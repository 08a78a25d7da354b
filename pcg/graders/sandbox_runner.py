"""Runs of python graders, each in its own process with a time limit.

The process has an empty environment, its input in memory, and a pipe for the outcome;
`sandbox_inside` restricts the process.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import Any

from pcg.errors import GradingError, UnsupportedError
from pcg.graders import sandbox_inside as inside
from pcg.graders.sample import Sample

WALL_S, CPU_S = 10.0, 5
MEMORY_BYTES = 2**29
_OUTCOME_BYTES = 2**16
_FAILED, _BROKEN = "python_grader_runtime_error", "python_grader_server_error"
_PROBE = """
import ctypes
def grade(sample, item):
    libc = ctypes.CDLL(None)
    opened = libc.open(b"/", 0) >= 0
    return 0 if opened or libc.socket(2, 1, 0) >= 0 or libc.fork() >= 0 else 1
"""


def check_sandbox() -> None:
    """Raise an UnsupportedError if this machine has no sandbox."""
    reason = "a source in it could open files"
    try:
        if run_grader(_PROBE, Sample("")) == 1:
            return
    except GradingError as error:
        reason = str(error)
    raise UnsupportedError(
        "python graders need Linux on x86_64 or aarch64 with seccomp, and this machine's sandbox "
        f"does not hold: {reason}; leave out --python-graders"
    )


def run_grader(source: str, sample: Sample, wall_s: float = WALL_S) -> float:
    """Run `grade(sample, item)` of a source in a sandbox and return its value.

    Args:
        wall_s: time limit, seconds.
    Raises:
        GradingError: the source fails or exceeds its limits, or this machine has no sandbox.
    """
    try:
        output_json = sample.output_json
    except GradingError:
        output_json = None
    job = {
        "source": source,
        "sample": {
            "output_text": sample.output_text,
            "output_json": output_json,
            "output_tools": list(sample.output_tools),
        },
        "item": sample.item,
        "cpu_s": CPU_S,
        "memory_bytes": MEMORY_BYTES,
    }
    written = json.dumps(job).encode()
    try:
        held = os.memfd_create("grader")
    except (AttributeError, OSError) as error:
        raise GradingError(f"the sandbox cannot begin: {error}", _BROKEN) from None
    try:
        with open(held, "wb", closefd=False) as file:
            file.write(written)
        os.lseek(held, 0, os.SEEK_SET)
        outcome = _ended(held, wall_s)
    finally:
        os.close(held)
    return _score(outcome)


def _ended(held: int, wall_s: float) -> bytes:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", inside.__file__],
        stdin=held,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )
    assert process.stdout is not None
    outcome = b""
    end_s = time.monotonic() + wall_s
    try:
        with process.stdout as pipe:
            while (left_s := end_s - time.monotonic()) > 0 and len(outcome) <= _OUTCOME_BYTES:
                if not select.select([pipe], [], [], left_s)[0]:
                    break
                read = os.read(pipe.fileno(), _OUTCOME_BYTES)
                if not read:
                    return outcome
                outcome += read
    finally:
        process.kill()
        process.wait()
    if len(outcome) > _OUTCOME_BYTES:
        raise GradingError(f"the grader wrote more than {_OUTCOME_BYTES} bytes", _FAILED)
    raise GradingError(f"the grader took more than {wall_s:g} s", _FAILED)


def _score(outcome: bytes) -> float:
    """Return the score of an outcome; the source may have written every byte of it."""
    try:
        # As floats, integers have no bound of their digits.
        reply: Any = json.loads(outcome, parse_int=float)
    except (ValueError, RecursionError):
        reply = None
    match reply:
        case {"score": float(score)}:
            return score
        case {"error": str(text)}:
            raise GradingError(_sendable(text[:1024]), _FAILED)
        case {"broken": str(text)}:
            message = f"the sandbox cannot be made: {_sendable(text[:256])}"
            raise GradingError(message, _BROKEN)
    raise GradingError(
        f"the grader ended without a score: it took more than {CPU_S} s of processor time or "
        f"{MEMORY_BYTES >> 20} MiB, ended its process, or wrote where its score goes",
        _FAILED,
    )


def _sendable(text: str) -> str:
    """Return a text that UTF-8 can encode: lone surrogates become "?"."""
    return text.encode(errors="replace").decode()
