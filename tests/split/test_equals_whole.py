"""Split execution computes what the undivided executor does: tokens, gradients, adapters.

The default run has each way of connecting once, and each kind of method; all families are slow.
AdamW divides a gradient by its own size, so that an entry whose gradient is rounding alone moves by
a whole step in either direction: trained tensors have a wider bound.
"""

import threading
from contextlib import ExitStack
from functools import cache

import pytest

import pcg
from pcg.passes.placement import exact_cut
from pcg.runtime.data.example import Example
from pcg.split.base import base_loop
from pcg.split.base.queues import Choice, Lockstep
from pcg.split.client.connect import connect
from pcg.split.client.noise import Privacy
from tests.support import oracle
from tests.support.families import BY_NAME, FAMILIES
from tests.support.prompts import TOLERANCE, prompts
from tests.support.split_base import (
    EXAMPLES,
    KEY,
    PROMPTS,
    listening_base,
    results,
    running_base,
    running_layers,
    undivided,
)

LORA = pcg.LoraConfig(r=4, target_modules="all-linear")
METHODS = {
    "lora": LORA,
    "dora": pcg.LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "ia3": pcg.IA3Config(),
    "bottleneck": pcg.BottleneckConfig(bottleneck_size=8),
    "prefix": pcg.PrefixTuningConfig(num_virtual_tokens=3),
    "loha": pcg.LoHaConfig(r=2),
    "vera": pcg.VeraConfig(r=4),
    "embedding": pcg.LoraConfig(
        r=4, target_modules=r".*(wte|word_embeddings|embed_tokens|embed_in)"
    ),
}
JOB = {"max_steps": 2, "batch_size": 2, "learning_rate": 1e-3}


def by_layers(stack, family):
    bases = [stack.enter_context(running_layers(family, 2, one)) for one in ("0", "1")]
    return connect([one.endpoint.transport() for one in bases], api_key=KEY)


def by_transport(stack, family, transport):
    where = stack.enter_context(listening_base(undivided(family, 2)))
    return pcg.connect(where, api_key=KEY, transport=transport, connect_s=60)


def hidden(stack, family):
    base, second = (stack.enter_context(running_base(undivided(family, 2))) for _ in range(2))
    return base.connect(privacy=Privacy(second.endpoint.transport(), effects_api_key=KEY))


def by_options(stack, family, **options):
    base = stack.enter_context(running_base(undivided(family, 2), downloads=True))
    return base.connect(**options)


WAYS = {
    "linear": lambda stack, family: by_options(stack, family, cut="linear"),
    "searched": lambda stack, family: by_options(stack, family, link="lan"),
    "noise": lambda stack, family: by_options(
        stack, family, privacy=Privacy("download", pool=8, uses=100)
    ),
    "second base": hidden,
    "layers": by_layers,
    "tcp": lambda stack, family: by_transport(stack, family, "tcp"),
    "shared-memory": lambda stack, family: by_transport(stack, family, "shared-memory"),
}
QUICK = {
    ("llama3", "linear"): ("dora", "prefix"),
    ("gpt2", "linear"): ("lora",),
    ("llama3", "searched"): ("lora", "ia3"),
    ("llama3", "noise"): ("lora",),
    ("llama3.2", "layers"): ("lora",),
    ("llama3", "shared-memory"): ("dora",),
}
EVERY = ("llama3", "gpt2", "llama3.2", "qwen2", "opt", "gemma2", "falcon-7b", "gpt_neox", "qwen3")
CASES = [
    *(pytest.param(*key, methods, id="-".join(key)) for key, methods in QUICK.items()),
    *(
        pytest.param(family, way, tuple(METHODS), id=f"{family}-{way}-all", marks=pytest.mark.slow)
        for family in EVERY
        for way in WAYS
    ),
    *(
        pytest.param(str(one), "layers", ("lora",), id=f"{one}-layers", marks=pytest.mark.slow)
        for one in FAMILIES
        if str(one) not in EVERY
    ),
]


def recipe(family, method):
    if method == "lora":
        return pcg.LoraConfig(r=4, target_modules=list(BY_NAME[family].usual_targets))
    return METHODS[method]


@cache
def expected(family, method):
    return results(undivided(family, 2), recipe(family, method), JOB)


@pytest.mark.parametrize(("family", "way", "methods"), CASES)
def test_tokens_gradients_and_adapters_are_equal(monkeypatch, family, way, methods):
    # The search of StableLM's norms of each head takes minutes to find that they are too many.
    monkeypatch.setattr(exact_cut, "MOST_STATES", 10_000)
    with ExitStack() as stack:
        split = stack.enter_context(WAYS[way](stack, family))
        for method in methods:
            tokens, wanted = expected(family, method)
            found, own = results(split, recipe(family, method), JOB)
            assert found == tokens, method
            assert own.keys() == wanted.keys()
            assert len(wanted) > 2
            for name, tensor in wanted.items():
                bound = 10 * TOLERANCE if name.startswith("trained") else TOLERANCE
                error = oracle.relative_error(own[name], tensor)
                assert error < bound, (method, name, error)


@pytest.mark.parametrize("behind_noise", ["", pytest.param("ia3", marks=pytest.mark.slow)])
def test_clients_at_once_train_as_if_each_were_alone(behind_noise, monkeypatch):
    """Requests that come together run as one; those behind noise have a dtype of their own.

    The clients begin at the same piece and are waited for, so they meet however slow the machine.
    """
    whole, methods = undivided("llama3", 2), ["lora", "ia3", "dora"]
    rows = [Example(one, one) for one in prompts([9, 5, 7])]
    job = {"max_steps": 3, "batch_size": 2, "learning_rate": 1e-2}
    wanted, trained = {}, {}
    for name in methods:
        whole.add_adapter(name, METHODS[name], seed=3)
        whole.finetune(rows, adapter=name, **job)
        wanted[name] = whole.adapters[name].tensors
        whole.remove_adapter(name)
    choose, training, met = Lockstep.choose, threading.Event(), threading.Event()

    def choose_once_all_train(policy, queues, active, now_s):
        if training.is_set() and len(queues.clients) == len(methods):
            met.set()
        if training.is_set() and not met.is_set():
            return Choice(wait_s=0.01)
        return choose(policy, queues, active, now_s)

    monkeypatch.setattr(base_loop, "_ACTIVE_S", 120.0)
    monkeypatch.setattr(Lockstep, "choose", choose_once_all_train)
    with running_base(whole, policy="lockstep") as base:
        barrier = threading.Barrier(len(methods), action=training.set)

        def train(name):
            privacy = Privacy("base", pool=8, uses=50) if name == behind_noise else None
            with base.connect(cut="linear", privacy=privacy) as split:
                split.add_adapter(name, METHODS[name], seed=3)
                barrier.wait(60)
                split.finetune(rows, adapter=name, **job)
                trained[name] = split.adapters[name].tensors

        threads = [threading.Thread(target=train, args=(name,)) for name in methods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        counts = base.loop.counts
    assert counts.batches < counts.requests or behind_noise
    for name, tensors in wanted.items():
        for one, other in zip(tensors, trained[name], strict=True):
            assert oracle.relative_error(other, one) < 10 * TOLERANCE


def test_an_engine_of_a_client_serves_and_trains_in_the_same_steps():
    whole = undivided("llama3", 2)
    options = {"max_steps": 2, "batch_size": 2, "learning_rate": 1e-2, "seed": 3}
    tokens = whole.generate(PROMPTS, max_new_tokens=8, temperature=0)
    whole.finetune(EXAMPLES, adapter="y", peft=LORA, **options)
    trained = whole.adapters["y"].tensors
    whole.remove_adapter("y")
    with (
        running_base(whole) as base,
        base.connect(peft={"x": LORA}) as split,
        split.engine(kv_cache_bytes=2**24).start() as engine,
    ):
        job = engine.finetune(EXAMPLES, adapter="y", peft=LORA, **options)
        found = split.generate(PROMPTS, max_new_tokens=8, temperature=0)
        job.wait()
        assert [one.token_ids for one in found] == [one.token_ids for one in tokens]
        for one, other in zip(split.adapters["y"].tensors, trained, strict=True):
            assert oracle.relative_error(one, other) < TOLERANCE
