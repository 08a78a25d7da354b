"""The sandbox of python graders: what a source gets, and what it does not get out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pcg.errors import GradingError
from pcg.graders.sample import Sample
from pcg.graders.sandbox_runner import check_sandbox, run_grader

SAMPLE = Sample('{"a": 3}', {"b": 4})


def test_a_source_computes() -> None:
    check_sandbox()
    source = (
        "import re, difflib\n"
        "def grade(sample, item):\n"
        "    print('not a score')\n"
        "    return sample['output_json']['a'] + item['b'] + len(re.findall('a', 'aa'))\n"
    )
    assert run_grader(source, SAMPLE) == 9.0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return open(FILE).read()", "PermissionError"),
        ("import os; return os.open(FILE, 0)", "PermissionError"),
        ("import os; return os.fork()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.execv('/bin/true', ['true'])", "PermissionError"),
        ("import socket", "No module named 'socket'"),
        ("import pcg", "No module named 'pcg'"),
        ("import _socket; return _socket.socket()", "No module named"),
        ("return len(bytearray(2**31))", "MemoryError"),
        ("import os\n    while True: os.write(1, b'x' * 65536)", "wrote more than"),
        ("import os; os._exit(0)", "ended without a score"),
        ("return float('nan')", "grade returned nan"),
        ("return 'much'", "ValueError"),
        ("return 10 ** 400", "OverflowError"),
        ("raise SystemExit", "SystemExit"),
        ("(((", "SyntaxError"),
    ],
)
def test_a_source_gets_nothing_else(body: str, said: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    os.environ["PCG_SECRET"] = "1"
    try:
        with pytest.raises(GradingError) as failed:
            run_grader(f"FILE = {str(secret)!r}\ndef grade(sample, item):\n    {body}\n", SAMPLE)
    finally:
        del os.environ["PCG_SECRET"]
    assert said in str(failed.value)
    assert failed.value.kind == "python_grader_runtime_error"


def test_a_source_sees_no_environment_and_no_other_file() -> None:
    source = (
        "import os\n"
        "def grade(sample, item):\n"
        "    count = 0\n"
        "    for number in range(3, 64):\n"
        "        try:\n"
        "            os.fstat(number)\n"
        "            count += 1\n"
        "        except OSError:\n"
        "            pass\n"
        "    return count + 100 * ('PCG_SECRET' in os.environ)\n"
    )
    os.environ["PCG_SECRET"] = "1"
    try:
        assert run_grader(source, SAMPLE) == 0
    finally:
        del os.environ["PCG_SECRET"]


def test_a_source_that_lasts_is_ended() -> None:
    source = "import time\ndef grade(sample, item):\n    time.sleep(1000)\n"
    with pytest.raises(GradingError, match=r"took more than 0\.2 s"):
        run_grader(source, SAMPLE, wall_s=0.2)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('half \\ud800')", "half ?"),
        ('import os; os.write(1, b\'{"error": "\\\\ud800"}\'); os._exit(0)', "?"),
        ("import os; os.write(1, b'{\"score\": 1' + b'0' * 400 + b'}'); os._exit(0)", None),
    ],
)
def test_what_a_source_writes_can_be_sent_on(body: str, said: str | None) -> None:
    source = f"def grade(sample, item):\n    {body}\n"
    if said is None:  # which a grade refuses
        assert run_grader(source, SAMPLE) == float("inf")
        return
    with pytest.raises(GradingError) as failed:
        run_grader(source, SAMPLE)
    assert said in str(failed.value)
    assert str(failed.value).encode()
