"""litellm, its proxy, LangChain and instructor get the library's answers."""

import contextlib
import json
import os
import signal
import socket
import subprocess

import httpx2
import openai
import pytest
import torch

import pcg
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import chat_templates
from tests.support.other_clients import (
    ADAPTERS,
    BASE,
    CHECKPOINT,
    KEY,
    LORA,
    PROMPT,
    TEXTS,
    calls_of,
    client_program,
    served,
    spaces_of,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_answers_are_the_librarys(tmp_path):
    client_program("litellm", "python")
    with served(tmp_path / "log", (LORA,)) as server:
        found = calls_of("litellm", "litellm_calls.py", tmp_path, server, models=(BASE, LORA))
    executor = pcg.compile(CHECKPOINT, {LORA: ADAPTERS / LORA}, dtype="float32")
    tokenizer = executor.tokenizer
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


MASTER = "sk-of-the-tests"
CHAT = [{"role": "user", "content": PROMPT}]
COMMON = {"max_tokens": 16, "temperature": 0}


@contextlib.contextmanager
def proxied(server, home):
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

    def is_there():
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


def answers(url, key, chat, text):
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


def _joined(parts):
    return "".join(part or "" for part in parts)


def test_answers_are_the_servers(tmp_path):
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


def test_answers_are_the_librarys_langchain(tmp_path):
    client_program("langchain", "python")
    executor = pcg.compile(CHECKPOINT, {LORA: ADAPTERS / LORA}, dtype="float32")
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


def test_objects_are_of_their_classes(tmp_path):
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
