"""Keys and values that the kernels which make them append to the cache.

What is in the cache is compared with transformers' own, and with index_copy_ of PyTorch's programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from pcg.codegen.emit import emit_module
from pcg.codegen.group_kernel import group_kernel
from pcg.codegen.program_functions import Function
from pcg.codegen.tile_kernel import arguments_of
from pcg.ir.analysis.builder import Builder
from pcg.ir.analysis.kernel_group import group_of
from pcg.ir.graph import Graph, Parameter, Value
from pcg.ir.program.program import python_name
from pcg.ir.types import TOKENS, TORCH_NAMES, tensor
from pcg.kernels.batch import Span
from pcg.runtime.data.example import Example
from pcg.runtime.memory.kv_cache import KvCache, kv_types
from pcg.runtime.model.batch import Batch, whole_sequences
from pcg.runtime.model.runner import load_functions
from pcg.runtime.training.runner import TrainingPass, training_runner
from pcg.runtime.training.work_units import Part
from tests.support import compiled as programs
from tests.support import oracle
from tests.support.append_cases import check_cache, rows_of, tables_of
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized
from tests.support.kernel_graphs import lowered
from tests.support.parameters import mostly_slow
from tests.support.prompts import prompts

bf16.install()
CPU = torch.device("cpu")


# ------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize(
    ("name", "layers", "changes"),
    mostly_slow(
        [
            ("llama3", 1, {"num_key_value_heads": 1}),
            ("qwen3", 1, {"head_dim": 16}),  # norms of queries and keys
            ("gpt_neox", 1, {}),  # heads that lie apart, of which a part turns
            ("opt", 1, {}),  # no rotary embedding
            pytest.param("qwen2.5-windows", 2, {}, marks=pytest.mark.slow),
        ],
        ("llama3", 1, {"num_key_value_heads": 1}),
    ),
)
def test_the_cache_holds_what_transformers_caches(
    name: str, layers: int, changes: Mapping[str, Any]
) -> None:
    base = oracle.random_model(BY_NAME[name].config(layers, **changes))
    executor = programs.executor(base, backend="triton")
    for in_pages in (True, False):
        with sanitized():
            check_cache(base, executor, prompts((21, 5, 18)), in_pages)


def launched(name: str, **changes: Any) -> list[str]:
    """The kernels of a step that decodes, of one layer alone."""
    base = oracle.random_model(BY_NAME[name].config(1, **changes))
    serving = programs.executor(base, backend="triton").serving
    runner = serving.runner
    cache = KvCache(kv_types(runner.model), 4, CPU, in_pages=True)
    tables = tables_of(cache, [9, 9])
    spans = [Span(i, 1, 8, table) for i, table in enumerate(tables)]
    batch = Batch(torch.tensor([5, 7]), spans, cache)
    names: list[str] = []
    run = interpreter.GridExecutor.__call__

    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        names.append(self.fn.__name__)
        run(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", noted)
        runner.hidden(batch, serving.tables.bind([None, None], [1, 1]))
    return [name for name in names if not name.startswith("prologue")]


def test_one_launch_rotates_and_appends() -> None:
    """And the sum of what the layer before made is one with the norm behind it."""
    attend = ["attend_splits"]  # which writes its outputs where tokens see up to 1,024 keys
    rest = ["block_0_add_rms_norm_2", "block_0_silu_mul"]
    assert launched("llama3") == ["block_0_add_rms_norm", "block_0_rope_append", *attend, *rest]
    with_norms = ["block_0_add_rms_norm", "block_0_rms_norm_rope_append", *attend, *rest]
    assert launched("qwen3", head_dim=16) == with_norms
    # Nothing is made beside products: attention appends.
    assert launched("gpt2") == [
        "block_0_add_layer_norm",
        "append_rows",
        *attend,
        "block_0_add_layer_norm_2",
    ]


@pytest.mark.slow
def test_gradients_of_windows_through_pages() -> None:
    """Attention is made again for backward, and its keys and values appended once more."""
    base = oracle.random_model(BY_NAME["qwen3"].config(1, head_dim=16))
    wrapped = oracle.with_adapter(base, "all-linear", rank=4)
    executor = programs.executor(base, backend="triton", memory_budget=0.0)
    recipe = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    adapter = executor.add_adapter("a", recipe)
    for path, parameter in oracle.lora_parameters(wrapped).items():
        module, _, kind = path.rpartition(".")
        weights = adapter.weights[module]
        (weights.a if kind == "lora_A" else weights.b).copy_(parameter.data)
    runner = training_runner(executor.state, adapter, windows=True)
    backward = runner.training.plans[0].backward
    assert backward is not None
    assert any(node.op == "attention" for node in backward.nodes)
    examples = [Example(ids, ids) for ids in prompts((19, 8))]
    lengths = [len(example.ids) for example in examples]
    cache = KvCache(kv_types(runner.training.model), 6, CPU, in_pages=True)
    windows = TrainingPass(
        runner, examples, sum(lengths) - 2, cache=cache, tables=tables_of(cache, lengths)
    )
    while windows.forwarded < windows.tokens:
        windows.forward(11)
    while not windows.is_done:
        Part(windows).run()
    loss, gradients = oracle.loss_and_gradients(wrapped, [example.ids for example in examples])
    assert windows.loss == pytest.approx(loss, rel=1e-5)
    for path, parameter in runner.parameters.items():
        assert oracle.relative_error(parameter.grad, gradients[path]) < 1e-5, path


# ------------------------------------------------------------------------------- machine code


HEADER = """
import triton
import triton.language as tl

from pcg.kernels.triton import ops as K


"""


def code_of(size: int, value_size: int, page: int) -> Kernel:
    """The kernel of a layer whose queries, keys and values are slices of one product."""
    builder = Builder("layer")
    joined = builder.input("joined", tensor("bf16", TOKENS, 8, 2 * size + value_size))
    angles = [builder.input(name, tensor("f32", TOKENS, size)) for name in ("cos", "sin")]
    ends = (0, size, 2 * size, 2 * size + value_size)
    q, k, v = (
        builder.add("slice", [joined], dim=-1, start=start, stop=stop)
        for start, stop in pairwise(ends)
    )
    q, k = (builder.add("rope", [x, *angles], rotary_dim=size, style="half") for x in (q, k))
    out, _ = builder.add_many("attention", [q, k, v], scale=1.0, window=0, softcap=0.0)
    graph = lowered(builder.build([out]))
    group = group_of(graph, graph.kernels[0])
    made = group_kernel(group, "append")
    warps = re.search(r"warps=(\d+)", made.source)
    assert warps is not None
    counts = ("tokens", "first_1", "first_2")
    types = {f"{python_name(n)}_ptr": graph.types[n].dtype for n in (*made.inputs, *made.outputs)}
    pointers = {name: {"bf16": "*bf16", "f32": "*fp32"}[dtype] for name, dtype in types.items()}
    signature = dict.fromkeys((*arguments_of(group), *counts), "i32") | pointers
    return Kernel(
        f"{HEADER}{made.source}\n",
        made.name,
        {**signature, "slots_ptr": "*i64" if page else "*bf16"},
        {"PAGE": page},
        odd=counts,
        warps=int(warps[1]),
    )


def test_machine_code() -> None:
    """Rows are read and written by 16 bytes, into pages as into tensors."""
    kernels = [code_of(96, 64, 16), code_of(128, 128, 0)]
    found = compiled(kernels)
    for code, kernel in zip(found, (k for k in kernels for _ in (80, 90)), strict=True):
        code.check_in_registers(80)  # 72 by the ptxas of Triton 3.6
        assert not code.shared_bytes
        slots = code.count("LDG", "64") if kernel.constants["PAGE"] else 0
        assert code.count("LDG") - slots == code.count("LDG", "128") > 0
        assert code.count("STG") == code.count("STG", "128") > 0


# ------------------------------------------------------------------------------- any layer


class Layer:
    """A layer of attention alone, in both kinds of programs."""

    def __init__(self, random: st.DataObject) -> None:
        draw = random.draw
        self.kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 4)))
        self.heads = self.kv_heads * group
        self.size, self.value_size = (draw(st.sampled_from((16, 32, 80))) for _ in range(2))
        self.rotary = draw(st.sampled_from((8, self.size)))
        self.style = draw(st.sampled_from(("half", "interleaved")))
        self.norms = draw(st.sets(st.sampled_from(("q", "k", "v"))))
        self.keeps = draw(st.sets(st.sampled_from(("k", "v"))))
        self.window = draw(st.sampled_from((0, 5)))
        dtype = draw(st.sampled_from(("f32", "bf16", "f16")))
        self.tolerance = {"f32": 1e-5, "bf16": 2e-2, "f16": 3e-3}[dtype]
        self.types = {
            "q": tensor(dtype, TOKENS, self.heads, self.size),
            "k": tensor(dtype, TOKENS, self.kv_heads, self.size),
            "v": tensor(dtype, TOKENS, self.kv_heads, self.value_size),
            "cos": tensor("f32", TOKENS, self.rotary),
            "sin": tensor("f32", TOKENS, self.rotary),
        }
        self.weights = SimpleNamespace()
        graph = self._graph()
        self.run, self.reference = (
            load_functions(
                emit_module("A layer", "", [Function(emitted, "layer", "")], backend),
                "layer",
            )["layer"]
            for backend, emitted in (("triton", lowered(graph)), ("torch", graph))
        )

    def _graph(self) -> Graph:
        builder = Builder("layer")
        made = {name: builder.input(name, type_) for name, type_ in self.types.items()}
        for name in ("q", "k", "v"):
            if name in self.norms:
                weight = Value(f"{name}_norm", tensor("f32", self.types[name].features[-1]))
                builder.parameter(Parameter(weight, "frozen", weight.name))
                setattr(self.weights, weight.name, torch.rand(weight.type.features) + 0.5)
                options = {"eps": 1e-5, "offset": 0.0, "round_first": True}
                made[name] = builder.add("rms_norm", [made[name], weight.name], **options)
        angles = [made["cos"], made["sin"]]
        rotation = {"rotary_dim": self.rotary, "style": self.style}
        for name in ("q", "k"):
            made[name] = builder.add("rope", [made[name], *angles], **rotation)
        out, _ = builder.add_many(
            "attention", [made["q"], made["k"], made["v"]],
            scale=0.2, window=self.window, softcap=0.0,
        )  # fmt: skip
        return builder.build([out, *(made[name] for name in sorted(self.keeps))])

    def inputs(self, tokens: int) -> list[Tensor]:
        """Random ones, each a part of longer rows, as of a joined product."""
        made = []
        for type_ in self.types.values():
            size = prod(type_.features)
            rows = torch.randn(tokens, 2 * size).to(getattr(torch, TORCH_NAMES[type_.dtype]))
            made.append(rows[:, size:].view(tokens, *type_.features))
        return made

    def check(self, found: Any, expected: Any) -> None:
        pairs = [x if isinstance(x, tuple) else (x,) for x in (found, expected)]
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=self.tolerance, atol=self.tolerance)


@given(st.data())
@settings(max_examples=8)
def test_any_layer(random: st.DataObject) -> None:
    layer = Layer(random)
    lengths = random.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    tokens = sum(lengths)
    torch.manual_seed(tokens)
    inputs = layer.inputs(tokens)
    layout = random.draw(st.sampled_from(("pages", "rows", "none")))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    if layout == "none":
        batch = whole_sequences([[3] * length for length in lengths], CPU)
        with sanitized():
            found = layer.run(layer.weights, None, batch, *inputs)
        layer.check(found, layer.reference(layer.weights, None, batch, *inputs))
        return
    types = [(layer.types["k"], layer.types["v"])] * 2
    ours, theirs = (KvCache(types, 12, CPU, in_pages=i) for i in (layout == "pages", False))
    tables = tables_of(ours, lengths)
    spans = [Span(*place, 0, table) for *place, table in zip(starts, lengths, tables, strict=True)]
    ids = torch.zeros(tokens, dtype=torch.long)
    batches = [Batch(ids, spans, cache) for cache in (ours, theirs)]
    for cache, batch in zip((ours, theirs), batches, strict=True):
        batch.layer = 1
        for x in (*cache.keys, *cache.values):
            x.fill_(7.0)
    expected = layer.reference(layer.weights, None, batches[1], *inputs)
    dropped = random.draw(st.sets(st.integers(0, tokens - 1)))
    rows = batches[0].rows
    assert rows is not None
    for x in (theirs.keys[1], theirs.values[1]):  # no one's tokens have no row
        x[:, rows[sorted(dropped)]] = 7.0
    rows[sorted(dropped)] = -1
    with sanitized():
        found = layer.run(layer.weights, None, batches[0], *inputs)
    if not dropped:
        layer.check(found, expected)
    for i in range(2):  # the other layer's as they were
        for cached, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            layer.check(rows_of(cached[i]), rows_of(other[i]))
