"""The roofline's counts of a small model's steps, against what runs on the stand-in of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.interpreter import bf16, stand_in
from tests.support.interpreter.device_tensors import DeviceTensor
from tests.support.interpreter.loads_under_way import bytes_under_way
from tests.support.interpreter.streams import ORDER

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import roofline
from gpu_bench import LlamaShape, Work
from roofline import H200, Sizes
from roofline_counts import FORMULAS, Launch, counted

bf16.install()

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SIZES = Sizes(
    batch=3, keys=12, adapters=2, rank=16, prompts=2, prompt_tokens=9,
    trained=2, trained_tokens=9, cache_bytes=2**22,
)  # fmt: skip


@contextmanager
def touched() -> Iterator[list[tuple[str, int]]]:
    """Names of kernels, and the bytes at the addresses that each loads and stores."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    found: list[tuple[str, int]] = []
    load, store, launch = Builder.create_masked_load, Builder.create_masked_store, stand_in.launch
    own: tuple[dict[int, Any], dict[int, Any]] = ({}, {})

    def note(side: int, pointers: Any, mask: Any) -> None:
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        chosen = np.broadcast_to(mask.data, shape)
        addresses = np.broadcast_to(pointers.data, shape)[chosen]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        own[side].update(dict.fromkeys(addresses.tolist(), size))

    def noted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        note(0, pointers, mask)
        return load(self, pointers, mask, *rest)

    def noted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(1, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def launched(run: Any, grid: Any, args: Any, kwargs: Any) -> Any:
        for side in own:
            side.clear()
        result = launch(run, grid, args, kwargs)
        found.append((grid.fn.__name__, sum(sum(side.values()) for side in own)))
        return result

    with (
        patch.object(Builder, "create_masked_load", noted_load),
        patch.object(Builder, "create_masked_store", noted_store),
        patch.object(stand_in, "launch", launched),
    ):
        yield found


def flat(launches: Sequence[Launch]) -> Iterator[Launch]:
    """The launches in order, those of branches before the ones that they run beside."""
    for launch in launches:
        yield from flat([launch.beside] if launch.beside else [])
        yield launch


@cache
def counts_of(step: str, adapters: int) -> tuple[list[Launch], list[str], list[tuple[str, int]]]:
    """The launches of a step as they are counted; names of what ran, and the bytes of kernels."""
    ran: list[str] = []
    kernels: list[tuple[str, int]] = []

    def count(run: Any) -> list[Launch]:
        first, touches = len(notes), len(bytes_)
        before = {stream.number: len(stream.ran) for stream in ORDER.streams}
        run()
        for stream in ORDER.streams:
            own = stream.ran[before.get(stream.number, 0) :]
            ran.extend(name for name in own if "empty" not in name)
        kernels.extend(bytes_[touches:])
        return [*flat(notes[first:])]

    counting = counted(DeviceTensor, is_on_branch=lambda: ORDER.is_on_branch)
    with stand_in.stand_in(), touched() as bytes_, counting as notes:
        launches = roofline.STEPS[step](CONFIG, SIZES, adapters, count)
    return launches, ran, kernels


@pytest.mark.parametrize(
    ("step", "adapters"),
    [("decode", 2), ("prefill", 2), ("finetune", 0)],
)
def test_bytes_are_those_that_kernels_touch(step: str, adapters: int) -> None:
    launches, ran, kernels = counts_of(step, adapters)
    own = [launch for launch in launches if launch.programs]
    assert [launch.kernel for launch in own] == [name for name, _ in kernels]
    # The stand-in also tells of the host's own copies, and of memory that is taken.
    copies = ("aten._to_copy", "aten.copy_", "aten.to")
    theirs = [name for name in ran if name != "a copy" and not name.startswith("aten.to.")]
    assert sum(launch.kernel not in copies for launch in launches) == len(theirs)
    for launch, (name, size) in zip(own, kernels, strict=True):
        # Ids of rows beyond a rank, and such, are read too.
        assert launch.work.bytes == pytest.approx(size, rel=0.06, abs=256), name
    template = {name for name, _ in kernels} & {*FORMULAS}
    assert ("shrink_kernel" in template) == (step == "finetune" or adapters > 0)
    assert ("expand_kernel" in template) == (step == "finetune")  # few tokens need none
    assert any(launch.beside for launch in launches) == (step == "decode")


def test_work_of_a_decode_step_is_that_of_the_models_formula() -> None:
    launches, _, _ = counts_of("decode", 2)
    work = sum((launch.work for launch in launches), Work(0))
    wanted = LlamaShape.of(CONFIG).decode_work(SIZES.batch, SIZES.keys, 2, SIZES.rank, 4)
    # A graph's tokens are rounded up, from three to four, for the base's products.
    extra = 2 * LlamaShape.of(CONFIG).product_weights
    assert work.flops == wanted.flops + extra


def test_flops_of_products_are_those_that_torch_counts() -> None:
    launches, _, _ = counts_of("prefill", 0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
    ids = torch.zeros(SIZES.prompts, SIZES.prompt_tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    theirs = counter.get_flop_counts()["Global"]
    wanted = sum(flops for op, flops in theirs.items() if str(op) in ("aten.mm", "aten.addmm"))
    ours = [launch.work for launch in launches if not launch.programs]
    assert sum(work.flops for work in ours) == wanted
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    weights = sum(2 * linear.weight.numel() for linear in linears)
    tokens = SIZES.prompts * SIZES.prompt_tokens
    activations = sum(2 * tokens * sum(linear.weight.shape) for linear in linears)
    found = sum(work.bytes for work in ours if work.flops)
    assert weights < found <= weights + activations


def test_training_copies_no_matrix_of_an_adapter() -> None:
    """Kernels read A and B forward and back where the parameters lie, and B as its columns."""
    launches, _, _ = counts_of("finetune", 0)
    least = 2 * 4 * SIZES.rank * CONFIG["hidden_size"] // 2  # k's B of 32 rows, read and written
    for launch in launches:
        if launch.kernel in ("aten._to_copy", "aten.cat", "aten.clone", "aten.copy_"):
            assert launch.work.bytes < least, launch


def test_a_kernel_without_a_formula_is_named() -> None:
    short = {name: work for name, work in FORMULAS.items() if name != "attend_tiles"}
    with patch("roofline_counts.FORMULAS", short), pytest.raises(KeyError, match="attend_tiles"):
        counts_of.__wrapped__("prefill", 0)


# ------------------------------------------------------------------------------------------ times


def test_layers_are_the_difference_of_two_models() -> None:
    head, norm, product = (Launch(name, Work(8)) for name in ("head", "norm", "product"))
    step = roofline.of_layers([head, norm], [head, norm, norm], 4, recorded=True)
    assert [launch.kernel for launch in step.layer] == ["norm"]
    assert step.work == Work(8 * 5)
    lists = Launch("lists", Work(10)), Launch("lists", Work(16))
    step = roofline.of_layers([lists[0], norm], [lists[1], norm, norm], 4, recorded=True)
    assert step.work == Work(10 + 3 * 6 + 8 * 4)
    with pytest.raises(ValueError, match="product"):
        roofline.of_layers([product], [head, norm], 4, recorded=True)


def test_occupancy_and_time() -> None:
    """A processor has 65,536 registers: three programs of 4 warps and 168 registers, not four."""
    launch = Launch("one", Work(43 * 10**6), 10_000, 4, 168, 16 * 1024)
    assert H200.resident(launch) == 3
    assert H200.resident(Launch("two", Work(1), 1, 4, 32, 100 * 1024)) == 2
    # Three programs with 16 KiB each under way hide the memory's latency; one of 4 KiB does not.
    assert H200.expected_us(Launch("library", Work(43 * 10**6))) == pytest.approx(13.5)
    narrow = Launch("narrow", Work(43 * 10**6), 132, 1, 32, 0, load_bytes=128)
    assert H200.expected_us(narrow) > 3 * 13.5
    # Eight loads of 16 bytes a thread, whose machine code says so, hide more than four.
    hidden = replace(narrow, load_bytes=64)
    assert H200.expected_us(hidden) > H200.expected_us(narrow) + 13.5
    # The host launches more slowly than the device runs what is small.
    # A branch costs no time to begin and to end, if that of what it runs beside hides its own.
    product = Launch("product", Work(43 * 10**6), beside=Launch("shrink", Work(43 * 10**5)))
    assert H200.expected_us(product) == pytest.approx(13.5 + 1.0 + 0.5)
    assert (product.count, product.whole_work) == (2, Work(473 * 10**5))
    small = [Launch("small", Work(1))] * 10
    assert H200.step_us(small, recorded=True) == pytest.approx(35.0)
    assert H200.step_us(small, recorded=False) == 10 * H200.host_us


LISTING = """
.text.kernel:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0020*/                   IADD3 R2, R2, 0x20, RZ ;
        /*0030*/                   LDG.E.64 R12, desc[UR4][R2.64] ;
        /*0040*/                   FADD R20, R9, R20 ;
        /*0050*/                   LDG.E R14, desc[UR4][R2.64] ;
        /*0060*/                   STG.E.128 desc[UR4][R30.64], R12 ;
.L_x_1:
        /*0070*/                   LDG.E.U16 R14, desc[UR4][R2.64] ;
"""


def test_bytes_that_loads_have_under_way() -> None:
    """Two loads of 16 bytes and one of 8; then one that waits for the second has the first, too."""
    assert bytes_under_way(LISTING) == 40
    lines = LISTING.splitlines(keepends=True)
    assert bytes_under_way("".join(lines[5:])) == 12
    assert bytes_under_way("".join(lines[8:])) == 2


def test_goals() -> None:
    shape = LlamaShape.of(CONFIG)
    needed = shape.decode_work(32, 560).bytes
    base = roofline.Step([Launch("base", Work(needed))], [Launch("base", Work(1))], True)
    more = Launch("adapter", Work(needed // 10))
    steps = {
        "decode, base": base,
        "decode, adapters": roofline.Step([*base.every, more], [more] * 15, True),
    }
    found = roofline.goals(steps, shape)
    bytes_, launches, *_ = found.items()
    assert bytes_ == (
        "bytes of decode with adapters / (weights + keys and values) (at most 1.17)",
        1.1,
    )
    assert launches == ("launches of a layer of decode with adapters (at most 14)", 15)
