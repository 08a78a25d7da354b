"""Requests that share prefixes: the tokens are transformers', and fewer are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import peft
import pytest

import pcg.compiler as compiler
from pcg.peft.adapter import Adapter
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.report import serving_report
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, wrap
from tests.support.prompts import prompts
from tests.support.small_engine import LORA, expected, make_executor, serve

NEW = 12
(TEXT,) = prompts((45,))
OWN = (0, 3, 7)
"""Tokens that prompts end with, behind the ones that they share."""
MORE_FAMILIES = ("gemma2", "opt", "gpt2", "gptj", "mpt", "falcon-7b", "stablelm", "gpt_bigcode")


class Counted:
    """An engine, and how many tokens it computes for requests."""

    def __init__(self, executor: Executor, pages: int = 64, **options: Any) -> None:
        page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
        limits = options.pop("limits", None)
        self.engine: Engine = executor.engine(limits, kv_cache_bytes=pages * page_bytes, **options)
        self.computed = 0
        start = self.engine.device.start

        def counting(chunks: Any, windows: Any) -> Any:
            self.computed += sum(count for _, count in chunks)
            return start(chunks, windows)

        self.engine.device.start = counting  # type: ignore[method-assign]

    def serve(self, asked: list[Request], every: int = 1) -> tuple[list[list[int]], list[int]]:
        """Tokens of each request, and how many of its prompt were in the cache already."""
        done = serve(self.engine, asked, every)
        self.engine = self.engine
        return [list(one.token_ids) for one in done], [one.cached_tokens for one in done]


def request(prompt: List[int], adapter: Adapter | None = None, new: int = NEW) -> Request:
    return Request(tuple(prompt), SamplingParams(max_new_tokens=new, ignore_eos=True), adapter)


def alike(adapter: Adapter | None, length: int = 40) -> list[Request]:
    """Requests for one adapter, whose prompts begin alike and end differently."""
    return [request([*TEXT[:length], *range(3, 3 + own)], adapter) for own in OWN]


@pytest.mark.parametrize(
    "name",
    ["mistral-window", "gemma3", "bloom", "falcon-7b"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAMILIES],
)
def test_families(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    base = oracle.random_model(family.config(2))
    wrapped = oracle.with_adapter(base, family.usual_targets, rank=3)
    oracle.save(wrapped, tmp_path)
    executor = compiler.compile(base, {"a": str(tmp_path)})
    adapter = executor.adapters["a"]
    asked = [*alike(None), *alike(adapter), request(TEXT[:16], adapter)]
    models = [base] * 3 + [wrapped] * 4
    theirs = [
        oracle.greedy(model, list(one.prompt_ids), NEW)
        for model, one in zip(models, asked, strict=True)
    ]
    for every in (1, 40):  # in one step with what they share, or behind its end
        ours = Counted(executor)
        found, cached = ours.serve(asked, every)
        assert found == theirs
        assert cached == [0, 32, 32, 0, 32, 32, 0]
        alone = Counted(executor, prefix_caching=False)
        assert alone.serve(asked, every) == (theirs, [0] * 7)
        assert ours.computed == alone.computed - 4 * 32


@pytest.mark.parametrize(
    "config",
    [
        peft.PrefixTuningConfig(num_virtual_tokens=20, **CAUSAL),
        peft.PromptTuningConfig(num_virtual_tokens=20, **CAUSAL),
    ],
    ids=lambda config: str(config.peft_type.value),
)
def test_virtual_tokens_are_shared_too(config: peft.PeftConfig, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["mistral-window"].config(2, max_position_embeddings=128))
    wrapped = wrap(base, config)
    wrapped.save_pretrained(tmp_path)
    executor = compiler.compile(base, {"p": str(tmp_path)})
    asked = [*alike(executor.adapters["p"]), *alike(None)]
    theirs = [oracle.greedy(wrapped, list(one.prompt_ids), NEW) for one in asked[:3]]
    theirs += [oracle.greedy(base, list(one.prompt_ids), NEW) for one in asked[3:]]
    ours, alone = Counted(executor), Counted(executor, prefix_caching=False)
    found, cached = ours.serve(asked)
    assert found == theirs
    assert alone.serve(asked)[0] == theirs
    # Three blocks, 20 of whose 48 tokens are virtual and so none of the prompt's.
    assert cached == [0, 28, 28, 0, 32, 32]
    assert ours.computed == alone.computed - 2 * 48 - 2 * 32


def test_a_prompt_in_chunks_finds_what_another_computes_meanwhile() -> None:
    executor = make_executor()
    asked = [request(TEXT, None), request(TEXT, None)]
    ours = Counted(executor, limits=Limits(tokens=32, least_chunk=4))
    found, cached = ours.serve(asked)
    assert found == expected(asked)
    assert cached[1] == 32
    assert ours.computed == 2 * (len(TEXT) + NEW - 1) - 32


def test_a_new_version_never_meets_an_old_cache() -> None:
    executor = make_executor()
    ours = Counted(executor)
    prefixes = ours.engine.scheduler.prefixes
    assert prefixes is not None
    old = executor.adapters["a"]
    asked = [request(TEXT, old)]
    assert ours.serve(asked) == (expected(asked), [0])
    assert ours.serve([request(TEXT, old)])[1] == [32]
    ours.engine.submit(request(TEXT, old, new=40))
    ours.engine.step()
    executor.state.put_adapter(old.map(lambda tensor: tensor * 1.5))
    new = executor.adapters["a"]
    other = make_executor()
    other.state.put_adapter(new)
    theirs = other.generate([TEXT], "a", max_new_tokens=NEW, ignore_eos=True)
    (_, tokens), cached = ours.serve([request(TEXT, new)])
    assert cached[-1] == 0
    assert tokens == list(theirs[0].token_ids) != expected(asked)[0]
    # The old version's request filled blocks after it was replaced, and nobody finds them.
    assert len(prefixes) == len(tokens + TEXT) // 16
    with_new = len(prefixes)
    for tensor in new.tensors:
        tensor.mul_(0.5)
    executor.refresh_adapter("a")
    assert len(prefixes) == 0 < with_new
    assert ours.serve([request(TEXT, new)])[1] == [0]
    executor.remove_adapter("a")
    assert len(prefixes) == 0
    ours.engine.check_integrity()
    assert ours.engine.pool.shared.unread == 0


def test_evicted_under_pressure() -> None:
    """More different prompts than pages: the shared beginning stays, what nobody asks for goes."""
    executor = make_executor()
    tails = prompts(tuple(range(12, 24)))
    asked = [request([*TEXT[:20], *tail], executor.adapters["a"]) for tail in tails]
    ours = Counted(executor, 14)
    found, cached = ours.serve(asked, 5)
    assert found == expected(asked)
    assert cached == [0] + [16] * 11
    prefixes = ours.engine.scheduler.prefixes
    assert prefixes is not None
    assert len(prefixes) <= 7  # of more than 12, half of the pages
    again, cached = ours.serve(asked[:1])
    assert again == expected(asked[:1])
    assert cached == [16]


def test_a_preempted_request_finds_its_own_blocks() -> None:
    executor = make_executor()
    asked = [request(prompt, None, 40) for prompt in prompts((20, 60))]
    computed = []
    for prefix_caching in (True, False):
        ours = Counted(executor, 9, prefix_caching=prefix_caching)
        found, cached = ours.serve(asked)
        assert found == expected(asked)
        assert cached == [0, 0]  # what it computed itself does not count
        assert any(event.kind is Kind.PREEMPTED for event in ours.engine.log)
        computed.append(ours.computed)
    assert computed[0] == computed[1] - 16


def test_blocks_of_a_cancelled_request_are_found() -> None:
    executor = make_executor()
    ours = Counted(executor)
    name = ours.engine.submit(request(TEXT))
    ours.engine.step()
    ours.engine.cancel(name)
    asked = [request(TEXT)]
    done = serve(ours.engine, asked)
    assert [list(one.token_ids) for one in done if one.finish_reason == "length"] == expected(asked)
    assert [one.cached_tokens for one in done] == [0, 32]


def test_what_a_failed_step_wrote_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()
    ours = Counted(executor)
    asked = [request(TEXT), request(TEXT[:40])]
    for one in asked:
        ours.engine.submit(one)
    with monkeypatch.context() as patched:

        def failing(*_: object) -> list[int]:
            raise RuntimeError("the device broke down")

        patched.setattr(ours.engine.device, "start", failing)
        assert ours.engine.step() == []
    ours.engine.check_integrity()
    prefixes = ours.engine.scheduler.prefixes
    assert prefixes is not None
    assert len(prefixes) == 0
    done = serve(ours.engine, [])
    assert [list(one.token_ids) for one in done] == expected(asked)


def test_beside_finetuning_and_in_the_report() -> None:
    """Windows of a job share nothing, and the log tells how much was found."""
    executor = make_executor()
    ours = Counted(executor, limits=Limits(tokens=24))
    rows = [TEXT[:40]] * 4
    ours.engine.finetune(
        [Example(row, row) for row in rows], "mine", peft=LORA, max_steps=2, batch_size=2
    )
    asked = alike(executor.adapters["a"])
    found, cached = ours.serve(asked, 3)
    assert found == expected(asked)
    assert cached == [0, 32, 32]
    report = serving_report(ours.engine.log)
    assert [one.cached_tokens for one in report.requests] == cached
    assert report.cached_tokens == 64
    assert report.prefix_cache_hit_rate == 64 / sum(len(one.prompt_ids) for one in asked)
    json = report.to_json()
    assert json["total_cached_tokens"] == 64
    assert json["prefix_cache_hit_rate"] == report.prefix_cache_hit_rate


def test_generate_computes_a_common_prefix_once() -> None:
    executor = make_executor()
    sequences = [[*TEXT[:40], own] for own in (3, 4, 5)]
    done = executor.generate(sequences, "a", max_new_tokens=NEW, ignore_eos=True)
    asked = [request(sequence, executor.adapters["a"]) for sequence in sequences]
    assert [list(one.token_ids) for one in done] == expected(asked)
    assert [one.cached_tokens for one in done] == [0, 32, 32]


def test_a_tenant_finds_nothing_of_anothers() -> None:
    """How many tokens were cached tells nothing about others, unless the operator shares."""
    executor = make_executor()
    same = [
        dataclasses.replace(request(TEXT), tenant=tenant, cache_salt=salt)
        for tenant, salt in [("a", ""), ("a", ""), ("b", ""), ("a", "x"), ("", "a"), ("b", "")]
    ]
    reuse = len(TEXT) // 16 * 16 if len(TEXT) % 16 else len(TEXT) - 16
    tokens, found = Counted(executor).serve(same, 30)
    assert found == [0, reuse, 0, 0, 0, reuse]
    assert tokens == expected(same)
    _, found = Counted(executor, prefixes_between_tenants=True).serve(same, 30)
    assert found == [0, reuse, reuse, 0, 0, reuse]
