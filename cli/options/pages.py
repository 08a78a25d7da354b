"""The files that --html names: checked before the work, written as a whole or not at all."""

from __future__ import annotations

import secrets
from pathlib import Path

from pcg.errors import PcgError
from pcg.files import check_writable, is_directory, is_file, is_there


def check_page(path: Path) -> None:
    """Refuse a file that a page cannot be written to, before the work."""
    if is_there(path) and not is_file(path):
        kind = "a directory" if is_directory(path) else "not a regular file"
        raise PcgError(f"--html {path}: it is {kind}; name a file, as report.html")
    if not is_directory(path.parent):
        raise PcgError(
            f"--html {path}: there is no directory {path.parent}; make it first, or name a "
            "file elsewhere"
        )
    check_writable(path.parent, f"the page {path.name}", PcgError)


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
