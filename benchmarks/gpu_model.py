"""Steps of a model with the shape of Llama-3.1-8B and random bf16 weights, by pcg's calls.

    decode      steps of an engine that serves, replayed from a graph, and launched by the host
    prefill     prompts, each whole in one step
    finetune    steps of a job of an engine, whose windows are replayed
    cold        adapters that are copied from the host's memory before a request's first token
    serve       requests of 32 adapters as `pcg bench serve` measures them, alone and beside a job
    greedy      tokens of a model with the shape of Llama-3.2-1B against transformers'

Predictions are those of results/roofline.json. Peers are transformers and peft, which share the
weights with pcg's executor. Times are taken by the host's clock over many steps, with the device
idle before the first and after the last. Peaks are the memory that torch allocates beside weights
and the KV cache.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from random import Random
from time import perf_counter
from typing import Any
from unittest.mock import patch

import harness
from gpu_bench import Bench, Case, LlamaShape, Row, Setting, Work

CONFIG = harness.ROOT / "pcg/configs/meta-llama--Llama-3.1-8B.json"
RANK = 16
RECIPE: dict[str, Any] = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
NAMES = [f"adapter-{index}" for index in range(32)]  # as workloads have them
PEER_ADAPTERS = 4
"""Adapters of peft's batch. Its time grows with their number; to add one takes a second."""
KV_CACHE_BYTES = 20 * 2**30
"""Size of a pool: 128 sequences of 640 tokens take 10 GiB, 32 adapters in bf16 two and a half."""
VOCABULARY = 100_000
"""Token ids of prompts are below it."""
BATCH = 32
"""Sequences of a decode step, as they were counted."""
CONTEXT = 528
"""Tokens of a prompt in decode, so that about 560 keys are seen, as in the count."""
STEPS, EAGER_STEPS = 48, 8
"""Decode steps that are timed, replayed and launched by the host."""
PROMPTS = (8, 1024)
"""Prompts of a step, and tokens of each, as they were counted."""
FINETUNED = (4, 1024)
"""Sequences of a finetuning step, and tokens of each."""
SKEW = 128
"""Limit of the tokens that the first sequence generates before the last one begins."""
WARM_STEPS, TRAINED_STEPS = 5, 5
"""Steps of a job before the timed ones, in which its windows are recorded, and timed steps."""
TPOT_SLO_S = 0.05


@cache
def config() -> dict[str, Any]:
    """The config.json that pcg ships."""
    found: dict[str, Any] = json.loads(CONFIG.read_text())
    return found


@dataclass
class Model:
    """A model of transformers with random weights, and pcg's executor of the same weights.

    Attributes:
        adapters: names and ranks of the executor's adapters, whose B is not zero. Those of a rank
            have the same numbers, in host memory once; on the device each has its own copies.
    """

    bench: Bench
    config: Mapping[str, Any]
    adapters: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def theirs(self) -> Any:
        """The model of transformers."""
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        with torch.device(self.bench.eager_device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about options of generation
            made = AutoModelForCausalLM.from_config(
                LlamaConfig(**self.config), dtype=torch.bfloat16
            )
        return made.eval()

    @cached_property
    def executor(self) -> Any:
        """The executor, by the Triton backend."""
        from pcg.compiler import compile_program, make_executor
        from pcg.runtime.model.weights import StateDictCheckpoint

        program = compile_program(self.config, "lora", dtype="bfloat16", backend="triton")
        weights = StateDictCheckpoint(
            self.theirs.state_dict(keep_vars=True), program.base_prefix, self.config
        )
        executor = make_executor(program, weights, "lora", None, self.bench.device)
        first: dict[int, Any] = {}
        for name, rank in self.adapters.items():
            if rank in first:
                executor.state.put_adapter(replace(first[rank], name=name))
                continue
            first[rank] = executor.add_adapter(name, {"peft_type": "LORA", **RECIPE, "r": rank})
            for weights in first[rank].weights.values():
                weights.b.normal_(0, 0.02)
        return executor

    @property
    def shape(self) -> LlamaShape:
        return LlamaShape.of(self.config)

    def engine(self, sharing: Any = None, **limits: Any) -> Any:
        """Make an engine, which only serves unless it gets a rule of sharing.

        Prompts are cut by the limit of tokens or an SLO, and by nothing else.
        """
        from pcg.runtime.admission.limits import Limits
        from pcg.simulate.flexllm import InferenceOnly

        _emptied()  # of the pool and the graphs of the engine before
        return self.executor.engine(
            Limits(prompt_stretch=math.inf, **limits),
            kv_cache_bytes=KV_CACHE_BYTES,
            sharing=sharing or InferenceOnly(),
            prefix_caching=False,
        )

    def submit(
        self, engine: Any, prompts: Sequence[Sequence[int]], names: Sequence[str], new_tokens: int
    ) -> None:
        """Submit prompts with these adapters in turn."""
        for i, prompt in enumerate(prompts):
            adapter = names[i % len(names)] if names else None
            request = self.executor.request(
                prompt, adapter, max_new_tokens=new_tokens, ignore_eos=True
            )
            engine.submit(request)

    def adapter_work(self, names: Sequence[str], tokens: int = 1) -> Work:
        """Count the bytes of the adapters as they are served, and FLOPs for `tokens` of each."""
        ranks = sum(self.executor.adapters[name].recipe.rank for name in names)
        size = self.executor.serving.tables.lora.element_bytes
        elements = self.shape.adapter_elements(ranks)
        return Work(size * elements, 2 * tokens * elements)

    # -------------------------------------------------------------------------------- decode

    def decoding(self, batch: int, names: Sequence[str], new_tokens: int) -> Any:
        """Make an engine in which `batch` sequences decode, each for `new_tokens` at least."""
        engine = self.engine(tokens=8192)
        # The first sequences decode while the last prompts are read.
        self.submit(engine, prompts_of(batch, CONTEXT), names, SKEW + new_tokens)
        begun: set[int] = set()
        while len(begun) < batch:
            begun |= {chunk.index for chunk in _stepped(engine)}
        return engine

    def decode(self, batch: int, names: Sequence[str]) -> Row:
        """Measure a decode step, replayed and launched by the host."""
        from pcg.runtime.model import step_graphs

        warm = step_graphs.EAGER_STEPS + 2  # kernels are compiled, the graph is recorded
        engine = self.decoding(batch, names, warm + STEPS + EAGER_STEPS)
        graphs = engine.device.graphs
        _run(engine, warm)
        replayed = graphs.replayed
        ours_us = _decoded_us(engine, batch, STEPS)
        replayed = graphs.replayed - replayed
        if not replayed:
            raise AssertionError(f"none of {STEPS} steps was replayed: {dict(graphs.eager)}")
        graphs.recorder = None
        _run(engine, 1)
        eager_us = _decoded_us(engine, batch, EAGER_STEPS)
        seen = CONTEXT + warm + STEPS // 2
        needed = self.shape.decode_work(batch, seen) + self.adapter_work(names)
        note = f"{replayed} of {STEPS} steps replayed"
        row = self.bench.timed_row(ours_us, needed, peers_us={"our eager": eager_us}, note=note)
        if not names:
            row = replace(row, expected_us=self.bench.expected_us("decode, base"))
        elif len(names) == len(NAMES):
            row = replace(row, expected_us=self.bench.expected_us("decode, adapters"))
        assert row.floor_us is not None
        return row.at_most("at most 1.25 of the floor", ours_us / row.floor_us, 1.25)

    def peer_decode(self, names: Sequence[str]) -> float:
        """Return the microseconds of a decode step of transformers, or of peft with adapters."""
        import torch

        batch = BATCH
        model = self.theirs if not names else _with_adapters(self.theirs, names)
        among = {"adapter_names": [names[i % len(names)] for i in range(batch)]} if names else {}
        ids = torch.tensor(prompts_of(batch, CONTEXT), device=self.bench.eager_device)

        def step(ids: Any, cache: Any = None) -> tuple[Any, Any]:
            out = model(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **among
            )
            return out.logits[:, -1:].argmax(-1), out.past_key_values

        def steps(ids: Any, cache: Any, count: int) -> tuple[Any, Any]:
            for _ in range(count):
                ids, cache = step(ids, cache)
            return ids, cache

        with torch.inference_mode():
            state = steps(*step(ids), 2)
            _, seconds = timed(lambda: steps(*state, EAGER_STEPS))
        if names:
            model.unload()
        return 1e6 * seconds / EAGER_STEPS

    # -------------------------------------------------------------------------------- prefill

    def prefill(self, prompts: tuple[int, int], names: Sequence[str]) -> Row:
        """Measure a step of whole prompts, once kernels are compiled and adapters are copied."""
        batch, tokens = prompts
        engine = self.engine(tokens=batch * tokens)

        def served(count: int) -> None:
            self.submit(engine, prompts_of(batch, tokens), names, count)
            given = 0
            while not engine.is_idle:
                given += len(_stepped(engine))
            if given != batch * count:
                raise AssertionError(f"{batch} prompts gave {given} tokens")

        served(1)
        ours_us = 1e6 * statistics.median(timed(lambda: served(1))[1] for _ in range(3))
        needed = self.shape.prefill_work(batch, tokens) + self.adapter_work(names, tokens)
        row = self.bench.timed_row(ours_us, needed)
        if not names:
            return replace(row, expected_us=self.bench.expected_us("prefill, base"))
        row = replace(row, expected_us=self.bench.expected_us("prefill, adapters"))
        alone = self.bench.known.get(("8B", _prefill_setting(prompts, ())))
        alone_us = alone and alone.ours_us
        ratio = None if alone_us is None else ours_us / alone_us
        return row.at_most("at most 1.15 of no adapters", ratio, 1.15)

    def peer_prefill(self) -> float:
        """Return the microseconds of a forward of whole prompts by transformers."""
        import torch

        ids = torch.tensor(prompts_of(*PROMPTS), device=self.bench.eager_device)

        def run() -> None:
            self.theirs(input_ids=ids, use_cache=True, logits_to_keep=1)

        with torch.inference_mode():
            run()
            return 1e6 * statistics.median(timed(run)[1] for _ in range(3))

    # ------------------------------------------------------------------------------- finetune

    @staticmethod
    def finetuned(engine: Any, name: str) -> Any:
        """Begin a job that does not end by itself."""
        from pcg.runtime.data.example import Example

        batch, tokens = FINETUNED
        return engine.finetune(
            [Example(row, row) for row in prompts_of(4 * batch, tokens)],
            name,
            peft={"peft_type": "LORA", **RECIPE},
            max_steps=10**6,
            batch_size=batch,
        )

    def finetune(self) -> Row:
        """Measure a step of a job whose windows are replayed."""
        import torch

        from pcg.runtime.engine.scheduling.co_serving import CoServing

        with job_graphs() as graphs:
            engine = self.engine(CoServing())
            torch.cuda.reset_peak_memory_stats()
            left = torch.cuda.memory_allocated()
            job = self.finetuned(engine, "trained")

            def to_step(step: int) -> None:
                while job.error is None and (job.record is None or job.record.step < step):
                    engine.step()
                if job.error is not None:
                    raise job.error

            to_step(WARM_STEPS)
            before = graphs.copy()
            _, seconds = timed(lambda: to_step(WARM_STEPS + TRAINED_STEPS))
            done = graphs - before
            if not done["replayed"]:
                raise AssertionError("the steps that were timed replayed nothing")
        peak = torch.cuda.max_memory_allocated() - left
        engine.cancel_job(job.name)
        needed = self.shape.finetune_work(*FINETUNED, RANK)
        row = self.bench.timed_row(1e6 * seconds / TRAINED_STEPS, needed, ours_bytes=peak)
        return replace(
            row,
            expected_us=self.bench.expected_us("finetuning"),
            note=f"{done['replayed']} replays and {done['recorded']} recordings in "
            f"{TRAINED_STEPS} steps",
        )

    def peer_finetune(self, checkpoints: bool) -> tuple[float, int]:
        """Return the microseconds and peak bytes of a step of transformers and peft."""
        import torch
        from peft import LoraConfig, get_peft_model

        vars(self).pop("executor", None)
        _emptied()
        torch.cuda.reset_peak_memory_stats()
        left = torch.cuda.memory_allocated()
        model = get_peft_model(self.theirs, LoraConfig(**RECIPE)).train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers 6 will have another name for it
            if checkpoints:
                model.enable_input_require_grads()
                self.theirs.gradient_checkpointing_enable({"use_reentrant": False})
        ids = torch.tensor(prompts_of(*FINETUNED), device=self.bench.eager_device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)

        def run() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        run()
        seconds = statistics.median(timed(run)[1] for _ in range(3))
        peak = torch.cuda.max_memory_allocated() - left
        model.unload()
        return 1e6 * seconds, peak

    def cold(self, names: Sequence[str]) -> Row:
        """Measure the time that copying its adapter adds to a request."""
        prompts = prompts_of(len(names), 16)

        def served(engine: Any) -> None:
            self.submit(engine, prompts, names, 1)
            while not engine.is_idle:
                _stepped(engine)

        served(self.engine(tokens=8192))  # compiles
        engine = self.engine(tokens=8192)
        cold, *warm = (timed(lambda: served(engine))[1] for _ in range(3))
        ours_us = 1e6 * (cold - min(warm)) / len(names)
        size = self.adapter_work(names[:1]).bytes
        expected_us = 1e6 * size / self.bench.ceilings.host_bytes_per_s
        row = Row(ours_us=ours_us, expected_us=expected_us, bytes=size)
        return row.at_most("at least 300 a second", ours_us, 1e6 / 300)


# ----------------------------------------------------------------------------------------- steps


def prompts_of(count: int, tokens: int) -> list[list[int]]:
    """Prompts of random tokens, the same at each call."""
    drawn = Random(0)
    return [[drawn.randrange(5, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def _emptied() -> None:
    """Free the memory of what is no longer referenced."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the seconds until the device is idle after it."""
    import torch

    torch.cuda.synchronize()
    started = perf_counter()
    found = run()
    torch.cuda.synchronize()
    return found, perf_counter() - started


@contextmanager
def job_graphs() -> Iterator[Counter[str]]:
    """Count the recordings and replays of graphs of jobs that begin within."""
    from pcg.runtime.training import bound_training

    counts: Counter[str] = Counter()
    recorder_for = bound_training.recorder_for

    class Counting:
        def __init__(self, recorder: Any) -> None:
            self._recorder = recorder

        def __getattr__(self, name: str) -> Any:
            return getattr(self._recorder, name)

        def record(self, *of: Any, **how: Any) -> Callable[[], None]:
            replay = self._recorder.record(*of, **how)
            counts["recorded"] += 1

            def again() -> None:
                counts["replayed"] += 1
                replay()

            return again

    def counting(device: Any) -> Any:
        recorder = recorder_for(device)
        return None if recorder is None else Counting(recorder)

    with patch.object(bound_training, "recorder_for", counting):
        yield counts


def _stepped(engine: Any) -> list[Any]:
    """The chunks of a step."""
    chunks: list[Any] = engine.step()
    for chunk in chunks:
        if chunk.error is not None:
            raise chunk.error
    return chunks


def _run(engine: Any, steps: int) -> int:
    """Run steps and return their number of tokens; on a GPU they come one step late."""
    return sum(len(_stepped(engine)) for _ in range(steps))


def _decoded_us(engine: Any, batch: int, steps: int) -> float:
    """Return the microseconds of a decode step; the host waits for the last one alone."""
    tokens, seconds = timed(lambda: _run(engine, steps))
    if tokens != steps * batch:
        raise AssertionError(f"{steps} steps gave {tokens} tokens to {batch} sequences")
    return 1e6 * seconds / steps


def _with_adapters(model: Any, names: Sequence[str]) -> Any:
    """Wrap a model by peft, with these adapters."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(**RECIPE), adapter_name=names[0])
    for name in names[1:]:
        made.add_adapter(name, LoraConfig(**RECIPE))
    return made.eval()


# -------------------------------------------------------------------------------------- settings


def _decode_setting(batch: int, names: Sequence[str]) -> str:
    return f"decode, batch {batch}, {len(names)} adapters"


def _prefill_setting(prompts: tuple[int, int], names: Sequence[str]) -> str:
    return f"prefill, {prompts[0]} of {prompts[1]} tokens, {len(names)} adapters"


def model_settings(bench: Bench) -> Iterator[Setting]:
    """Our steps, then those of peers; our executor is freed before peft trains."""
    model = Model(bench, config(), dict.fromkeys(NAMES, RANK))
    batch, prompts = BATCH, PROMPTS
    decodes = [_decode_setting(batch, names) for names in ((), NAMES)]
    yield decodes[0], lambda: model.decode(batch, ())
    yield decodes[1], lambda: model.decode(batch, NAMES)
    prefills = [_prefill_setting(prompts, names) for names in ((), NAMES[: prompts[0]])]
    yield prefills[0], lambda: model.prefill(prompts, ())
    yield prefills[1], lambda: model.prefill(prompts, NAMES[: prompts[0]])
    yield "finetune", model.finetune
    yield "cold adapters", lambda: model.cold(NAMES)

    def against(setting: str, name: str, us: float, size_bytes: int = 0) -> Row:
        ours = bench.known.get(("8B", setting), Row())
        if ours.failed:
            ours = Row()
        row = replace(ours, peers_us={name: us}, peers_bytes={name: size_bytes}, note="")
        ratio = None if ours.ours_us is None else ours.ours_us / us
        return row.at_most("below its time", ratio, 1.0)

    few = NAMES[:PEER_ADAPTERS]
    peft = f"peft, {len(few)} adapters"
    yield (
        f"{decodes[0]}, transformers",
        lambda: against(decodes[0], "transformers", model.peer_decode(())),
    )
    yield f"{decodes[1]}, peft", lambda: against(decodes[1], peft, model.peer_decode(few))
    yield (
        f"{prefills[0]}, transformers",
        lambda: against(prefills[0], "transformers", model.peer_prefill()),
    )
    for checkpoints in (False, True):
        name = "peft, checkpointing" if checkpoints else "peft"

        def trained(checkpoints: bool = checkpoints, name: str = name) -> Row:
            return against("finetune", name, *model.peer_finetune(checkpoints))

        yield f"finetune, {name}", trained
    yield "greedy tokens of 1B in bf16", lambda: check_greedy(bench)


# ----------------------------------------------------------------------------------------- serve

REQUESTS_A_S = 8.0
SERVED_S = 10.0
PROMPT_TOKENS = (64, 512)
NEW_TOKENS = (32, 128)
SERVING = {"running": 64, "tokens": 2048}
"""Limits of the engine that serves, whose steps are recorded before."""


def serve_settings(bench: Bench) -> Iterator[Setting]:
    """What `pcg bench serve` measures: requests of 32 adapters, alone and beside a job."""
    model = Model(bench, config(), dict.fromkeys(NAMES, RANK))
    engines: list[Any] = []

    def serve(trains: bool) -> Row:
        from pcg.runtime.engine.scheduling.co_serving import CoServing

        if not engines:  # one warm-up for both
            engines.append(_warm_engine(model, CoServing()))
        (engine,) = engines
        if trains:
            model.finetuned(engine, "served")
        return _served(model, engine)

    for trains in (False, True):
        yield "beside finetuning" if trains else "alone", lambda trains=trains: serve(trains)


def _warm_engine(model: Model, sharing: Any) -> Any:
    from pcg.runtime.admission.limits import Limits

    return model.executor.engine(
        Limits(**SERVING, tpot_slo_s=TPOT_SLO_S, ttft_slo_s=5.0),
        kv_cache_bytes=KV_CACHE_BYTES,
        sharing=sharing,
        warm_up=True,
    )


def _served(model: Model, engine: Any) -> Row:
    from pcg.simulate.distributions import Between, Poisson, PowerLaw
    from pcg.simulate.replay import replay
    from pcg.simulate.synthetic import assign_adapters, synthetic

    count = int(REQUESTS_A_S * SERVED_S)
    lengths = Between(*PROMPT_TOKENS), Between(*NEW_TOKENS)
    workload = synthetic(Poisson(REQUESTS_A_S), *lengths, seed=0, requests=count)
    workload = assign_adapters(workload, PowerLaw(len(NAMES), 1.0), seed=0)
    report = replay(engine, workload, model.executor.adapters, model.config["vocab_size"])
    for job in list(engine.jobs):
        engine.cancel_job(job.name)
    found = report.to_json()
    tpot_ms = found["median_tpot_ms"]
    asked = REQUESTS_A_S * sum(NEW_TOKENS) / 2
    note = (
        f"{found['output_throughput']:,.0f} tokens/s of {asked:,.0f} that are asked for, "
        f"median TTFT {found['median_ttft_ms'] or 0:.0f} ms, "
        f"SLOs attained {found['slo_attainment'] or 0:.1%}, "
        f"finetuning {found['finetuning_throughput']:,.0f} tokens/s"
    )
    row = Row(
        ours_us=None if tpot_ms is None else 1e3 * tpot_ms,
        expected_us=model.bench.expected_us("decode, adapters"),
        note=note,
        details=found,
    )
    return row.at_most("SLOs missed by 1 %", 1 - (found["slo_attainment"] or 0), 0.01)


# ----------------------------------------------------------------------------------------- greedy

GREEDY = (8, 128, 64)
"""Prompts, tokens of each, and generated tokens."""


def small_config() -> dict[str, Any]:
    """The config.json of the model whose tokens are compared."""
    path = CONFIG.with_name("meta-llama--Llama-3.2-1B.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def check_greedy(bench: Bench) -> Row:
    """Compare greedy tokens of a model with the shape of Llama-3.2-1B with transformers'.

    Where two tokens are nearly equally likely, rounding decides. So each token is scored by the
    same model in fp32 behind the tokens before it: by how much its logit is below the largest.

    Raises:
        AssertionError: a token of ours has more than twice the worst score of transformers'.
    """
    import torch

    model = Model(bench, small_config())
    count, tokens, new = GREEDY
    prompts = prompts_of(count, tokens)
    ids = torch.tensor(prompts, device=bench.eager_device)
    found = model.theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    theirs = found[:, tokens:].tolist()
    completions = model.executor.generate(prompts, max_new_tokens=new, ignore_eos=True)
    ours = [list(one.token_ids) for one in completions]
    exact = model.theirs.float()
    worst = [_regret(exact, ids, chosen) for chosen in (ours, theirs)]
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    firsts = sum(
        a == b
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    allowed = max(2 * worst[1], 2**-4)
    note = f"{same} of {count} sequences and {firsts} of {count * new} tokens are transformers'"
    if not worst[0] <= allowed:
        raise AssertionError(
            f"a token of ours is {worst[0]:.3f} below the likeliest by fp32, of transformers' "
            f"{worst[1]:.3f}; {note}"
        )
    row = Row(note=note, details={"ours": worst[0], "transformers": worst[1]})
    return row.at_most("logits below the likeliest by fp32", worst[0], allowed)


def _regret(exact: Any, ids: Any, chosen: Sequence[Sequence[int]]) -> float:
    """Return the most by which the logit of a chosen token is below the largest."""
    import torch

    new = torch.tensor(chosen, device=ids.device)
    with torch.no_grad():
        out = exact(torch.cat([ids, new], 1), use_cache=False, logits_to_keep=new.shape[1] + 1)
    logits = out.logits[:, :-1]
    below = logits.max(-1).values - logits.gather(-1, new[..., None])[..., 0]
    return float(below.max())


MODEL_CASE = Case("8B", 200, model_settings)
SERVE_CASE = Case("serve", 90, serve_settings)
