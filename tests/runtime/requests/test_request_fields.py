"""Fields of requests from `generate` to their completions, against transformers' generate."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pcg.errors import GenerationError
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion, Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import compiled, tiny_llama
from tests.support.prompts import prompts
from tests.support.small_engine import make_engine

EOS = 2
NEW = 12
PROMPTS = prompts((5, 9, 3, 12, 7, 4, 8))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose greedy outputs differ from token to token."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads that kernels know
    path = tmp_path_factory.mktemp("model")
    return tiny_llama.save(path, seed=3, initializer_range=0.3, **sizes)


@pytest.fixture(scope="module")
def executor(directory: Path) -> Executor:
    return compiled.executor(directory)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def greedy(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    given = {"eos_token_id": EOS, "pad_token_id": 0, "do_sample": False, "max_new_tokens": NEW}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about options of generation
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given | options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_batch_of_fields_generates_as_transformers_does(
    directory: Path, executor: Executor, model: Any, backend: str
) -> None:
    plain = [greedy(model, prompt) for prompt in PROMPTS]
    first, pair = plain[0][2], tuple(plain[1][3:5])
    end = plain[2][1]
    bias = {int(t): 2.5 for t in range(10, 40)} | {7: -3.0}
    allowed = list(range(100, 160))
    ours: list[dict[str, Any]] = [
        {"bad_words": ((first,),)},
        {"bad_words": (pair,)},
        {"stop_token_ids": (end,), "min_tokens": 6},
        {"logit_bias": bias},
        {"allowed_token_ids": tuple(allowed), "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5},
        {},
    ]
    theirs: list[dict[str, Any]] = [
        {"bad_words_ids": [[first]]},
        {"bad_words_ids": [list(pair)]},
        {"eos_token_id": [EOS, end], "min_new_tokens": 6},
        {"sequence_bias": [[[token], value] for token, value in bias.items()]},
        {
            "suppress_tokens": sorted(set(range(512)) - set(allowed)),
            "repetition_penalty": 1.3,
        },
        {"repetition_penalty": 1.5},
        {},
    ]
    expected = [
        greedy(model, prompt, **options) for prompt, options in zip(PROMPTS, theirs, strict=True)
    ]
    assert sum(found != each for found, each in zip(plain, expected, strict=True)) >= 5
    served = executor if backend == "torch" else compiled.executor(directory, backend=backend)
    engine = make_engine(served)
    for prompt, options in zip(PROMPTS, ours, strict=True):
        engine.submit(Request(tuple(prompt), SamplingParams(max_new_tokens=NEW, **options)))
    found: dict[int, Completion] = {}
    while not engine.is_idle:
        for chunk in engine.step():
            if chunk.completion is not None:
                found[chunk.index] = chunk.completion
    assert [list(found[i].token_ids) for i in range(len(ours))] == expected
    assert found[2].stop_reason == (end if expected[2][-1] == end else None)


def test_what_ended_an_output(executor: Executor) -> None:
    assert executor.tokenizer is not None
    (whole,) = executor.generate([PROMPTS[0]], max_new_tokens=NEW)
    tokens, text = list(whole.token_ids), whole.text
    stop = text[3:6]

    def ended(**options: Any) -> Completion:
        (completion,) = executor.generate([PROMPTS[0]], max_new_tokens=NEW, **options)
        return completion

    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    by_text = ended(stop=stop)
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", stop)
    assert by_text.text == text[: text.index(stop)]
    assert ended(stop=stop, include_stop_str_in_output=True).text.endswith(stop)
    late = ended(stop=stop, min_tokens=NEW)
    assert (late.text, late.finish_reason, late.stop_reason) == (text, "length", None)
    by_token = ended(stop_token_ids=[tokens[4]])
    assert by_token.token_ids == tuple(tokens[: tokens.index(tokens[4]) + 1])
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", tokens[4])
    included = ended(stop_token_ids=[tokens[4]], include_stop_str_in_output=True)
    assert included.text == executor.tokenizer.decode(included.token_ids)
    assert by_token.text == executor.tokenizer.decode(by_token.token_ids[:-1])
    by_model = ended(logit_bias={EOS: 100.0}, min_tokens=3)
    assert (by_model.token_ids[-1], len(by_model.token_ids)) == (EOS, 4)
    assert (by_model.finish_reason, by_model.stop_reason) == ("stop", None)


def test_special_tokens_are_left_out_unless_they_are_asked_for(executor: Executor) -> None:
    options: dict[str, Any] = {"allowed_token_ids": [1, 70], "max_new_tokens": 6, "seed": 0}
    skipped, shown = executor.generate(
        [PROMPTS[0]] * 2,
        temperature=5.0,
        skip_special_tokens=[True, False],
        **options | {"seed": [0, 0]},
    )
    assert skipped.token_ids == shown.token_ids
    assert {1, 70} == set(shown.token_ids)
    assert executor.tokenizer is not None
    assert shown.text == executor.tokenizer.decode(shown.token_ids, skip_special_tokens=False)
    assert "<|im_start|>" in shown.text
    assert "<|im_start|>" not in skipped.text


def test_a_request_without_a_token_left_fails_alone(executor: Executor) -> None:
    engine = make_engine(executor)
    params = SamplingParams(max_new_tokens=5)
    hostile = SamplingParams(allowed_token_ids=(3,), bad_words=((3, 3),), max_new_tokens=5)
    for each in (params, hostile, params):
        engine.submit(Request(tuple(PROMPTS[1]), each))
    ends = {}
    while not engine.is_idle:
        ends |= {chunk.index: chunk for chunk in engine.step() if chunk.completion is not None}
    assert isinstance(ends[1].error, GenerationError)
    assert "no token is left to draw" in str(ends[1].error)
    (alone,) = executor.generate([PROMPTS[1]], max_new_tokens=5)
    assert ends[0].completion.token_ids == ends[2].completion.token_ids == alone.token_ids
