"""LangChain's chats, streams, tools, structured outputs and embeddings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pcg
from tests.support import chat_templates
from tests.support.other_clients import (
    ADAPTERS,
    BASE,
    CHECKPOINT,
    LORA,
    PROMPT,
    TEXTS,
    calls_of,
    client_program,
    served,
    spaces_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_answers_are_the_librarys(tmp_path: Path) -> None:
    client_program("langchain", "python")
    executor = pcg.compile(CHECKPOINT, {LORA: ADAPTERS / LORA}, dtype="float32")
    assert executor.tokenizer is not None
    tokenizer = executor.tokenizer.with_template(chat_templates.HERMES)
    template = tmp_path / "hermes.jinja"
    template.write_text(chat_templates.HERMES)
    spaces = json.dumps(spaces_of(tokenizer))
    with served(tmp_path / "log", (LORA,), ("--chat-template", str(template))) as server:
        found = calls_of(
            "langchain",
            "langchain_calls.py",
            tmp_path,
            server,
            models=(BASE, LORA),
            PCG_SPACES=spaces,
        )
    chat = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    for index, (model, adapter) in enumerate(((BASE, None), (LORA, LORA))):
        got = found["models"][model]
        (said,) = executor.generate([chat], adapter, max_new_tokens=24)
        names = ("said", "said_streamed", "said_in_a_response")
        assert [got[name] for name in names] == [said.text] * 3
        assert found["at once"][index] == said.text
        for usage in (got["usage"], got["streamed_usage"]):
            counts = (usage["input_tokens"], usage["output_tokens"])
            assert counts == (len(chat), len(said.token_ids))
        assert got["text"] == executor.generate(PROMPT, adapter, max_new_tokens=24).text
    for choice in ("weather", "any"):
        calls = found["tools"][choice]
        assert calls
        for call in calls:
            assert call["city"] in ("Paris", "Rome")
            assert call["days"] in (1, 2, 3)
    assert found["tools"]["answer"] in ("stop", "length", "tool_calls")
    for animal in found["structured"].values():
        assert animal["kind"] in ("dog", "fox")
        assert animal["is_lazy"] in (True, False)
    wanted = executor.embed(TEXTS, normalize=True)
    torch.testing.assert_close(torch.tensor(found["vectors"]), wanted)
