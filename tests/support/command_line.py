"""Run the command line in another process, and read what it prints."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from cli.application import app


def run(*args: str | Path, **options: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], **options)


def output_of(*args: str | Path, **options: Any) -> str:
    """Standard output of a command that must succeed."""
    result = run(*args, **options)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout
