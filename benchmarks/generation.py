"""Generation with many adapters, against peft's mixed batch, transformers and the base alone.

All on one thread in fp32, greedy, on a random 8-layer Llama of hidden size 512 (159 MiB). The unit
is tokens a second. Contenders of `generation-64` and `generation-256`, which run on the shipped
checkpoint, too: 16 prompts of 17 to 64 tokens, 8 adapters of rank 16 on all linears, two prompts
each:

    ours, base      executor.generate without adapters
    ours, mixed     each prompt with its adapter
    transformers    model.generate of the base, left-padded
    peft, mixed     PeftModel.generate(adapter_names=…)

`serving`, LoRA on q, k, v and o as S-LoRA's, of ranks 8, 16, 32 and 64 in turn, all in memory:

    2000 adapters, 5      requests at once over so many adapters (Zipf, α = 1), 32 of them running
    mixed, base, peft     64 prompts of 16 to 64 tokens on 64 of the adapters, on none, and by peft
    …, r16                the same with 64 adapters of rank 16

`decode` measures the processor time of the thread in the steps after every prompt's first token:

    base                  the 64 prompts without adapters; with 16, the first 16
    r8-64, r16            on the 64 adapters of each kind, 240 and 128 MiB
    r16 all-linear        16 prompts on 8 adapters of rank 16 on all linears
    …, bfloat16           the same with `adapter_copies="bfloat16"`
    …, pytorch            the same by PyTorch's products, without the native kernel
    transformers          `generate` of the base: the time of all tokens less that of the first

`experts` measures the same of a random Qwen3-MoE (4 layers of 32 experts, 4 a token; 346 MiB) and
of hybrids of hidden size 512, Qwen3-Next's delta rules and LFM2's convolutions:

    ours, int8            the 16 prompts by fp32 experts, and by a base in int8
    ours, r8              on 8 adapters of rank 8 on all parameters of experts
    transformers          `generate` of the base, its experts by `grouped_mm` and by `eager`
    peft                  an adapter on experts by peft, a prompt at a time
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import harness as bench
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import pcg
from pcg.kernels import sgmv
from pcg.runtime.admission.limits import Limits
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.distributions import Between, Constant, Fixed, PowerLaw
from pcg.simulate.replay import replay
from pcg.simulate.synthetic import assign_adapters, synthetic

LENGTHS = (24, 40, 32, 56, 17, 33, 48, 21, 64, 30, 29, 45, 52, 38, 26, 60)
NAMES = [f"adapter{i}" for i in range(8)]
RANKS, MIXED, NEW, PROMPTS = (8, 16, 32, 64), 64, 32, Between(16, 64)
FEW, FEW_ADAPTERS = 16, 8
KV_CACHE_BYTES = 2 * 2**30
Calls = dict[str, Callable[[], float]]


def left_padded(prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
    """Return arguments of transformers' `generate`, which pads prompts on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "do_sample": False,
        "pad_token_id": 0,
    } | lengths


def with_peft(base: Any, recipes: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the base wrapped by peft, with adapters by name."""
    (first, recipe), *others = recipes.items()
    model = get_peft_model(base, LoraConfig(**recipe), adapter_name=first)
    for name, fields in others:
        model.add_adapter(name, LoraConfig(**fields))
    return model.eval()


def copy_of(model: Any) -> Any:
    base = AutoModelForCausalLM.from_config(model.config).eval()
    base.load_state_dict(model.state_dict())
    return base


# ------------------------------------------------------------------------------------- generation


def contenders(model: Any, new_tokens: int, recipe: dict[str, Any]) -> Calls:
    """Return calls by name that generate for all prompts once and return tokens a second."""
    prompts = [torch.randint(5, model.config.vocab_size - 5, (n,)).tolist() for n in LENGTHS]
    adapters = [NAMES[i % len(NAMES)] for i in range(len(prompts))]
    executor = pcg.compile(model.eval())
    for name in NAMES:
        for weights in executor.add_adapter(name, {**bench.LORA, **recipe}).weights.values():
            weights.b.normal_(0, 0.02)
    options = left_padded(prompts, new_tokens)

    def rate(run: Callable[[], object]) -> float:
        with torch.inference_mode():
            return len(prompts) * new_tokens / bench.seconds(run)

    def ours(names: list[str] | None) -> float:
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True}
        return rate(lambda: executor.generate(prompts, names, **sampling))

    base, wrapped = copy_of(model), with_peft(model, dict.fromkeys(NAMES, recipe))
    return {
        "ours, base": lambda: ours(None),
        "ours, mixed": lambda: ours(adapters),
        "transformers": lambda: rate(lambda: base.generate(**options)),
        "peft, mixed": lambda: rate(lambda: wrapped.generate(**options, adapter_names=adapters)),
    }


def generation(new_tokens: int, rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {"new_tokens": new_tokens, "prompts": len(LENGTHS)}
    shipped = AutoModelForCausalLM.from_pretrained(bench.CHECKPOINT, dtype=torch.float32)
    of_shipped = {**bench.RECIPE, "r": 8, "lora_alpha": 16}  # as those of examples/adapters
    for name, model, recipe in (
        ("shipped", shipped, of_shipped),
        ("random 8x512", bench.random_llama(), bench.RECIPE),
    ):
        values = bench.interleave(contenders(model, new_tokens, recipe), rounds)
        result[name] = {
            "tokens_per_s": bench.medians(values),
            "mixed / peft mixed (at least 3)": bench.ratio(values, "ours, mixed", "peft, mixed"),
            "mixed / transformers base (at least 1.5)": bench.ratio(
                values, "ours, mixed", "transformers"
            ),
            "mixed / our base (at least 0.9)": bench.ratio(values, "ours, mixed", "ours, base"),
            "our base / transformers base": bench.ratio(values, "ours, base", "transformers"),
        }
    return result


@bench.case("generation-64", rounds=1)
def generation_64(rounds: int = 5) -> dict[str, Any]:
    return generation(64, rounds)


@bench.case("generation-256", rounds=1)
def generation_256(rounds: int = 5) -> dict[str, Any]:
    return generation(256, rounds)


# ---------------------------------------------------------------------------------------- serving


def recipe_of(index: int, ranks: Sequence[int] = RANKS) -> dict[str, Any]:
    rank = ranks[index % len(ranks)]
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets}


def recipes_of(prefix: str, count: int, ranks: Sequence[int] = RANKS) -> dict[str, dict[str, Any]]:
    return {f"{prefix}-{index}": recipe_of(index, ranks) for index in range(count)}


def mixed_prompts() -> list[list[int]]:
    drawn = random.Random(0)
    lengths = [PROMPTS.draw(drawn) for _ in range(MIXED)]
    return [[drawn.randrange(5, 31000) for _ in range(length)] for length in lengths]


def with_adapters(executor: Any, recipes: Mapping[str, Any]) -> Any:
    for seed, (name, fields) in enumerate(recipes.items()):
        executor.add_adapter(name, {"peft_type": "LORA", **fields}, seed=seed)
    return executor


def over_adapters(executor: Any, adapters: int, requests: int) -> float:
    """Return output tokens a second of requests that come at once, over so many adapters."""
    workload = synthetic(Constant(1e6), PROMPTS, Fixed(NEW), seed=0, requests=requests)
    workload = assign_adapters(workload, PowerLaw(adapters, 1.0), seed=0)
    engine = executor.engine(Limits(running=32), kv_cache_bytes=KV_CACHE_BYTES)
    state = engine.state
    vocabulary = int(state.program.config["vocab_size"])
    return replay(engine, workload, state.adapters, vocabulary).output_throughput


def mixed_contenders(model: Any, executor: Any) -> Calls:
    """Return calls by name that generate for all prompts once."""
    prompts = mixed_prompts()
    options = left_padded(prompts, NEW)

    def rate(run: Callable[[], object]) -> float:
        return MIXED * NEW / bench.seconds(run)

    def ours(names: Sequence[str] | None) -> float:
        sampling = {"max_new_tokens": NEW, "ignore_eos": True}
        return rate(lambda: executor.generate(prompts, names, **sampling))

    def by_peft(recipes: Mapping[str, Any]) -> Callable[[], float]:
        wrapped = with_peft(AutoModelForCausalLM.from_config(model.config).eval(), recipes)

        def generate() -> object:
            with torch.inference_mode():
                return wrapped.generate(**options, adapter_names=list(recipes))

        return lambda: rate(generate)

    mixed, r16 = recipes_of("adapter", MIXED), recipes_of("r16", MIXED, (16,))
    return {
        "base": lambda: ours(None),
        "mixed": lambda: ours(list(mixed)),
        "peft": by_peft(mixed),
        "mixed, r16": lambda: ours(list(r16)),
        "peft, r16": by_peft(r16),
    }


@bench.case("serving", rounds=1, adapters=64, requests=4)
def serving(rounds: int = 3, adapters: int = 2000, requests: int = 64) -> dict[str, Any]:
    model, many = bench.random_llama(), f"{adapters} adapters"
    recipes = recipes_of("adapter", adapters) | recipes_of("r16", MIXED, (16,))
    executor = with_adapters(pcg.compile(model), recipes)
    over = {n: partial(over_adapters, executor, n, requests) for n in (adapters, 5)}
    found = bench.interleave({f"{n} adapters": act for n, act in over.items()}, rounds)
    mixed = bench.interleave(mixed_contenders(model, executor), rounds)
    return {
        "throughput": {
            "output_tokens_per_s": bench.medians(found),
            f"{many} / 5 (at least 0.95)": bench.ratio(found, many, "5 adapters"),
        },
        "mixed": {
            "output_tokens_per_s": bench.medians(mixed),
            "mixed / base (at least 0.9)": bench.ratio(mixed, "mixed", "base"),
            "mixed / peft mixed (at least 5)": bench.ratio(mixed, "mixed", "peft"),
            "mixed / base, r16 (at least 0.9)": bench.ratio(mixed, "mixed, r16", "base"),
            "mixed / peft mixed, r16 (at least 5)": bench.ratio(mixed, "mixed, r16", "peft, r16"),
        },
    }


# ----------------------------------------------------------------------------------------- decode


class Decoding:
    """One engine over an executor, which decodes the same prompts again and again."""

    def __init__(self, model: Any, recipes: Mapping[str, Any], **options: Any) -> None:
        self.executor = with_adapters(pcg.compile(model, **options), recipes)
        limits = Limits(running=MIXED)
        self.engine = self.executor.engine(
            limits, kv_cache_bytes=KV_CACHE_BYTES, prefix_caching=False
        )

    def rate(self, prompts: Any, names: Sequence[str | None], new: int) -> float:
        """Return tokens a second of processor time, after every prompt's first token."""
        engine, adapters = self.engine, self.executor.adapters
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        for prompt, name in zip(prompts, names, strict=True):
            engine.submit(Request(tuple(prompt), params, None if name is None else adapters[name]))
        begun: set[int] = set()
        while len(begun) < len(prompts):
            begun.update(chunk.index for chunk in engine.step())
        started, tokens = time.thread_time(), 0
        while not engine.is_idle:
            tokens += len(engine.step())
        return tokens / (time.thread_time() - started)

    def rate_of_pytorch(self, *arguments: Any) -> float:
        """Return the same without the native kernel, which no call before has used."""
        kernel, sgmv._kernel = sgmv._kernel, lambda: None
        try:
            return self.rate(*arguments)
        finally:
            sgmv._kernel = kernel


def rate_of_transformers(model: Any, prompts: Any, new: int) -> float:
    """Return tokens a second of processor time of `generate`, after the first tokens."""
    with torch.inference_mode():
        first_s, all_s = (
            bench.seconds(
                lambda count=count: model.generate(**left_padded(prompts, count)), time.thread_time
            )
            for count in (1, new)
        )
    return len(prompts) * (new - 1) / (all_s - first_s)


DECODE = {"r8-64": 0.92, "r16": 0.95, "r16 all-linear": 0.95}
"""The least that each is to reach of the base."""
COPIES = {"": "rate", ", bfloat16": "rate", ", pytorch": "rate_of_pytorch"}


@bench.case("decode", rounds=1, new_tokens=4)
def decode(rounds: int = 5, new_tokens: int = 32) -> dict[str, Any]:
    model, prompts = bench.random_llama(), mixed_prompts()
    mixed, r16 = recipes_of("adapter", MIXED), recipes_of("r16", MIXED, (16,))
    everywhere = {f"all-{index}": bench.RECIPE for index in range(FEW_ADAPTERS)}
    few_names = [f"all-{index % FEW_ADAPTERS}" for index in range(FEW)]
    some = prompts[:FEW]
    calls: Calls = {}
    for copies, way in COPIES.items():
        options = {"adapter_copies": "bfloat16"} if "bfloat16" in copies else {}
        many, few = Decoding(model, mixed | r16, **options), Decoding(model, everywhere, **options)
        if not copies:
            calls["base"] = partial(many.rate, prompts, [None] * MIXED, new_tokens)
            calls["base, 16"] = partial(few.rate, some, [None] * FEW, new_tokens)
        calls[f"r8-64{copies}"] = partial(getattr(many, way), prompts, list(mixed), new_tokens)
        calls[f"r16{copies}"] = partial(getattr(many, way), prompts, list(r16), new_tokens)
        calls[f"r16 all-linear{copies}"] = partial(getattr(few, way), some, few_names, new_tokens)
    calls["transformers"] = partial(rate_of_transformers, model, prompts, new_tokens)
    calls["transformers, 16"] = partial(rate_of_transformers, model, some, new_tokens)
    values = bench.interleave(calls, rounds)
    result: dict[str, Any] = {
        "new_tokens": new_tokens,
        "unit": "tokens a second of one thread's processor time",
        "tokens_per_s": bench.medians(values),
    }
    for name, least in DECODE.items():
        few = ", 16" if name == "r16 all-linear" else ""
        for copies in COPIES:
            found = bench.ratio(values, name + copies, f"base{few}")
            result[f"{name}{copies} / base (at least {least})"] = found
        found = bench.ratio(values, name, f"transformers{few}")
        result[f"{name} / transformers' base (at least 1.5)"] = found
    return result


# ---------------------------------------------------------------------------------------- experts

QWEN3_MOE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1376, "moe_intermediate_size": 384,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": bench.VOCABULARY,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": QWEN3_MOE | {
        "num_hidden_layers": 8, "num_experts": 0, "linear_num_value_heads": 8,
        "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "mlp_only_layers": list(range(8)),
    },
    "lfm2": {
        "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": bench.VOCABULARY,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
}  # fmt: skip
ON_EXPERTS: dict[str, Any] = {
    "r": 8, "lora_alpha": 16, "target_modules": [],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip


def random_model(kind: str, sizes: Mapping[str, Any]) -> Any:
    config = AutoConfig.for_model(kind, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@bench.case("experts", rounds=1, new_tokens=4)
def experts(rounds: int = 5, new_tokens: int = 32) -> dict[str, Any]:
    prompts, one = mixed_prompts()[:FEW], mixed_prompts()[:1]
    calls: Calls = {}
    model = random_model("qwen3_moe", QWEN3_MOE)
    names = [f"r8-{index % FEW_ADAPTERS}" for index in range(FEW)]
    of_floats = Decoding(model, dict.fromkeys(names, ON_EXPERTS))
    of_int8 = Decoding(model, {}, quantization="int8")
    for count, some in ((FEW, prompts), (1, one)):
        nobody = [None] * count
        calls[f"ours, {count}"] = partial(of_floats.rate, some, nobody, new_tokens)
        calls[f"int8, {count}"] = partial(of_int8.rate, some, nobody, new_tokens)
        for way in ("grouped_mm", "eager"):
            base = copy_of(model)
            base.set_experts_implementation(way)
            run = partial(rate_of_transformers, base, some, new_tokens)
            calls[f"transformers, {way}, {count}"] = run
    calls["ours, r8"] = partial(of_floats.rate, prompts, names, new_tokens)
    wrapped = with_peft(copy_of(model), {"r8": ON_EXPERTS})
    calls["peft"] = lambda: statistics.harmonic_mean(
        rate_of_transformers(wrapped, [prompt], new_tokens) for prompt in prompts[:2]
    )
    for kind, sizes in HYBRIDS.items():
        hybrid = random_model(kind, sizes)
        ours = Decoding(hybrid, {})
        calls[f"{kind}, ours"] = partial(ours.rate, prompts, [None] * FEW, new_tokens)
        calls[f"{kind}, transformers"] = partial(rate_of_transformers, hybrid, prompts, new_tokens)
    values = bench.interleave(calls, rounds)
    ratio = partial(bench.ratio, values)
    result: dict[str, Any] = {
        "new_tokens": new_tokens,
        "unit": "tokens a second of one thread's processor time",
        "tokens_per_s": bench.medians(values),
        "8 adapters on experts / peft (at least 4)": ratio("ours, r8", "peft"),
    }
    for count in (FEW, 1):
        for way in ("grouped_mm", "eager"):
            to = f"transformers, {way}, {count}"
            result[f"experts / {to} (at least 1.3)"] = ratio(f"ours, {count}", to)
        result[f"int8 / fp32, {count} (at least 2)"] = ratio(f"int8, {count}", f"ours, {count}")
    for kind in HYBRIDS:
        speed = ratio(f"{kind}, ours", f"{kind}, transformers")
        result[f"{kind} / transformers (at least 1.3)"] = speed
    return result


if __name__ == "__main__":
    bench.main()
