"""Products by adapters in training, in the interpreter: PyTorch's in fp64 are the truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.triton.adapters import trained_adapters
from pcg.peft.weights import AdapterWeight
from pcg.runtime.model.merged_execution import run_merged
from tests.support.interpreter import bf16
from tests.support.interpreter.sanitizer import sanitized
from tests.support.segmented_batches import DTYPES, ROUNDING

bf16.install()
PRODUCT = 2.0**-14
"""Relative to the sum of magnitudes: of what keeps 16 bits of an fp32 factor of 16-bit tokens."""
PRODUCTS = ("shrink", "expand_add", "expand_backward", "outer", "scaled_outer")
dtypes = st.sampled_from(DTYPES)
ranks = st.sampled_from((1, 8, 16, 20, 48))
counts = st.sampled_from((1, 5, 16, 40, 70))


class Job:
    """One job's LoRA at a linear operator, and its tokens."""

    def __init__(self, count: int, rank: int, out: int, in_: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(count + rank)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.x, self.dz = drawn(count, in_).to(dtype), drawn(count, out).to(dtype)
        self.y, self.s = drawn(count, out).to(dtype), drawn(count, rank)
        self.a, self.b = AdapterWeight(drawn(rank, in_), 0.5), AdapterWeight(drawn(out, rank), 0.5)


def close(found: Tensor, expected: Tensor, rounding: float) -> None:
    """Within so much of the largest element."""
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= rounding * expected.abs().max()


@contextmanager
def outer_launches() -> Iterator[tuple[list[Any], pytest.MonkeyPatch]]:
    """What is given to each launch of outer products, and what patches meanwhile."""
    launches: list[Any] = []
    run = trained_adapters.segmented_lora.segment_outer

    def counted(*arguments: Any) -> None:
        launches.append(arguments)
        run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_adapters.segmented_lora, "segment_outer", counted)
        yield launches, patch


def wide(weight: AdapterWeight) -> AdapterWeight:
    return AdapterWeight(weight.weight.double(), weight.scale)


def arguments(job: Job, name: str) -> tuple[Any, ...]:
    return {
        "shrink": (job.x, job.a),
        "expand_add": (job.y, job.s, job.b),
        "expand_backward": (job.dz, job.b),
        "outer": (job.s, job.x),
        "scaled_outer": (job.dz, job.s, job.b),
    }[name]


def reference(name: str, given: tuple[Any, ...]) -> Tensor:
    """PyTorch's, in fp64."""
    found: Tensor = getattr(torch_ops, name)(
        *(one.double() if isinstance(one, Tensor) else wide(one) for one in given)
    )
    return found


@pytest.mark.parametrize("name", PRODUCTS)
@settings(max_examples=6)
@given(counts, ranks, st.sampled_from((24, 136)), dtypes)
def test_products_of_one_adapter(
    name: str, count: int, rank: int, size: int, dtype: torch.dtype
) -> None:
    job = Job(count, rank, size, 48, dtype)
    given = arguments(job, name)
    before = [one.clone() for one in given if isinstance(one, Tensor)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch_ops, name)  # it is the kernels that are tested
        with sanitized():
            found = getattr(trained_adapters, name)(*given)
    rounded = found.dtype if name == "expand_add" else torch.float32
    assert found.dtype == (dtype if name == "expand_add" else torch.float32)
    close(found, reference(name, given), PRODUCT + ROUNDING[rounded])
    for one, other in zip([t for t in given if isinstance(t, Tensor)], before, strict=True):
        assert torch.equal(one, other)


@settings(max_examples=5)
@given(st.lists(st.tuples(counts, ranks), min_size=1, max_size=3), dtypes, st.booleans())
def test_gradients_of_several_jobs_are_each_ones_own(
    shapes: list[tuple[int, int]], dtype: torch.dtype, has_another: bool
) -> None:
    """One launch of each kernel for all jobs, beside one that trains something else there."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(72, 48, generator=generator) / 8).to(dtype)
    jobs = [Job(count, rank, 72, 48, dtype) for count, rank in shapes]
    batch: Any = SimpleNamespace(layer=3, is_alone=False)
    asking = [
        trained_adapters.lora_linear_backward(batch, "up", job.dz, weight, job.a, job.b, job.s)
        for job in jobs
    ]
    other = Job(9, 1, 72, 48, dtype).dz
    if has_another:
        asking.insert(1, trained_adapters.product_backward(batch, "up", other, weight))
    with outer_launches() as (launches, _), sanitized():
        results = run_merged(asking)
    assert len(launches) == 1
    if has_another:
        close(results.pop(1), other.double() @ weight.double(), ROUNDING[dtype] + PRODUCT)
    for job, (ds, db, dx) in zip(jobs, results, strict=True):
        expected = reference("expand_backward", (job.dz, job.b))
        close(ds, expected, PRODUCT)
        close(db, reference("scaled_outer", (job.dz, job.s, job.b)), PRODUCT)
        through = job.dz.double() @ weight.double() + expected @ job.a.weight.double()
        assert dx.dtype == dtype
        close(dx, through, 2 * ROUNDING[dtype] + PRODUCT)  # of the base's part, and of the sum


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.sampled_from((5, 40, 70)), ranks), min_size=1, max_size=2),
    st.sampled_from(((24, 24), (72, 24, 24))),
    dtypes,
)
def test_sites_of_one_input(
    shapes: list[tuple[int, int]], outs: tuple[int, ...], dtype: torch.dtype
) -> None:
    """One launch for all sites, of one job or of several, with as many tokens as it likes."""
    batch: Any = SimpleNamespace(layer=3, is_alone=False)
    generator = torch.Generator().manual_seed(0)
    jobs = [[Job(count, rank, out, 48, dtype) for out in outs] for count, rank in shapes]
    weights = [(torch.randn(out, 48, generator=generator) / 8).to(dtype) for out in outs]
    names = ("q", "k", "v")
    # Of two sites, the third weight has no LoRA.
    plain = [] if len(outs) == 3 else [(torch.randn(8, 48, generator=generator) / 8).to(dtype)]
    others = [[torch.randn(count, 8, generator=generator).to(dtype)] for count, _ in shapes]
    others = others if plain else [[] for _ in shapes]

    def each(job: list[Job], *fields: str) -> list[tuple[Any, ...]]:
        return [tuple(getattr(site, name) for site in job) for name in fields]

    def asked(job: list[Job], other: list[torch.Tensor]) -> Any:
        dz, *rest = each(job, "dz", "a", "b", "s")
        every = [*weights, *plain]
        return trained_adapters.lora_group_backward(batch, names, (*dz, *other), every, *rest)

    with outer_launches() as (launches, _), sanitized():
        results = run_merged([asked(*pair) for pair in zip(jobs, others, strict=True)])
    assert len(launches) == 1
    for job, other, found in zip(jobs, others, results, strict=True):
        count = len(job)
        through: Any = sum(dz.double() @ by.double() for dz, by in zip(other, plain, strict=True))
        for site, weight, ds, db in zip(job, weights, found[:count], found[count:-1], strict=True):
            expected = reference("expand_backward", (site.dz, site.b))
            close(ds, expected, PRODUCT)
            close(db, reference("scaled_outer", (site.dz, site.s, site.b)), PRODUCT)
            through += site.dz.double() @ weight.double() + expected @ site.a.weight.double()
        close(found[-1], through, 4 * ROUNDING[dtype] + PRODUCT)
    with sanitized():
        for job in jobs:
            ((x, *_), y, a, b) = each(job, "x", "y", "a", "b")
            s = trained_adapters.shrink_group(x, a)
            z = trained_adapters.expand_add_group(y, s, b)
            da = trained_adapters.outer_group(s, x)
            for site, own_s, own_z, own_da in zip(job, s, z, da, strict=True):
                wide_s = reference("shrink", (x, site.a))
                close(own_s, wide_s, PRODUCT)
                close(own_da, wide_s.t() @ x.double(), 2 * PRODUCT)
                given = (site.y, own_s, site.b)
                close(own_z, reference("expand_add", given), PRODUCT + ROUNDING[dtype])


@settings(max_examples=6)
@given(st.lists(st.tuples(counts, ranks), min_size=2, max_size=3), dtypes, st.booleans())
def test_outer_products_of_several_jobs(
    shapes: list[tuple[int, int]], dtype: torch.dtype, are_small: bool
) -> None:
    """One launch where the jobs' tokens are few; else one after the other."""
    jobs = [Job(count, rank, 72, 48, dtype) for count, rank in shapes]
    batch: Any = SimpleNamespace(layer=3, is_alone=False)
    asking = [trained_adapters.asked_outer(batch, "dA", job.s, job.x) for job in jobs]
    with outer_launches() as (launches, patch):
        if not are_small:
            patch.setattr(trained_adapters, "_MOST_JOINED", 0)
        with sanitized():
            results = run_merged(asking)
    assert len(launches) == (1 if are_small else len(jobs))
    for job, found in zip(jobs, results, strict=True):
        close(found, reference("outer", (job.s, job.x)), PRODUCT)


def of_bottleneck(job: Job, bias: AdapterWeight, function: str) -> list[Tensor]:
    """ds, dU and dd by autograd, in fp64."""
    leaves = [one.double().requires_grad_() for one in (job.s, job.b.weight, bias.weight)]
    s, up, vector = leaves
    h = torch_ops.activate(s, AdapterWeight(vector, bias.scale), function)
    z = job.b.scale * h @ up.t()
    return list(torch.autograd.grad(z, leaves, job.dz.double()))


@settings(max_examples=5)
@given(
    st.lists(st.tuples(counts, ranks), min_size=1, max_size=3),
    dtypes,
    st.sampled_from(["gelu", "gelu_new", "relu", "silu", "tanh"]),
)
def test_bottlenecks_of_several_jobs_are_each_ones_own(
    shapes: list[tuple[int, int]], dtype: torch.dtype, function: str
) -> None:
    jobs = [Job(count, rank, 72, 48, dtype) for count, rank in shapes]
    generator = torch.Generator().manual_seed(0)
    biases = [
        AdapterWeight(torch.randn(rank, generator=generator), 0.5 + 0.01 * rank)
        for _, rank in shapes
    ]
    batch: Any = SimpleNamespace(layer=3, is_alone=False)
    asking = [
        trained_adapters.bottleneck_backward(batch, "up", job.dz, job.b, job.s, bias, function)
        for job, bias in zip(jobs, biases, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch_ops, "activate")  # it is the kernels that are tested
        with sanitized():
            results = run_merged(asking)
    for job, bias, found in zip(jobs, biases, results, strict=True):
        expected = of_bottleneck(job, bias, function)
        for one, other in zip(found[:2], expected[:2], strict=True):
            close(one, other, PRODUCT)
        # A sum over tokens, whose terms may cancel each other.
        magnitudes = bias.scale * expected[0].abs().sum(0)
        assert found[2].shape == magnitudes.shape
        assert (found[2].double() - expected[2]).abs().max() <= PRODUCT * magnitudes.max()


@pytest.mark.parametrize(
    ("count", "rank", "out", "dtype"),
    [(5, 4, 20, torch.float32), (5, 4, 24, torch.float64), (5, 300, 24, torch.float32)],
    ids=["columns", "fp64", "rank"],
)
def test_what_kernels_do_not_take_is_left_to_pytorch(
    count: int, rank: int, out: int, dtype: torch.dtype
) -> None:
    job = Job(count, rank, out, 20, dtype)
    if dtype == torch.float64:
        job.s, job.a, job.b = job.s.double(), wide(job.a), wide(job.b)
    for name in PRODUCTS:
        given = arguments(job, name)
        close(getattr(trained_adapters, name)(*given), reference(name, given), 2e-6)
    weight = torch.randn(out, 20, dtype=dtype)
    batch: Any = SimpleNamespace(layer=0, is_alone=False)
    asking = trained_adapters.lora_linear_backward(batch, "w", job.dz, weight, job.a, job.b, job.s)
    ((ds, db, dx),) = run_merged([asking])
    expected = reference("expand_backward", (job.dz, job.b))
    close(ds, expected, 2e-6)
    close(db, reference("scaled_outer", (job.dz, job.s, job.b)), 2e-6)
    close(dx, job.dz.double() @ weight.double() + expected @ job.a.weight.double(), 2e-6)
    bias = AdapterWeight(torch.randn(rank, dtype=dtype), 0.5)
    asking = trained_adapters.bottleneck_backward(batch, "w", job.dz, job.b, job.s, bias, "gelu")
    (found,) = run_merged([asking])
    for one, wanted in zip(found, of_bottleneck(job, bias, "gelu"), strict=True):
        close(one, wanted, 2e-6)
