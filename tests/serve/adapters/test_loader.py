"""What a client is told of an adapter that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from pcg.errors import AdapterError
from pcg.files import read_bytes
from pcg.peft.reader import CONFIG
from pcg.serve.adapters.loader import as_asked


@pytest.mark.parametrize("length", [10, 280, 290, 298, 299, 300, 301, 400])
def test_a_message_has_nothing_of_the_servers_folders(length: int) -> None:
    directory = Path("/server/" + "/".join(["deep"] * 80))
    directory = Path(str(directory)[: length - 1] + "x")
    with pytest.raises(AdapterError) as refused:
        read_bytes(directory / CONFIG, AdapterError)
    said = as_asked(f"{refused.value}; {directory} has none", directory, "sql")
    assert "server" not in said
    assert said.startswith("sql")
    assert said.endswith("; sql has none")
