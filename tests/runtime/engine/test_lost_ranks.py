"""A rank that is killed ends the engines of the others, with its number, and nothing waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.driving_rank import DEGREE

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[3]
SCRIPT = "tests/support/driving_rank.py"
SOON_S = 60
"""Far below the 300 s that ranks wait for each other; alone it takes 3 to 5 s."""


def start(rank: int, what: str, store: TCPStore, degree: int) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(degree),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, SCRIPT, what, str(degree)]
    return subprocess.Popen(command, cwd=ROOT, env=environ, **pipes)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("what", "victim", "degree"),
    [
        ("idle", 1, DEGREE),
        pytest.param("busy", 1, DEGREE, marks=pytest.mark.slow),
        pytest.param("idle", 0, DEGREE, marks=pytest.mark.slow),
        pytest.param("busy", 0, DEGREE, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_others(what: str, victim: int, degree: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(rank, what, store, degree) for rank in range(degree)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        ranks[victim].kill()
        killed_s = time.monotonic()
        for number, rank in enumerate(ranks):
            if number == victim:
                continue
            out, errors = rank.communicate(timeout=SOON_S)
            said = out if number == 0 else errors
            assert not re.search(r"gloo|\.cc:|Connection (closed|reset)", out)
            assert f"rank {victim} of {degree}" in said or f"ranks {victim}" in said, said
            assert rank.returncode == (0 if number == 0 else 1)
        assert time.monotonic() - killed_s < SOON_S
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
