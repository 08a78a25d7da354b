"""The files that --html names: checked before the work, written as a whole or not at all."""

from __future__ import annotations

import secrets
from pathlib import Path

from pcg.errors import PcgError


def check_page(path: Path) -> None:
    """Refuse a file that a page cannot be written to, before the work."""
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise PcgError(f"--html {path}: it is {kind}; name a file, as report.html")
    if not path.parent.is_dir():
        raise PcgError(
            f"--html {path}: there is no directory {path.parent}; make it first, or name a "
            "file elsewhere"
        )


def write_page(path: Path, page: str) -> int:
    """Write a page as a whole or not at all; returns its bytes."""
    target = path.resolve()
    beside = target.with_name(f".{secrets.token_hex(4)}.html")
    data = page.encode()
    try:
        beside.write_bytes(data)
        beside.replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PcgError(
            f"--html {path}: it cannot be written: {reason}; name a file elsewhere"
        ) from error
    finally:
        beside.unlink(missing_ok=True)
    return len(data)
