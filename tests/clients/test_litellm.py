"""litellm's completions, chats, streams and embeddings are the library's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pcg
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
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_answers_are_the_librarys(tmp_path: Path) -> None:
    client_program("litellm", "python")
    with served(tmp_path / "log", (LORA,)) as server:
        found = calls_of("litellm", "litellm_calls.py", tmp_path, server, models=(BASE, LORA))
    executor = pcg.compile(CHECKPOINT, {LORA: ADAPTERS / LORA}, dtype="float32")
    tokenizer = executor.tokenizer
    assert tokenizer is not None
    chat = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    for model, adapter in ((BASE, None), (LORA, LORA)):
        text = executor.generate(PROMPT, adapter, max_new_tokens=24).text
        (said,) = executor.generate([chat], adapter, max_new_tokens=24)
        assert found["models"][model] == {
            "text": text,
            "streamed": text,
            "said": said.text,
            "said_streamed": said.text,
            "usage": len(tokenizer.encode(PROMPT)),
        }
    wanted = executor.embed(TEXTS, normalize=True)
    torch.testing.assert_close(torch.tensor(found["vectors"]), wanted)
    assert found["unknown"] == "NotFoundError"
    assert found["wrong key"] == "AuthenticationError"
    assert found["bad"] == "BadRequestError"
