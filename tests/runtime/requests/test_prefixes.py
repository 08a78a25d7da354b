"""Requests that share prefixes: the tokens are transformers', and fewer are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import peft
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.peft.adapter import Adapter
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.memory.pool import PagePool, pages_for
from pcg.runtime.requests.prefixes import Prefixes
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_device import SimulatedAdapter
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, wrap
from tests.support.prompts import prompts
from tests.support.small_engine import expected, make_executor, serve

NEW = 12
(TEXT,) = prompts((45,))
OWN = (0, 3, 7)
"""Tokens that prompts end with, behind the ones that they share."""
MORE_FAMILIES = (
    "gemma3",
    "bloom",
    "gemma2",
    "opt",
    "gpt2",
    "gptj",
    "mpt",
    "falcon-7b",
    "stablelm",
    "gpt_bigcode",
)


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
    ["mistral-window"] + [pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAMILIES],
)
def test_families(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    base = oracle.random_model(family.config(2))
    wrapped = oracle.with_adapter(base, family.usual_targets, rank=3)
    oracle.save(wrapped, tmp_path)
    executor = compiled.executor(base, {"a": str(tmp_path)})
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
        pytest.param(
            peft.PrefixTuningConfig(num_virtual_tokens=20, **CAUSAL), marks=pytest.mark.slow
        ),
        peft.PromptTuningConfig(num_virtual_tokens=20, **CAUSAL),
    ],
    ids=lambda config: str(config.peft_type.value),
)
def test_virtual_tokens_are_shared_too(config: peft.PeftConfig, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["mistral-window"].config(2, max_position_embeddings=128))
    wrapped = wrap(base, config)
    wrapped.save_pretrained(tmp_path)
    executor = compiled.executor(base, {"p": str(tmp_path)})
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


# ---------------------------------------------------------------------------------- the index alone

TOKENS = [[1] * 16, [2] * 16, [1] * 15 + [2], [3] * 7, [0] * 5]
"""Blocks that prompts are put together from, so that many begin alike."""


class Machine(RuleBasedStateMachine):
    """Sequences that find blocks, fill blocks and end, beside a list of what was filled.

    There are pages for all, so that nothing is evicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(100_000)
        self.prefixes = Prefixes(self.pool)
        self.adapters: list[SimulatedAdapter | None] = [
            None,
            SimulatedAdapter("a", 1),
            SimulatedAdapter("a", 1),
            SimulatedAdapter("p", 1, prompt_tokens=20),
        ]
        self.versions = [0] * len(self.adapters)
        self.filled: set[tuple[int, int, tuple[int, ...]]] = set()
        self.running: list[tuple[Sequence, int, int]] = []
        self.count = 0

    @rule(parts=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=5), place=st.integers(0, 3))
    def begin(self, parts: list[list[int]], place: int) -> None:
        prompt = tuple(token for part in parts for token in part)
        asked = Request(prompt, SamplingParams(max_new_tokens=50), self.adapters[place])
        sequence = Sequence(f"request {self.count}", self.count, asked, limit=50)
        self.count += 1
        self.prefixes.find(sequence)
        self.check_found(sequence, place, self.versions[place], 0)
        if sequence.table is None:
            sequence.table = self.pool.open(sequence.id)
        missing = pages_for(sequence.length) - len(sequence.table.pages)
        self.pool.extend(sequence.table, missing)
        self.running.append((sequence, place, self.versions[place]))

    def check_found(self, sequence: Sequence, place: int, version: int, before: int) -> None:
        """As many blocks as were filled, one after the other, but for the last token."""
        ids, blocks = sequence.ids(0, sequence.length), before // PAGE_TOKENS
        while (end := (blocks + 1) * PAGE_TOKENS) < len(ids):
            if (place, version, tuple(ids[:end])) not in self.filled:
                break
            blocks += 1
        assert sequence.cached == blocks * PAGE_TOKENS

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50), tokens=st.integers(1, 40), token=st.integers(1, 3))
    def go_on(self, which: int, tokens: int, token: int) -> None:
        sequence, place, version = self.running[which % len(self.running)]
        if sequence.pending > 1:
            before, is_current = sequence.cached, version == self.versions[place]
            self.prefixes.find(sequence)
            assert sequence.cached >= before
            if before % PAGE_TOKENS == 0 and is_current:
                self.check_found(sequence, place, version, before)
        table = sequence.table
        assert table is not None
        count = min(tokens, sequence.pending)
        self.pool.extend(table, max(pages_for(sequence.cached + count) - len(table.pages), 0))
        self.prefixes.keep(sequence, count)
        if version == self.versions[place]:
            self.fill(sequence, place, count)
        sequence.cached += count
        if not sequence.pending:
            sequence.generated.append(token)

    def fill(self, sequence: Sequence, place: int, count: int) -> None:
        """Note blocks; those that wait behind one that it fills as others did come a step later."""
        ids, last = sequence.ids(0, sequence.length), sequence.cached + count
        for end in range(PAGE_TOKENS, last + 1, PAGE_TOKENS):
            block = place, self.versions[place], tuple(ids[:end])
            if block in self.filled and end - PAGE_TOKENS < sequence.cached < end:
                return
            self.filled.add(block)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50))
    def end(self, which: int) -> None:
        sequence, _, _ = self.running.pop(which % len(self.running))
        assert sequence.table is not None
        self.pool.close(sequence.table)

    @rule(place=st.integers(1, 3))
    def change(self, place: int) -> None:
        adapter = self.adapters[place]
        assert adapter is not None
        self.prefixes.forget(adapter)
        self.versions[place] += 1

    @rule()
    def reset(self) -> None:
        self.running.clear()
        self.pool.reset(())
        self.prefixes.reset()
        self.filled.clear()
        for place in range(len(self.versions)):
            self.versions[place] += 1

    @invariant()
    def is_sound(self) -> None:
        self.prefixes.check_integrity()
        current = {entry for entry in self.filled if entry[1] == self.versions[entry[0]]}
        assert len(self.prefixes) == len(current)
        shared = [sequence.table for sequence, _, _ in self.running]
        assert all(table is not None and table.shared <= len(table.pages) for table in shared)


Machine.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
