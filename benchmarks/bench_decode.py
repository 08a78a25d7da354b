"""Measure decoding with mixed adapters against the base alone, and against transformers'.

    python benchmarks/bench_decode.py [--rounds 5] [--new-tokens 32]

The model is a random 8-layer Llama of hidden size 512 (159 MiB), on one thread in fp32. In every
round each contender serves its prompts anew; measured is the processor time of the steps that
follow once every prompt has its first token, and the unit is tokens a second:

    base                64 prompts of 16 to 64 tokens without adapters; with 16, the first 16
    r8-64               the 64 on 64 adapters: LoRA on q, k, v, o, of ranks 8, 16, 32 and 64 in
                        turn, 240 MiB
    r16                 the 64 on 64 adapters of rank 16, 128 MiB
    r16 all-linear      16 prompts on 8 adapters of rank 16 on all linears
    …, bfloat16         the same with `adapter_copies="bfloat16"`
    …, pytorch          the same by PyTorch's products, without the native kernel
    transformers        `generate` of the base, left-padded: the time of all tokens less that of
                        the first

Processor time of one thread, as the machine is shared: what waits for others is not counted.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from bench_generation import left_padded, random_llama
from bench_serving import KV_CACHE_BYTES, MIXED, PROMPTS, recipe
from measure import interleave, medians, ratio, write

import pcg
from pcg.kernels import sgmv
from pcg.runtime.admission.limits import Limits
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams

FEW, FEW_ADAPTERS = 16, 8
ALL_LINEAR = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


class Decoding:
    """One engine over an executor, which decodes the same prompts again and again."""

    def __init__(self, model: torch.nn.Module, recipes: Mapping[str, Any], **options: Any) -> None:
        self.executor = pcg.compile(model, **options)
        for seed, (name, fields) in enumerate(recipes.items()):
            self.executor.add_adapter(name, {"peft_type": "LORA", **fields}, seed=seed)
        self.engine = self.executor.engine(
            Limits(running=MIXED), kv_cache_bytes=KV_CACHE_BYTES, prefix_caching=False
        )

    def rate(
        self, prompts: Sequence[Sequence[int]], names: Sequence[str | None], new: int
    ) -> float:
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


def rate_of_transformers(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], new: int
) -> float:
    """Return tokens a second of processor time of `generate`, after the first tokens."""
    times = []
    for count in (1, new):
        options = left_padded(prompts, count)
        started = time.thread_time()
        with torch.inference_mode():
            model.generate(**options)
        times.append(time.thread_time() - started)
    return len(prompts) * (new - 1) / (times[1] - times[0])


def contenders(new: int) -> dict[str, Callable[[], float]]:
    """Return calls by name that decode once and return their rate."""
    model = random_llama().eval()
    drawn = random.Random(0)
    lengths = [PROMPTS.draw(drawn) for _ in range(MIXED)]
    prompts = [[drawn.randrange(5, 31000) for _ in range(length)] for length in lengths]
    mixed = {f"adapter-{index}": recipe(index) for index in range(MIXED)}
    r16 = {f"r16-{index}": recipe(index, (16,)) for index in range(MIXED)}
    everywhere = {f"all-{index}": ALL_LINEAR for index in range(FEW_ADAPTERS)}
    names = [f"all-{index % FEW_ADAPTERS}" for index in range(FEW)]
    plain, rounded, by_pytorch = (
        Decoding(model, mixed | r16),
        Decoding(model, mixed | r16, adapter_copies="bfloat16"),
        Decoding(model, mixed | r16),
    )
    few, few_rounded, few_by_pytorch = (
        Decoding(model, everywhere),
        Decoding(model, everywhere, adapter_copies="bfloat16"),
        Decoding(model, everywhere),
    )
    some = prompts[:FEW]
    return {
        "base": partial(plain.rate, prompts, [None] * MIXED, new),
        "r8-64": partial(plain.rate, prompts, list(mixed), new),
        "r8-64, bfloat16": partial(rounded.rate, prompts, list(mixed), new),
        "r8-64, pytorch": partial(by_pytorch.rate_of_pytorch, prompts, list(mixed), new),
        "r16": partial(plain.rate, prompts, list(r16), new),
        "r16, bfloat16": partial(rounded.rate, prompts, list(r16), new),
        "r16, pytorch": partial(by_pytorch.rate_of_pytorch, prompts, list(r16), new),
        "transformers": partial(rate_of_transformers, model, prompts, new),
        "base, 16": partial(few.rate, some, [None] * FEW, new),
        "r16 all-linear": partial(few.rate, some, names, new),
        "r16 all-linear, bfloat16": partial(few_rounded.rate, some, names, new),
        "r16 all-linear, pytorch": partial(few_by_pytorch.rate_of_pytorch, some, names, new),
        "transformers, 16": partial(rate_of_transformers, model, some, new),
    }


TARGETS = {"r8-64": 0.92, "r16": 0.95, "r16 all-linear": 0.95}
"""The least that each is to reach of the base."""


def main() -> None:
    """Run the contenders in turn and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = interleave(contenders(arguments.new_tokens), arguments.rounds)
    result: dict[str, Any] = {
        "new_tokens": arguments.new_tokens,
        "unit": "tokens a second of one thread's processor time",
        "tokens_per_s": medians(values),
    }
    for name, least in TARGETS.items():
        few = ", 16" if name == "r16 all-linear" else ""
        for copies in ("", ", bfloat16", ", pytorch"):
            result[f"{name}{copies} / base (at least {least})"] = ratio(
                values, name + copies, "base" + few
            )
        result[f"{name} / transformers' base (at least 1.5)"] = ratio(
            values, name, "transformers" + few
        )
    write("decode", result)


if __name__ == "__main__":
    main()
