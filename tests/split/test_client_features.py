"""All that an executor offers works at a client, with the results of the undivided executor."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
import torch

import pcg
from pcg.errors import AdapterError, FinetuneInterrupted, UnsupportedError
from pcg.peft.registry import SHORTHANDS
from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.split.client.connect import SplitExecutor
from tests.support import compiled, oracle, tiny_llama
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts
from tests.support.split_base import running_base

LORA = pcg.LoraConfig(r=4, target_modules="all-linear")
ROWS = [Example(one, one) for one in prompts([9, 5])]
JOB = {
    "max_steps": 2, "batch_size": 2, "learning_rate": 1e-2, "eps": 1.0, "seed": 3,
    "progress": False,
}  # fmt: skip
PROMPTS = prompts([6, 3])


@dataclass
class Pair:
    """An undivided executor, and a client of a base by its weights."""

    whole: Executor
    split: SplitExecutor


@pytest.fixture(scope="module", params=["llama3", pytest.param("gpt2", marks=pytest.mark.slow)])
def pair(request):
    model = oracle.random_model(BY_NAME[request.param].config(2))
    whole = compiled.executor(model)
    with running_base(whole) as base, base.connect() as split:
        yield Pair(whole, split)


QUICK = ("adalora", "p-tuning")


@pytest.mark.parametrize(
    "method",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(SHORTHANDS)
    ],
)
def test_every_method_trains_to_the_same_adapter(pair, method):
    name = method.replace("-", "_")
    found = []
    for executor in (pair.whole, pair.split):
        try:
            executor.finetune(ROWS, adapter=name, peft=method, **JOB)
        except AdapterError:
            if method != "bitfit":  # Llama has no biases
                raise
            continue
        done = executor.generate(PROMPTS, name, max_new_tokens=4, temperature=0)
        found.append((executor.adapters[name].tensors, [one.token_ids for one in done]))
    if found:
        (tensors, tokens), (own, theirs) = found
        assert tokens == theirs
        for one, other in zip(tensors, own, strict=True):
            assert oracle.relative_error(other, one) < TOLERANCE


@pytest.mark.parametrize("init", ["pissa", "olora", "loftq", "eva"])
def test_starts_that_read_the_base_are_refused_with_the_fix(pair, init):
    peft = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear", "init_lora_weights": init}
    with pytest.raises(UnsupportedError, match="let peft make and save one, and load that"):
        pair.split.finetune(ROWS, adapter="x", peft=peft, **JOB)


def test_a_copy_of_the_bases_head_is_refused_with_the_fix(pair):
    peft = {"peft_type": "LORA", "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    with pytest.raises(UnsupportedError, match=r"has lm_head.weight, .* load a saved adapter"):
        pair.split.finetune(ROWS, adapter="x", peft=peft, **JOB)


def test_a_classifiers_adapter_is_made_beside_the_weights(tmp_path):
    """Its head cannot be left out of a new adapter at a client, who is told what to do."""
    whole = pcg.compile(tiny_llama.save(tmp_path / "base"), labels=("ham", "spam"), device="cpu")
    with running_base(whole) as base, base.connect() as split:
        with pytest.raises(
            UnsupportedError, match=r"has score\.weight, .*; save one of an executor"
        ):
            split.add_adapter("new", "lora")
        whole.add_adapter("new", "lora", seed=1)
        whole.save_adapter("new", tmp_path / "new")
        split.add_adapter("new", tmp_path / "new")
        found, expected = (one.logits([[1, 2, 3]], "new")[0] for one in (split, whole))
        torch.testing.assert_close(found, expected)


def test_generation_has_all_that_it_has(pair):
    for executor in (pair.whole, pair.split):
        executor.add_adapter("mixed", LORA, seed=1)
    sampling = {"max_new_tokens": 4, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
    found = [one.generate(PROMPTS, ["mixed", None], **sampling) for one in (pair.whole, pair.split)]
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        pairs = zip(one.logprobs or (), other.logprobs or (), strict=True)
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)
    chunks = list(pair.split.generate(PROMPTS, "mixed", max_new_tokens=4, stream=True))
    assert {chunk.index for chunk in chunks} == {0, 1}
    states = [one.embed(PROMPTS, "mixed", pooling="mean") for one in (pair.whole, pair.split)]
    assert oracle.relative_error(states[1], states[0]) < TOLERANCE


def test_an_interrupted_job_goes_on_and_adapters_are_saved(pair, tmp_path):
    job = {**JOB, "max_steps": 3, "eval_data": ROWS, "peft": LORA}
    expected = pair.whole.finetune(ROWS, adapter="resumed", **job)
    job["checkpoint_dir"] = tmp_path / "checkpoints"

    def interrupt(record):
        if record.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(FinetuneInterrupted):
        pair.split.finetune(ROWS, adapter="resumed", on_step=interrupt, **job)
    found = pair.split.finetune(ROWS, adapter="resumed", resume=True, **job)
    assert found.resumed_from == 1
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses))
    torch.testing.assert_close(torch.tensor(found.eval_losses), torch.tensor(expected.eval_losses))
    pair.split.save_adapter("resumed", tmp_path / "saved")
    # What a client has saved is an adapter for anyone.
    pair.whole.add_adapter("loaded", tmp_path / "saved")
    logits = [pair.whole.logits(PROMPTS[0], one) for one in ("resumed", "loaded")]
    assert oracle.relative_error(logits[1], logits[0]) < TOLERANCE


def test_an_engine_shares_prefixes_among_a_tenants_requests(pair):
    long = prompts([40])[0]
    expected = pair.whole.generate([long], max_new_tokens=4, temperature=0)[0].token_ids
    limits = pcg.Limits(tpot_slo_s=30.0, running=4)
    engine = pair.split.engine(limits, kv_cache_bytes=2**22, policy=FairShare())
    with engine.start() as running:
        options = {"max_new_tokens": 4, "temperature": 0}
        first = running.submit(long, tenant="one", **options).wait(60)
        streams = [running.submit(long, tenant=one, **options) for one in ("one", "two")]
        job = running.finetune(ROWS, adapter="beside", peft="lora", **JOB)
        added = running.add_adapter("fresh", LORA).result(60)
        done = [first, *(one.wait(60) for one in streams)]
        assert [one.token_ids for one in done] == [expected] * 3
        assert [one.cached_tokens > 0 for one in done] == [False, True, False]
        job.wait()
        assert added.name in {one.name for one in running.adapters()}
        running.remove_adapter("fresh").result(60)
    assert "beside" in pair.split.adapters
