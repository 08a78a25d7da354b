"""The device, its assembler, and whether programs and engines are right on it.

Programs, jobs and tokens are compared with transformers' and peft's. Each assembler (ptxas) runs
the self-test of `pcg/kernels/triton/ptxas.py` in a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_model
import gpu_work as work
from gpu_case import Bench, Case, Row, Setting

PACKAGES = ("torch", "triton", "transformers", "peft", "safetensors", "msgspec")
COPIED, SQUARE = 2**29, 8192
"""Elements of the large copies, and the side of the large product."""
LAYERS, LENGTHS, WINDOW, JOB_STEPS = 3, (41, 23), 20, 5
"""Layers of the model of a job, tokens of its sequences and of an engine's step, and steps."""
TARGETS: str | list[str] = "all-linear"
"""Modules with LoRA of that model."""
UPDATE_ERROR = 1e-2
"""Tolerance of an adapter relative to its update by training; a CPU is within 1e-5 in fp32."""
GREEDY = (8, 128, 64)
"""Prompts, tokens of each, and generated tokens."""


# ------------------------------------------------------------------------------------- the device


def device_settings(bench: Bench) -> Iterator[Setting]:
    """Names and versions, assemblers, and what the device does at its best."""
    yield "versions", versions
    yield "assemblers", assemblers
    yield "ceilings", partial(ceilings, bench)


def versions() -> Row:
    """The GPU, the driver and the packages."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    for package in PACKAGES:
        found[package] = metadata.version(package) if find_spec(package) else "none"
    return Row(note=", ".join(f"{key} {value}" for key, value in found.items()), details=found)


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout
    return next(iter(said.splitlines()), "unknown")


def ceilings(bench: Bench) -> Row:
    """The rates of a large copy, of a large product in bf16, and of a copy from pinned memory."""
    import torch

    size = 2
    x, a, b = (
        torch.randn(shape, dtype=torch.bfloat16, device=bench.device)
        for shape in ((COPIED,), (SQUARE, SQUARE), (SQUARE, SQUARE))
    )
    y = torch.empty_like(x)
    pinned = torch.zeros(COPIED // 4, dtype=torch.bfloat16).pin_memory()
    for _ in range(SQUARE // 40):  # until clocks are up
        torch.mm(a, b)
    copy_us = bench.timer.median_us(lambda: y.copy_(x))
    product_us = bench.timer.median_us(lambda: torch.mm(a, b))
    host_us = bench.timer.median_us(lambda: y[: len(pinned)].copy_(pinned, non_blocking=True))
    found = {
        "bytes_per_s": 1e6 * work.copy_work(COPIED, size).bytes / copy_us,
        "flops_per_s": 1e6 * work.product_work(SQUARE, SQUARE, SQUARE, size).flops / product_us,
        "host_bytes_per_s": 1e6 * pinned.nbytes / host_us,
    }
    note = (
        f"copies {found['bytes_per_s'] / 1e9:,.0f} GB/s, bf16 products "
        f"{found['flops_per_s'] / 1e12:,.0f} TFLOP/s, from the host "
        f"{found['host_bytes_per_s'] / 1e9:,.0f} GB/s"
    )
    return Row(note=note, details=found)


# ------------------------------------------------------------------------------------- assemblers


def assemblers() -> Row:
    """Versions of ptxas by their paths: the one that Triton takes, then newer ones."""
    import torch

    from pcg.kernels.triton import ptxas

    major, minor = torch.cuda.get_device_capability()
    there = ptxas.assemblers(10 * major + minor)
    found = {one.path: one.version for one in there}
    return Row(note=", ".join(map(str, there)), details=found)


def assembler_settings(bench: Bench) -> Iterator[Setting]:
    """A product whose bits are known, by the assembler of this process."""
    import torch

    from pcg.kernels.triton import ptxas

    major, minor = torch.cuda.get_device_capability()
    used = ptxas.used_ptxas(10 * major + minor)

    def check() -> Row:
        found, exact = ptxas.products(torch.device(bench.device))
        if not torch.equal(found.cpu(), exact):
            raise AssertionError("products whose operand lies in registers have wrong bits")
        return Row(target="its products have the right bits", reached=1.0, met=True)

    yield str(used), check


# ------------------------------------------------------------------------------------- programs


def program_settings(bench: Bench) -> Iterator[Setting]:
    """A whole program, jobs, and tokens."""
    yield "a program in bf16", partial(check_in_bf16, bench)
    for name, how in JOBS.items():
        yield name, partial(check_training, bench, *how)
    yield "greedy tokens of 1B in bf16", partial(check_greedy, bench)


def check_in_bf16(bench: Bench) -> Row:
    """Logits and gradients are as near to fp64 as transformers' and peft's in bf16.

    Raises:
        AssertionError: they are further off than 1.2 times theirs, and than bf16's precision.
    """
    import torch

    import pcg
    from pcg.runtime.data.example import Example
    from tests.support import oracle
    from tests.support.families import BY_NAME

    config = BY_NAME["llama3"].config(1)
    base = oracle.random_model(config, torch.bfloat16)
    theirs = oracle.with_adapter(base, "all-linear", rank=4)
    exact = oracle.with_adapter(oracle.random_model(config, torch.float64), "all-linear", rank=4)
    exact.load_state_dict(theirs.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        oracle.save(theirs, Path(folder))
        options: dict[str, Any] = {"backend": "triton", "device": torch.device(bench.device)}
        executor = pcg.compile(base, {"a": folder}, **options)
    sequences = [[5, 6, 7, 8, 9], [3, 2]]
    errors: dict[str, float] = {}
    for ours, sequence in zip(executor.logits(sequences, ["a", "a"]), sequences, strict=True):
        right = oracle.logits(exact, sequence)
        times = _error_to_theirs("logits", ours.cpu(), oracle.logits(theirs, sequence), right, 1.2)
        errors["logits"] = max(times, errors.get("logits", 0.0))
    runner = executor.training_runner("a")
    targets = sum(len(sequence) - 1 for sequence in sequences)
    runner.forward_backward([Example(s, s) for s in sequences], targets)
    _, of_theirs = oracle.loss_and_gradients(theirs, sequences)
    _, right_gradients = oracle.loss_and_gradients(exact, sequences)
    for path, parameter in runner.parameters.items():
        found = parameter.grad.cpu()
        errors[path] = _error_to_theirs(path, found, of_theirs[path], right_gradients[path], 2.0)
    return Row(details=errors).at_most("errors over peft's", max(errors.values()), 2.0)


def _error_to_theirs(what: str, ours: Any, theirs: Any, right: Any, most: float) -> float:
    """Our error relative to theirs, or to bf16's precision where theirs is smaller."""
    error, of_theirs = (float((x.double() - right).norm() / right.norm()) for x in (ours, theirs))
    if not error <= max(most * of_theirs, 2**-7):
        raise AssertionError(f"{what}: off by {error:.1e} of the norm, peft by {of_theirs:.1e}")
    return error / max(of_theirs, 2**-7)


JOBS: Mapping[str, tuple[bool, bool]] = {
    "a job's windows, eager": (False, False),
    "a job's windows, recorded": (True, False),
    "a job's windows, recorded before": (True, True),
}
"""Setting to whether the windows of a job are recorded, and whether before its first step."""


def check_training(bench: Bench, records: bool, is_warm: bool) -> Row:
    """Compare the adapter of a job of several windows, layers and steps with peft's.

    Raises:
        AssertionError: it is off; by how much of what training changed.
    """
    import torch

    from tests.support import oracle
    from tests.support.families import BY_NAME
    from tests.support.prompts import prompts

    base = oracle.random_model(BY_NAME["llama3"].config(LAYERS, max_position_embeddings=128))
    sequences = prompts(LENGTHS)
    theirs = oracle.with_adapter(base, TARGETS, rank=4)
    with tempfile.TemporaryDirectory() as start:
        oracle.save(theirs, Path(start))
        found, graphs = _trained(bench, base, start, sequences, records, is_warm)
    if records != bool(graphs["replayed"]):
        raise AssertionError(f"{graphs['replayed']} replays of graphs of a job")
    parameters = oracle.lora_parameters(theirs)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01, eps=1e-4, weight_decay=0.0)
    for _ in range(JOB_STEPS):
        _, gradients = oracle.loss_and_gradients(theirs, sequences)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer.step()
    errors = {
        name: float((found[name] - wanted).norm() / (wanted - before[name]).norm())
        for name, wanted in ((name, parameter.detach()) for name, parameter in parameters.items())
    }
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= UPDATE_ERROR:
        raise AssertionError(
            f"{worst} is off by {errors[worst]:.1e} of peft's update; {UPDATE_ERROR} allowed"
        )
    note = f"{graphs['recorded']} recordings and {graphs['replayed']} replays in {JOB_STEPS} steps"
    row = Row(note=note, details=errors)
    return row.at_most("off from peft's update", errors[worst], UPDATE_ERROR)


def _trained(
    bench: Bench,
    base: Any,
    start: str,
    sequences: Sequence[Sequence[int]],
    records: bool,
    is_warm: bool,
) -> tuple[dict[str, Any], Mapping[str, int]]:
    """Train a saved adapter; return its parameters by name, and the counts of graphs."""
    import torch

    import pcg
    from pcg.runtime.admission.limits import Limits
    from pcg.runtime.data.example import Example
    from pcg.runtime.training import bound_training
    from pcg.runtime.training.recorded.warm_job import WarmJob
    from pcg.runtime.training.warm_jobs import record_jobs

    executor = pcg.compile(
        base, {"mine": start}, backend="triton", device=torch.device(bench.device)
    )
    recipe = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": TARGETS}
    jobs = [WarmJob(recipe, len(sequences), max(map(len, sequences)))] if is_warm else []
    eagerly = patch.object(bound_training, "recorder_for", lambda device: None)
    with nullcontext() if records else eagerly, gpu_model.job_graphs() as graphs:
        engine = executor.engine(Limits(tokens=WINDOW), kv_cache_bytes=2**20)
        record_jobs(executor.state, engine.device.cache, WINDOW, engine.runners, jobs)
        job = engine.finetune(
            [Example(ids, ids) for ids in sequences],
            "mine",
            max_steps=JOB_STEPS,
            batch_size=len(sequences),
            learning_rate=0.01,
            eps=1e-4,
            max_grad_norm=None,
            schedule="constant",
        )
        while not engine.is_idle:
            engine.step()
    if job.error is not None:
        raise job.error
    parameters = executor.training_runner("mine").parameters
    return {name: tensor.detach().cpu() for name, tensor in parameters.items()}, graphs


def small_config() -> dict[str, Any]:
    """The config.json of the model whose tokens are compared."""
    path = gpu_model.CONFIG.with_name("meta-llama--Llama-3.2-1B.json")
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

    model = gpu_model.Model(bench, small_config())
    count, tokens, new = GREEDY
    prompts = gpu_model.prompts_of(count, tokens)
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


DEVICE = Case("device", 60, device_settings)
ASSEMBLER = Case("assembler", 60, assembler_settings)
CASES = (Case("programs", 90, program_settings),)
