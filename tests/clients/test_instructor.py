"""instructor's objects of classes: by tools, strict ones too, by a schema, and in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import chat_templates
from tests.support.other_clients import (
    BASE,
    CHECKPOINT,
    LORA,
    calls_of,
    client_program,
    served,
    spaces_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_objects_are_of_their_classes(tmp_path: Path) -> None:
    client_program("instructor", "python")
    template = tmp_path / "hermes.jinja"
    template.write_text(chat_templates.HERMES)
    spaces = json.dumps(spaces_of(Tokenizer.load(CHECKPOINT)))
    with served(tmp_path / "log", (LORA,), ("--chat-template", str(template))) as server:
        found = calls_of(
            "instructor",
            "instructor_calls.py",
            tmp_path,
            server,
            models=(BASE, LORA),
            PCG_SPACES=spaces,
        )
    assert found.keys() == {"tool_call", "tools_strict", "json_schema_mode"}
    for said in found.values():
        assert said["one"] == said["streamed"]  # greedy
        assert said["one"]["kind"] in ("dog", "fox")
        assert said["herd"]["place"] in ("field", "wood")
        assert said["herd"]["leader"].keys() == {"kind", "is_lazy"}
        assert said["parts"] > 1
        assert said["tokens"] > 1
