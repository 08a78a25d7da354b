"""Scores of an engine's tokens and embeddings are those of transformers and peft, in any batch."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from pcg.errors import GenerationError, ProgramError
from pcg.ir.program.program import ModelGraph
from pcg.runtime.admission.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.model.runner import ModelRunner
from pcg.runtime.requests.request import Completion, Request
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_device import SimulatedDevice
from tests.support import compiled, oracle, tiny_llama
from tests.support.families import BY_NAME
from tests.support.peft_cases import CONFIGS, wrap
from tests.support.prompts import TOLERANCE, prompts
from tests.support.small_engine import make_engine, make_executor, models

RANKS = (2, 3, 4, 8, 8, 12, 16, 16)
LENGTHS = (9, 4, 37, 5, 18, 1, 23, 16)


@functools.cache
def mixed() -> tuple[Executor, dict[str | None, Any]]:
    """An executor with an adapter of each rank, and what peft makes of each."""
    base = oracle.random_model(BY_NAME["llama3"].config(2, max_position_embeddings=128))
    executor, wrapped = compiled.executor(base), {None: base}
    for i, rank in enumerate(RANKS):
        name = f"a{i}"
        recipe = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
        adapter = executor.add_adapter(name, {**recipe, "target_modules": "all-linear"})
        wrapped[name] = oracle.with_adapter(base, "all-linear", rank=rank, seed=i)
        oracle.copy_lora(adapter, wrapped[name])
        executor.refresh_adapter(name)
    return executor, wrapped


@functools.cache
def shared() -> Executor:
    return make_executor()


def check(model: Any, prompt: list[int], done: Completion, count: int) -> None:
    """Compare the logprobs of a completion's tokens with the model's own."""
    assert done.logprobs is not None
    ids = [*prompt, *done.token_ids]
    expected = oracle.logits(model, ids).log_softmax(-1)[len(prompt) - 1 : -1]
    assert len(done.logprobs) == len(done.token_ids) == len(expected)
    for token, found, row in zip(done.token_ids, done.logprobs, expected, strict=True):
        check_token(found, token, row, count)


def check_token(found: TokenLogprobs, token: int, row: torch.Tensor, count: int) -> None:
    assert found.token_id == token
    assert abs(found.logprob - float(row[token])) < TOLERANCE
    assert len(found.top) == count
    values = torch.tensor([value for _, value in found.top])
    torch.testing.assert_close(values, row.topk(count).values, rtol=0, atol=TOLERANCE)
    own = row[[token for token, _ in found.top]]
    torch.testing.assert_close(values, own, rtol=0, atol=TOLERANCE)


def test_eight_mixed_adapters() -> None:
    executor, wrapped = mixed()
    names = [f"a{i}" for i in range(8)]
    asked = prompts(LENGTHS)
    counts = [5, 0, 20, 1, 3, 5, 5, 2]
    done = executor.generate(asked, names, max_new_tokens=6, ignore_eos=True, logprobs=counts)
    for name, prompt, one, count in zip(names, asked, done, counts, strict=True):
        check(wrapped[name], prompt, one, count)


@pytest.mark.parametrize("count", [-1, "5", 1.0, True, math.inf])
def test_no_count(count: Any) -> None:
    with pytest.raises(GenerationError, match=r"logprobs=.*use an int of at least 0"):
        shared().request([1, 2], logprobs=count)


def test_more_than_the_limit() -> None:
    executor = shared()
    with pytest.raises(GenerationError, match=r"logprobs=21.*at most 20.*Limits\(logprobs=…\)"):
        executor.generate([[1, 2]], logprobs=21)
    engine = make_engine(executor, 8, Limits(logprobs=10**6))
    engine.submit(executor.request([1, 2], logprobs=10**6, max_new_tokens=1))
    (chunk,) = engine.step()
    assert chunk.completion is not None
    (found,) = chunk.completion.logprobs or ()
    assert len(found.top) == executor.program.base.vocabulary


# ------------------------------------------------------------------------------------ prompts


def check_prompt(model: Any, prompt: list[int], done: Completion, count: int) -> None:
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    assert len(done.prompt_logprobs) == len(prompt) == done.prompt_tokens
    expected = oracle.logits(model, prompt).log_softmax(-1)
    for token, found, row in zip(prompt[1:], done.prompt_logprobs[1:], expected, strict=False):
        assert found is not None
        check_token(found, token, row, count)


def test_prompts_alone_of_mixed_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits never exist for more tokens at once than the loss takes."""
    executor, wrapped = mixed()
    monkeypatch.setattr(ModelGraph, "loss_chunk", 10)
    rows: list[int] = []
    logits_of = ModelRunner.logits_of

    def counting(*arguments: Any) -> torch.Tensor:
        rows.append(len(logits := logits_of(*arguments)))
        return logits

    monkeypatch.setattr(ModelRunner, "logits_of", counting)
    names = [f"a{i}" for i in range(8)]
    asked = prompts(LENGTHS)
    done = executor.generate(asked, names, max_new_tokens=0, prompt_logprobs=3)
    for name, prompt, one in zip(names, asked, done, strict=True):
        check_prompt(wrapped[name], prompt, one, 3)
        assert (one.token_ids, one.text, one.finish_reason) == ((), "", "length")
    assert max(rows) == 10
    assert sum(rows) == sum(LENGTHS) - len(LENGTHS)


def test_virtual_tokens_are_no_part_of_the_prompt() -> None:
    executor = make_executor()
    base, _ = models()
    wrapped = peft.get_peft_model(
        copy.deepcopy(base), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=18)
    ).eval()
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 18}
    adapter = executor.add_adapter("p", config)
    (ours,) = adapter.tensors
    ours.copy_(wrapped.prompt_encoder["default"].embedding.weight.detach())
    executor.refresh_adapter("p")
    (prompt,) = prompts((21,))
    for _ in range(2):  # the second time behind what the first left
        (done,) = executor.generate([prompt], "p", max_new_tokens=2, prompt_logprobs=2, logprobs=0)
        check_prompt(wrapped, prompt, done, 2)
        check(wrapped, prompt, done, 0)


def test_echo(model_with_tokenizer: Executor) -> None:
    executor = model_with_tokenizer
    text = "def add(a, b):"
    plain = executor.generate(text, max_new_tokens=4, ignore_eos=True)
    done = executor.generate(text, max_new_tokens=4, ignore_eos=True, echo=True, logprobs=1)
    assert done.text == text + plain.text
    assert done.token_ids == plain.token_ids
    assert done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == done.prompt_tokens
    chunks = executor.generate(text, max_new_tokens=4, ignore_eos=True, echo=True, stream=True)
    assert "".join(chunk.text for chunk in chunks) == done.text
    alone = executor.generate(text, max_new_tokens=0, echo=True)
    assert (alone.text, alone.token_ids, alone.prompt_logprobs) == (text, (), None)


@pytest.fixture(scope="module")
def model_with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return compiled.executor(tiny_llama.save(tmp_path_factory.mktemp("models") / "tiny"))


def test_a_prompt_as_long_as_the_model_s_positions() -> None:
    executor = shared()
    base, _ = models()
    (prompt,) = prompts((128,))
    (done,) = executor.generate([prompt], max_new_tokens=0, prompt_logprobs=0)
    check_prompt(base, prompt, done, 0)
    with pytest.raises(GenerationError, match="128 positions"):
        executor.generate([prompt], max_new_tokens=1)
    with pytest.raises(GenerationError, match="128 positions"):
        executor.generate([[*prompt, 1]], max_new_tokens=0)


def test_further_tokens_of_a_prompt_in_chunks_have_their_places() -> None:
    executor = shared()
    engine = make_engine(executor, 64, Limits(tokens=16, least_chunk=3))
    first, second = prompts((21, 18))
    ragged = [[first[place], 7][: place % 3] for place in range(1, len(first))]
    asked: list[dict[str, Any]] = [
        {"prompt_targets": ragged, "prompt_logprobs": 1},
        {"prompt_draws": 2, "prompt_logprobs": 0, "temperature": 0.9, "seed": 3},
        {"prompt_draws": 1, "prompt_logprobs": 1},
    ]
    for prompt, fields in zip((first, second, second), asked, strict=True):
        engine.submit(executor.request(prompt, max_new_tokens=0, **fields))
    done: dict[int, Completion] = {}
    while not engine.is_idle:
        for chunk in engine.step():
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
    logprobs = [executor.logits([one])[0].float().log_softmax(-1) for one in (first, second)]
    targeted, drawn, greedy = ((done[i].prompt_logprobs or ())[1:] for i in range(3))
    for place, (one, ids) in enumerate(zip(targeted, ragged, strict=True)):
        assert one is not None
        assert [token for token, _ in one.top[1:]] == ids
        for token, found in one.top[1:]:
            assert found == pytest.approx(logprobs[0][place, token].item(), abs=1e-4)
    for place, (one, best) in enumerate(zip(drawn, greedy, strict=True)):
        assert one is not None
        assert best is not None
        assert len(one.top) == 2
        for token, found in one.top:
            assert found == pytest.approx(logprobs[1][place, token].item(), abs=1e-4)
        assert best.top[0] == best.top[1]
    for fields, said in (
        ({"prompt_targets": [[1]] * 3, "prompt_logprobs": 0}, "3 rows"),
        ({"prompt_targets": [[1]] * 20}, "give that, too"),
        ({"prompt_draws": 2**17, "prompt_logprobs": 0}, "262144"),
    ):
        with pytest.raises(GenerationError, match=said):
            executor.request(first, **fields)


def test_a_simulated_device_has_none() -> None:
    device = SimulatedDevice(None, None)  # type: ignore[arg-type]
    for fields in ({"logprobs": 0}, {"prompt_logprobs": 0}):
        with pytest.raises(GenerationError, match="computes no logits"):
            device.open(Request((1, 2), SamplingParams(**fields)), 0)


WARPED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 7},
    {"temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.4, "min_p": 0.05, "logit_bias": {5: 2.0, 9: -3.0}},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0},
]


def warped(logits: torch.Tensor, ids: list[int], fields: dict[str, Any]) -> torch.Tensor:
    """The log-probabilities that transformers draws from after some tokens, [vocabulary]."""
    steps = transformers.LogitsProcessorList()
    scores = logits[None].clone()
    for token, bias in fields.get("logit_bias", {}).items():
        scores[0, token] += bias
    if "repetition_penalty" in fields:
        penalty = fields["repetition_penalty"]
        steps.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    if fields["temperature"]:
        steps.append(transformers.TemperatureLogitsWarper(fields["temperature"]))
    for name, warper in (
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ):
        if name in fields:
            steps.append(warper(fields[name]))
    return steps(torch.tensor([ids]), scores)[0].log_softmax(-1)


def test_processed_ones_are_of_what_tokens_are_drawn_from() -> None:
    """In one batch with requests that want the model's own, in one step and in several."""
    executor, wrapped = mixed()
    names, asked = [f"a{i}" for i in range(6)], prompts(LENGTHS[:6])
    fields = [*WARPED, {"temperature": 0.7, "top_k": 7}]
    modes = ["processed_logprobs"] * 5 + ["raw_logprobs"]
    given = [
        executor.request(
            prompt, name, seed=7, max_new_tokens=5, ignore_eos=True, logprobs=20,
            logprobs_mode=mode, **one,
        )
        for prompt, name, one, mode in zip(asked, names, fields, modes, strict=True)
    ]  # fmt: skip
    with make_engine(executor, 64, Limits(running=6)).start() as engine:
        streams = [engine.submit_request(request) for request in given]
        done = [stream.wait(60) for stream in streams]
    for name, prompt, one, found in zip(names[:5], asked, WARPED, done, strict=False):
        assert found.logprobs is not None
        ids = [*prompt, *found.token_ids]
        logits = oracle.logits(wrapped[name], ids)
        for place, at in enumerate(found.logprobs, len(prompt)):
            expected = warped(logits[place - 1], ids[:place], one)
            assert abs(at.logprob - float(expected[ids[place]])) < TOLERANCE
            values = torch.tensor([value for _, value in at.top])
            torch.testing.assert_close(values, expected.topk(20).values, rtol=0, atol=TOLERANCE)
            assert at.logprob > -math.inf
    assert min(value for _, value in done[0].logprobs[0].top) == -math.inf  # beyond top_k=7
    check(wrapped["a5"], asked[5], done[5], 20)
    (again,) = executor.generate(
        asked[:1], names[:1], seed=7, max_new_tokens=5, ignore_eos=True, logprobs=20,
        logprobs_mode="processed_logprobs", **WARPED[0],
    )  # fmt: skip
    assert again.token_ids == done[0].token_ids
    assert again.logprobs is not None
    for one, other in zip(again.logprobs, done[0].logprobs, strict=True):
        assert abs(one.logprob - other.logprob) < TOLERANCE


def test_modes_that_are_none_are_refused() -> None:
    for mode in ("raw_logits", "processed", None, 3):
        with pytest.raises(GenerationError, match="use raw_logprobs or processed_logprobs"):
            shared().request([1, 2], None, logprobs=1, logprobs_mode=mode)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- embeddings


@torch.no_grad()
def states(model: Any, prompt: list[int]) -> Tensor:
    """Return the last hidden states of the prompt's own tokens."""
    out = model(torch.tensor([prompt]), output_hidden_states=True)
    return out.hidden_states[-1][0, -len(prompt) :]


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_mixed_with_adapters(pooling: Any) -> None:
    executor = shared()
    base, wrapped = models()
    asked = prompts(LENGTHS[:6])
    names = ["a", None] * 3
    found = executor.embed(asked, names, pooling=pooling)
    assert found.shape == (6, 64)
    for row, prompt, name in zip(found, asked, names, strict=True):
        wanted = states(base if name is None else wrapped, prompt)
        close(row, wanted[-1] if pooling == "last" else wanted.mean(0))
    unit = executor.embed(asked, names, pooling=pooling, normalize=True)
    close(unit, torch.nn.functional.normalize(found))


@pytest.mark.parametrize(
    ("method", "pooling"),
    [("prompt", "mean"), ("prefix", "last"), ("biases", "mean"), ("ia3-head", "last")],
)
def test_methods(method: str, pooling: Any, tmp_path: Path) -> None:
    """Virtual tokens do not count, and what changes the head's product changes no state."""
    base = oracle.random_model(BY_NAME["llama-biases"].config(2))
    wrapped = wrap(base, CONFIGS["llama-biases"][method])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(tmp_path / "a", save_embedding_layers=False)
    executor = compiled.executor(base)
    executor.add_adapter("a", tmp_path / "a")
    asked = prompts((21, 3))
    found = executor.embed(asked, "a", pooling=pooling)
    for row, prompt in zip(found, asked, strict=True):
        wanted = states(wrapped, prompt)
        close(row, wanted[-1] if pooling == "last" else wanted.mean(0))


def test_texts_and_running_engines(tmp_path: Path) -> None:
    executor = compiled.executor(tiny_llama.save(tmp_path / "tiny"))
    one = executor.embed("def add(a, b):")
    two = executor.embed(["def add(a, b):", "class"])
    assert one.shape == two.shape[1:]
    close(one, two[0])
    with executor.engine().start() as running:
        close(executor.embed("def add(a, b):"), one)
        done = running.submit("def add(a, b):", pooling="last", normalize=True).wait(60)
        assert done.embedding is not None
        close(done.embedding, one / one.norm())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "cls"}, r"pooling='cls'; use 'last', 'mean' or None"),
        ({"pooling": "last", "normalize": 1}, "normalize=1; use True or False"),
        ({"normalize": True}, "normalize=True is for embeddings"),
        ({"pooling": "last", "prompt_logprobs": 1}, "prompt_logprobs=1 with pooling='last'"),
        ({"pooling": "mean", "max_new_tokens": 5}, "max_new_tokens=5 with pooling='mean'"),
        ({"pooling": "mean", "n": 2}, "n=2 with pooling='mean'"),
        ({"pooling": "mean", "echo": True}, "echo=True with pooling='mean'"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        shared().request([1, 2], **fields)


def test_no_prompts() -> None:
    with pytest.raises(GenerationError, match="no prompts to embed"):
        shared().embed([])
    with pytest.raises(GenerationError, match="pooling=None; use 'last' or 'mean'"):
        shared().embed([[1, 2]], pooling=None)  # type: ignore[arg-type]


def test_programs_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()
    monkeypatch.delitem(executor.serving.runner._functions, "last_hidden")  # type: ignore[arg-type]
    with pytest.raises((ProgramError, GenerationError), match="compile it again for embeddings"):
        executor.embed([[1, 2]])
