"""Run the command line, here or in another process, and read what it prints."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from cli.application import app

ROOT = Path(__file__).parents[2]
SAVED = {
    *("SHA256SUMS", "adapter_config.json", "adapter_model.safetensors"),
    *("README.md", "tokenizer.json", "tokenizer_config.json", "record"),
}
"""What the folder of a trained adapter holds."""


def run(*args: str | Path, **options: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], **options)


def output_of(*args: str | Path, **options: Any) -> str:
    """Standard output of a command that must succeed."""
    result = run(*args, **options)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def assert_one_error(result: Result, message: str) -> None:
    """One line on standard error, nothing on standard output."""
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def python(*args: str | Path, **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "cli", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
