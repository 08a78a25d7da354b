"""schemathesis finds no 5xx in the server, and nothing that /openapi.json does not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.other_clients import BASE, KEY, client_program, run_client, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LENGTH = 128
"""The most tokens of a prompt and its output: without a bound of its own, a request fills them."""
EXAMPLES = 40
SEEDS = (1, 2)


def test_every_endpoint_keeps_to_its_schema(tmp_path: Path) -> None:
    """All checks but `positive_data_acceptance`: rules among fields, as that a prompt and its

    output fit into the model or that best_of is at least n, do not stand in a schema.
    """
    program = client_program("schemathesis", "st")
    bound = ("--max-model-len", str(LENGTH), "--data-dir", str(tmp_path / "data"))
    with served(tmp_path / "log", ("typed",), bound) as server:
        for seed in SEEDS:
            command = [program, "run", f"{server.url}/openapi.json", "--seed", str(seed)]
            command += ["-H", f"Authorization: Bearer {KEY}", "--generation-database", "none"]
            command += ["--max-examples", str(EXAMPLES), "--no-color", "--warnings", "off"]
            command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
            run_client(
                command,
                tmp_path,
                timeout_s=900,
                PYTHONPATH=str(Path(__file__).parent),
                SCHEMATHESIS_HOOKS="schemathesis_hooks",
                PCG_MODEL=BASE,
            )
    assert "Traceback" not in (tmp_path / "log").read_text()
