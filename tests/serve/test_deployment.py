"""Files of examples/deploy/, and docs/operations.md, have commands, names and paths that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pcg.keys import open_keys
from pcg_cli.application import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def served() -> Iterator[list[str]]:
    """Yield the arguments of `pcg serve` in each file."""
    unit = (DEPLOY / "pcg.service").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, command, *words = shlex.split(start)
    assert (Path(program).name, command) == ("pcg", "serve")
    yield words
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert 'ENTRYPOINT ["pcg", "serve"]' in image
    (command,) = re.findall(r"^CMD (\[.*\])$", image, re.MULTILINE)
    yield json.loads(command)
    yield yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["pcg"]["command"]


def test_commands_have_options_that_exist() -> None:
    command: Any = typer.main.get_command(app)
    _, command, _ = command.resolve_command(typer.Context(command), ["serve"])
    known = {name for parameter in command.params for name in parameter.opts}
    for model, *words in served():
        assert model.startswith("/")
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


def test_files_that_others_name_exist() -> None:
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.*)$", image, re.MULTILINE):
        assert all((ROOT / name).exists() for name in shlex.split(line)[:-1])
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = [str(mount).partition(":")[0] for s in services.values() for mount in s["volumes"]]
    assert {mount for mount in mounts if Path(mount).suffix} == {
        "./nginx.conf",
        "./prometheus.yaml",
    }
    assert all((DEPLOY / mount).exists() for mount in mounts if Path(mount).suffix)
    assert set(re.findall(r"`([\w.]+\.(?:service|conf|yaml))`", PAGE)) == {
        path.name for path in DEPLOY.iterdir() if path.name != "Dockerfile"
    }


def test_alerts_are_on_metrics_that_exist() -> None:
    code = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "pcg/serve/metrics").glob("*.py")
    )
    names = re.findall(r"(?:pcg|vllm):\w+", PAGE)
    assert names
    for name in names:  # a counter's name ends in _total where it is scraped
        assert f'"{name.removesuffix("_total")}"' in code


def test_the_commands_for_a_key_make_an_entry_that_is_read(tmp_path: Path) -> None:
    if not (shutil.which("openssl") and shutil.which("sha256sum")):
        pytest.skip("needs openssl and sha256sum")
    (commands,) = (code for code in re.findall(r"```\n(.*?)```", PAGE, re.S) if "openssl" in code)
    done = subprocess.run(["bash", "-ec", commands], capture_output=True, text=True, check=True)
    key, entry = done.stdout.splitlines()
    (tmp_path / "keys.json").write_text(f"[{entry}]")
    keys, made = open_keys([], tmp_path / "keys.json")
    assert made is None
    found = keys.find(key)
    assert found is not None
    assert found.name == "team-a"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "pcg.service").read_text(encoding="utf-8")
    (tmp_path / "pcg.service").write_text(unit.replace("/usr/local/pcg/bin/pcg", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", tmp_path / "pcg.service"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
