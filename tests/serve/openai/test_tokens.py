"""/tokenize, /detokenize and /tokenizer_info are transformers' tokenizer over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pcg.serve.http.service import Service
from tests.support import serving

TEXTS = ["Hello, how are you?", "", "Ein schöner Tag 😀\n", "<|im_start|>user"]
CHAT = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a dog"}]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving.service_of() as service:
        yield service


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(serving.model_directory())


def ask(service: Service, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
    headers = {**serving.HEADERS, "content-type": "application/json"}
    reply = serving.ask(service, method, path, headers, content=content)
    return reply.status_code, reply.json()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_texts_become_tokens_and_texts_again(
    service: Service, tokenizer: Any, text: str, special: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=special)
    body = {"prompt": text, "add_special_tokens": special, "return_token_strs": True}
    status, found = ask(service, "/tokenize", body)
    assert (status, found["tokens"], found["count"]) == (200, ids, len(ids))
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert found["max_model_len"] == service.max_model_len
    assert ask(service, "/detokenize", {"tokens": ids}) == (200, {"prompt": tokenizer.decode(ids)})


@pytest.mark.parametrize("prompted", [True, False])
def test_chats_become_tokens(service: Service, tokenizer: Any, prompted: bool) -> None:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompted)
    ids = tokenizer.encode(text, add_special_tokens=False)
    body = {"messages": CHAT, "add_generation_prompt": prompted, "model": "lora-0"}
    status, found = ask(service, "/tokenize", body)
    assert (status, found["tokens"], found["token_strs"]) == (200, ids, None)


def test_a_message_is_continued(service: Service, tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    status, found = ask(service, "/tokenize", {"messages": CHAT, "continue_final_message": True})
    assert (status, found["tokens"]) == (200, ids)


def test_documents_are_a_variable_of_the_template(tmp_path: Path) -> None:
    template = tmp_path / "documents.jinja"
    template.write_text(
        "{% for one in documents or [] %}{{ one.text }}\n{% endfor %}{{ messages[0].content }}"
    )
    with serving.service_of(chat_template=template) as service:
        body = {"messages": CHAT[:1], "documents": [{"title": "t", "text": "a fox"}]}
        _, found = ask(service, "/tokenize", body)
        _, text = ask(service, "/detokenize", {"tokens": found["tokens"]})
        assert text == {"prompt": "a fox\nwhat is it?"}


def test_the_configuration_is_the_tokenizers(service: Service, tokenizer: Any) -> None:
    status, found = ask(service, "/tokenizer_info")
    assert status == 200
    assert found["chat_template"] == tokenizer.chat_template
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert found[name] == getattr(tokenizer, name)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "surrogate"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "a"}]}, "role"),
        ("/tokenize", {"messages": CHAT, "tools": [{"type": "magic"}]}, "tools"),
        (
            "/tokenize",
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"messages": 1}}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"self": 1}}, "self"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"tools": 1}}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {"tokens": [2**40]}, str(2**40)),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_bad_bodies_are_refused_by_name(
    service: Service, path: str, body: dict[str, Any], words: str
) -> None:
    status, found = ask(service, path, body)
    assert status == 400
    assert words in found["error"]["message"]


def test_a_model_that_is_not_there_has_no_tokenizer(service: Service) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert ask(service, path, {**body, "model": "nobody"})[0] == 404
