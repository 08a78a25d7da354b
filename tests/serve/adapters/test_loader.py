"""What a client is told of an adapter that cannot be loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from pcg.errors import AdapterError
from pcg.files import SUMS, read_bytes
from pcg.peft.adapter_files import CONFIG
from pcg.serve.adapters.loader import with_client_path
from tests.support import serving


@pytest.mark.parametrize("length", [10, 280, 290, 298, 299, 300, 301, 400])
def test_a_message_has_nothing_of_the_servers_folders(length: int) -> None:
    directory = Path("/server/" + "/".join(["deep"] * 80))
    directory = Path(str(directory)[: length - 1] + "x")
    with pytest.raises(AdapterError) as refused:
        read_bytes(directory / CONFIG, AdapterError)
    said = with_client_path(f"{refused.value}; {directory} has none", directory, "sql")
    assert "server" not in said
    assert said.startswith("sql")
    assert said.endswith("; sql has none")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "pcg.adapters"]


def test_an_adapter_of_another_base_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = serving.make_executor()
    executor.save_adapter("lora-0", tmp_path / "sql")
    (tmp_path / "sql" / SUMS).unlink()  # its files are edited
    file = tmp_path / "sql" / CONFIG
    config = json.loads(file.read_text())
    name = config["base_model_name_or_path"]
    with caplog.at_level(logging.WARNING, "pcg.adapters"):
        for same in (name, f"somebody/{name.upper()}", f"/models/{name}/", "", None):
            file.write_text(json.dumps({**config, "base_model_name_or_path": same}))
            executor.add_adapter("sql", tmp_path / "sql", replace=True)
        assert said(caplog) == []
        file.write_text(json.dumps({**config, "base_model_name_or_path": "meta-llama/Other-1B"}))
        executor.add_adapter("sql", tmp_path / "sql", replace=True)
    (message,) = said(caplog)
    assert "'sql' was trained on the base 'meta-llama/Other-1B', and this one is" in message
