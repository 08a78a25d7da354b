"""LiteLLM's proxy before the server: OpenAI's client gets through it what it gets without."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.support.other_clients import (
    BASE,
    KEY,
    LORA,
    PROMPT,
    TEXTS,
    Served,
    client_program,
    served,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MASTER = "sk-of-the-tests"
CHAT: Any = [{"role": "user", "content": PROMPT}]
COMMON: dict[str, Any] = {"max_tokens": 16, "temperature": 0}


@contextlib.contextmanager
def proxied(server: Served, home: Path) -> Iterator[str]:
    """The address of a proxy that has the server's models, and ends with the `with`."""
    place = {"api_base": server.openai_url, "api_key": KEY}
    models = {
        "code": f"openai/{BASE}",
        "typed": f"openai/{LORA}",
        "text": f"text-completion-openai/{BASE}",
    }
    config = {
        "model_list": [
            {"model_name": name, "litellm_params": {"model": model, **place}}
            for name, model in models.items()
        ],
        "general_settings": {"master_key": MASTER},
    }
    file = home / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [client_program("litellm-proxy", "litellm"), "--config", str(file), "--port", port]
    variables = {
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PATH": os.environ["PATH"],
    }
    url = f"http://127.0.0.1:{port}"
    with (home / "proxy.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--telemetry", "False"],
            env=variables, stdout=log, stderr=subprocess.STDOUT, cwd=home,
        )  # fmt: skip

    def is_there() -> bool:
        assert process.poll() is None, (home / "proxy.log").read_text()
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{url}/health/liveliness").status_code == 200
        return False

    try:
        until(is_there, 180)
        yield f"{url}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def answers(url: str, key: str, chat: str, text: str) -> dict[str, Any]:
    """What a model says, by every endpoint."""
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        said = client.chat.completions.create(model=chat, messages=CHAT, **COMMON)
        parts = client.chat.completions.create(model=chat, messages=CHAT, stream=True, **COMMON)
        whole = client.completions.create(model=text, prompt=PROMPT, **COMMON)
        chunks = client.completions.create(model=text, prompt=PROMPT, stream=True, **COMMON)
        response = client.responses.create(
            model=chat, input=PROMPT, max_output_tokens=16, temperature=0
        )
        likely = client.chat.completions.create(
            model=chat, messages=CHAT, logprobs=True, top_logprobs=2, **COMMON
        )
        logprobs = likely.choices[0].logprobs
        assert logprobs is not None
        assert said.usage is not None
        return {
            "said": said.choices[0].message.content,
            "tokens": (said.usage.prompt_tokens, said.usage.completion_tokens),
            "streamed": _joined(one.choices[0].delta.content for one in parts if one.choices),
            "text": whole.choices[0].text,
            "text streamed": _joined(one.choices[0].text for one in chunks if one.choices),
            "response": response.output_text,
            "logprobs": [one.logprob for one in logprobs.content or ()],
            "vectors": [
                one.embedding for one in client.embeddings.create(model=chat, input=TEXTS).data
            ],
        }


def _joined(parts: Iterator[str | None]) -> str:
    return "".join(part or "" for part in parts)


def test_answers_are_the_servers(tmp_path: Path) -> None:
    client_program("litellm-proxy", "litellm")
    with served(tmp_path / "log", (LORA,)) as server, proxied(server, tmp_path) as url:
        for chat, model in (("code", BASE), ("typed", LORA)):
            direct = answers(server.openai_url, KEY, model, BASE)
            assert answers(url, MASTER, chat, "text") == direct
            assert direct["said"] == direct["streamed"]
        with (
            openai.OpenAI(base_url=url, api_key=MASTER, max_retries=0) as client,
            pytest.raises(openai.BadRequestError, match="'temperature'"),
        ):
            client.chat.completions.create(model="code", messages=CHAT, temperature=-1)
