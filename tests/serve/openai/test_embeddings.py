"""Embeddings, scores and tokens over HTTP are those of transformers and peft."""

import base64
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import openai
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pcg.runtime.admission.limits import Limits
from pcg.serve.engine.facts import facts_of
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.errors import ApiError
from pcg.serve.openai.embeddings import EmbeddingsBody
from tests.support import serving

TEXTS = ["Hello, how are you today?", "the quick brown fox", "Ein schöner Tag 😀"]


@pytest.fixture(scope="module")
def server():
    with serving.on_a_port() as server:
        yield server


@pytest.fixture(scope="module")
def states(server, tmp_path_factory):
    """What computes the last hidden states of a prompt, [tokens, hidden], by name of the model."""
    folder = tmp_path_factory.mktemp("adapter")
    server.service.client.executor.save_adapter("lora-0", folder)
    loaded = AutoModelForCausalLM.from_pretrained(serving.model_directory(), dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(loaded, folder).eval()

    def compute(model, ids):
        with torch.inference_mode():
            if model != serving.MODEL:
                return adapted(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
            with adapted.disable_adapter():
                return adapted(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]

    return compute


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(serving.model_directory())


def unit(vector):
    return vector / vector.norm()


@pytest.mark.parametrize("model", [serving.MODEL, "lora-0"])
def test_texts_and_tokens_give_the_same_states(client, states, model, tokenizer):
    ids = [tokenizer.encode(text) for text in TEXTS]
    wanted = [unit(states(model, one)[-1]) for one in ids]
    several = client.embeddings.create(model=model, input=TEXTS)
    as_ids = client.embeddings.create(model=model, input=ids, encoding_format="float")
    for reply in (several, as_ids):
        assert [one.index for one in reply.data] == [0, 1, 2]
        assert reply.model == model
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))
        for one, vector in zip(reply.data, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(one.embedding), vector)
    for prompt in (TEXTS[0], ids[0]):  # a text, and a list of token ids, is one prompt
        (one,) = client.embeddings.create(model=model, input=prompt).data
        torch.testing.assert_close(torch.tensor(one.embedding), wanted[0])


def test_pooling_and_norm_are_a_choice(client, states, tokenizer):
    found = states(serving.MODEL, tokenizer.encode(TEXTS[1]))
    for pooling, state in (("last", found[-1]), ("mean", found.mean(0))):
        for normalize, wanted in ((True, unit(state)), (False, state)):
            extra = {"pooling": pooling, "normalize": normalize}
            (one,) = client.embeddings.create(
                model=serving.MODEL, input=TEXTS[1], extra_body=extra
            ).data
            torch.testing.assert_close(torch.tensor(one.embedding), wanted)


def test_a_long_prompt_is_cut_to_its_last_tokens(client, states, tokenizer):
    ids = tokenizer.encode(TEXTS[0])
    extra = {"truncate_prompt_tokens": 3}
    reply = client.embeddings.create(model=serving.MODEL, input=TEXTS[0], extra_body=extra)
    wanted = unit(states(serving.MODEL, ids[-3:])[-1])
    torch.testing.assert_close(torch.tensor(reply.data[0].embedding), wanted)
    assert reply.usage.prompt_tokens == 3
    ids = [5 + i % 300 for i in range(400)]
    extra = {"truncate_prompt_tokens": -1}  # as many as the model takes
    reply = client.embeddings.create(model=serving.MODEL, input=ids, extra_body=extra)
    wanted = unit(states(serving.MODEL, ids[-128:])[-1])
    torch.testing.assert_close(torch.tensor(reply.data[0].embedding), wanted)
    assert reply.usage.prompt_tokens == 128


def test_base64_is_the_bytes_of_the_same_numbers(server):
    body = {"model": serving.MODEL, "input": TEXTS[0]}
    with server.client() as http:
        replies = [
            http.post("/v1/embeddings", json={**body, "encoding_format": encoding}).json()
            for encoding in ("float", "base64")
        ]
    numbers, text = (reply["data"][0]["embedding"] for reply in replies)
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == np.float32(numbers).tolist()


def test_a_part_of_an_embedding_needs_a_model_that_was_trained_for_it(client, server):
    local = server.service.client
    width = local.facts.width
    whole = client.embeddings.create(model=serving.MODEL, input=TEXTS[0], dimensions=width)
    assert len(whole.data[0].embedding) == width
    with pytest.raises(openai.BadRequestError, match="leave dimensions out") as refused:
        client.embeddings.create(model=serving.MODEL, input=TEXTS[0], dimensions=width // 2)
    assert refused.value.param == "dimensions"

    def with_config(**fields):
        program = local.executor.program
        configured = dataclasses.replace(program, config={**program.config, **fields})
        executor = SimpleNamespace(
            program=configured,
            state=local.executor.state,
            device=local.executor.device,
            max_positions=None,
        )
        engine = SimpleNamespace(
            scheduler=SimpleNamespace(limits=Limits()),
            device=SimpleNamespace(warmed=None, cache=SimpleNamespace(size_bytes=0)),
        )
        return facts_of(executor, engine, ServeOptions())

    def check(facts, asked):
        EmbeddingsBody(input="a", dimensions=asked).check_dimensions(facts)

    check(with_config(is_matryoshka=True), 1)
    check(with_config(matryoshka_dimensions=[4, 8]), 8)
    for fields, asked in (({"matryoshka_dimensions": [4, 8]}, 5), ({"is_matryoshka": True}, 9999)):
        with pytest.raises(ApiError, match=f"dimensions={asked}"):
            check(with_config(**fields), asked)


def test_a_part_is_an_embedding_of_norm_1(states, tokenizer):
    executor = serving.make_executor()
    executor.program.config["is_matryoshka"] = True
    wanted = unit(states(serving.MODEL, tokenizer.encode(TEXTS[0]))[-1][:5])

    body = {"model": serving.MODEL, "input": TEXTS[0], "dimensions": 5}
    with serving.service_of(executor) as service:
        reply = serving.post(service, "/v1/embeddings", body).json()
    torch.testing.assert_close(torch.tensor(reply["data"][0]["embedding"]), wanted)


QUERY = "what is it?"
DOCUMENTS = ["a dog", "the quick brown fox", "what is it?", "Ein schöner Tag"]


@pytest.fixture(scope="module")
def cosines():
    """The cosine of the query's last hidden state and each text's."""
    directory = serving.model_directory()
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)

    def embedding(text):
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            return model(ids, output_hidden_states=True).hidden_states[-1][0, -1]

    query = embedding(QUERY)
    return [float(torch.cosine_similarity(query, embedding(text), dim=0)) for text in DOCUMENTS]


def ask(service, path, **body):
    return serving.post(service, path, {"model": serving.MODEL, **body}).json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("one", "other"),
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")],
)
def test_a_score_is_the_cosine_of_embeddings(service, cosines, path, one, other):
    for left in (QUERY, [QUERY], [QUERY] * len(DOCUMENTS)):
        reply = ask(service, path, **{one: left, other: DOCUMENTS})
        assert [row["index"] for row in reply["data"]] == [0, 1, 2, 3]
        assert [row["score"] for row in reply["data"]] == pytest.approx(cosines, abs=1e-5)
        assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 0
    reply = ask(service, path, **{one: QUERY, other: DOCUMENTS[0]})
    assert reply["data"][0]["score"] == pytest.approx(cosines[0], abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_their_scores(service, cosines, path):
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -cosines[index])
    for most in (0, 2, 9):
        reply = ask(service, path, query=QUERY, documents=DOCUMENTS, top_n=most)
        results = reply["results"]
        assert [one["index"] for one in results] == order[: most or None]
        assert [one["document"]["text"] for one in results] == [DOCUMENTS[i] for i in order][
            : most or None
        ]
        found = [one["relevance_score"] for one in results]
        assert found == pytest.approx([cosines[i] for i in order[: most or None]], abs=1e-5)
    adapted = ask(service, path, query=QUERY, documents=DOCUMENTS, model="lora-0")["results"]
    assert adapted != ask(service, path, query=QUERY, documents=DOCUMENTS)["results"]


def test_the_load_is_what_runs_and_waits(service):
    assert serving.ask(service, "GET", "/load").json() == {"server_load": 0}


SPELLED = ["Hello, how are you?", "", "Ein schöner Tag 😀\n", "<|im_start|>user"]
CHAT = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a dog"}]


def call(service, path, body=None):
    method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
    headers = {**serving.HEADERS, "content-type": "application/json"}
    reply = serving.ask(service, method, path, headers, content=content)
    return reply.status_code, reply.json()


@pytest.mark.parametrize("text", SPELLED)
@pytest.mark.parametrize("special", [True, False])
def test_texts_become_tokens_and_texts_again(service, tokenizer, text, special):
    ids = tokenizer.encode(text, add_special_tokens=special)
    body = {"prompt": text, "add_special_tokens": special, "return_token_strs": True}
    status, found = call(service, "/tokenize", body)
    assert (status, found["tokens"], found["count"]) == (200, ids, len(ids))
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert found["max_model_len"] == service.max_model_len
    assert call(service, "/detokenize", {"tokens": ids}) == (200, {"prompt": tokenizer.decode(ids)})


@pytest.mark.parametrize("prompted", [True, False])
def test_chats_become_tokens(service, tokenizer, prompted):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompted)
    ids = tokenizer.encode(text, add_special_tokens=False)
    body = {"messages": CHAT, "add_generation_prompt": prompted, "model": "lora-0"}
    status, found = call(service, "/tokenize", body)
    assert (status, found["tokens"], found["token_strs"]) == (200, ids, None)


def test_a_message_is_continued(service, tokenizer):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    status, found = call(service, "/tokenize", {"messages": CHAT, "continue_final_message": True})
    assert (status, found["tokens"]) == (200, ids)


def test_documents_are_a_variable_of_the_template(tmp_path):
    template = tmp_path / "documents.jinja"
    template.write_text(
        "{% for one in documents or [] %}{{ one.text }}\n{% endfor %}{{ messages[0].content }}"
    )
    with serving.service_of(chat_template=template) as service:
        body = {"messages": CHAT[:1], "documents": [{"title": "t", "text": "a fox"}]}
        _, found = call(service, "/tokenize", body)
        _, text = call(service, "/detokenize", {"tokens": found["tokens"]})
        assert text == {"prompt": "a fox\nwhat is it?"}


def test_the_configuration_is_the_tokenizers(service, tokenizer):
    status, found = call(service, "/tokenizer_info")
    assert status == 200
    assert found["chat_template"] == tokenizer.chat_template
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert found[name] == getattr(tokenizer, name)
