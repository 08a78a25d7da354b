"""Raising: small graphs as text, and every family's block down to its model operators.

Long because its expectations are graphs written out as text.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.operators import operator
from pcg.ir.parser import parse_graph
from pcg.passes.graphs.raise_operators import raise_graph
from pcg.passes.registry import run_text
from pcg.runtime.model.batch import whole_sequences
from tests.support.evaluate import evaluate, random_values
from tests.support.families import FAMILIES
from tests.support.models import folded, raised
from tests.support.parameters import mostly_slow

TOKENS = 6
TOLERANCES = {"f64": 1e-12, "f32": 1e-5, "bf16": 3e-2}


def check(before: str, after: str) -> None:
    """The pass turns one text into the other, and the two compute the same."""
    found = run_text(before, "raise")
    assert found == run_text(after, None)
    assert_same_function(parse_graph(before), parse_graph(found))


def assert_same_function(old: Graph, new: Graph, seed: int = 0) -> None:
    values = random_values(old, TOKENS, seed)
    names = {value.name: fresh.name for value, fresh in zip(old.inputs, new.inputs, strict=True)}
    renamed = {names.get(name, name): value for name, value in values.items()}
    batch = whole_sequences([[0] * 4, [0] * (TOKENS - 4)], torch.device("cpu"))
    for one, other in zip(evaluate(old, values, batch), evaluate(new, renamed, batch), strict=True):
        short = str(one.dtype).removeprefix("torch.")
        tolerance = TOLERANCES[{"float64": "f64", "float32": "f32"}.get(short, "bf16")]
        assert other.dtype == one.dtype
        error = (other.double() - one.double()).abs().max() / one.double().abs().max()
        assert error < tolerance


# ------------------------------------------------------------------------------------------ norms

LLAMA_NORM = """
graph @norm(%x: bf16[T, 8]) {
  frozen %w: bf16[8] = "w"
  %cast: f32[T, 8] = cast(%x) {dtype="f32"}
  %pow: f32[T, 8] = pow(%cast) {exponent=2.0}
  %mean: f32[T, 1] = mean(%pow) {dim=-1, keepdim=True}
  %add: f32[T, 1] = add(%mean) {scalar=1e-06}
  %rsqrt: f32[T, 1] = rsqrt(%add)
  %mul: f32[T, 8] = mul(%cast, %rsqrt)
  %cast_1: bf16[T, 8] = cast(%mul) {dtype="bf16"}
  %mul_1: bf16[T, 8] = mul(%w, %cast_1)
  return %mul_1
}
"""

GEMMA_NORM = """
graph @norm(%x: bf16[T, 8]) {
  frozen %w: bf16[8] = "w"
  %cast: f32[T, 8] = cast(%x) {dtype="f32"}
  %pow: f32[T, 8] = pow(%cast) {exponent=2.0}
  %mean: f32[T, 1] = mean(%pow) {dim=-1, keepdim=True}
  %add: f32[T, 1] = add(%mean) {scalar=1e-06}
  %rsqrt: f32[T, 1] = rsqrt(%add)
  %mul: f32[T, 8] = mul(%cast, %rsqrt)
  %cast_1: f32[8] = cast(%w) {dtype="f32"}
  %add_1: f32[8] = add(%cast_1) {scalar=1.0}
  %mul_1: f32[T, 8] = mul(%mul, %add_1)
  %cast_2: bf16[T, 8] = cast(%mul_1) {dtype="bf16"}
  return %cast_2
}
"""


def rms_norm(offset: float, round_first: bool) -> str:
    return f"""
graph @norm(%x: bf16[T, 8]) {{
  frozen %w: bf16[8] = "w"
  %rms_norm: bf16[T, 8] = rms_norm(%x, %w) {{eps=1e-06, offset={offset}, round_first={round_first}}}
  return %rms_norm
}}
"""


@pytest.mark.parametrize(
    ("before", "offset", "round_first"),
    [(LLAMA_NORM, 0.0, True), (GEMMA_NORM, 1.0, False)],
    ids=["llama", "gemma"],
)
def test_rms_norm_keeps_its_rounding_order(before: str, offset: float, round_first: bool) -> None:
    check(before, rms_norm(offset, round_first))


LAYER_NORM = """
graph @norm(%x: bf16[T, 2, 8]) {
  frozen %w: bf16[2, 8] = "w"
  %cast: f32[T, 2, 8] = cast(%x) {dtype="f32"}
  %mean: f32[T, 2, 1] = mean(%cast) {dim=-1, keepdim=True}
  %sub: f32[T, 2, 8] = sub(%cast, %mean)
  %pow: f32[T, 2, 8] = pow(%sub) {exponent=2.0}
  %mean_1: f32[T, 2, 1] = mean(%pow) {dim=-1, keepdim=True}
  %add: f32[T, 2, 1] = add(%mean_1) {scalar=1e-05}
  %rsqrt: f32[T, 2, 1] = rsqrt(%add)
  %mul: f32[T, 2, 8] = mul(%sub, %rsqrt)
  %cast_1: f32[2, 8] = cast(%w) {dtype="f32"}
  %mul_1: f32[T, 2, 8] = mul(%cast_1, %mul)
  %cast_2: bf16[T, 2, 8] = cast(%mul_1) {dtype="bf16"}
  return %cast_2
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("exponent=2.0", "exponent=3.0"),
        ("rsqrt(%add)", "sqrt(%add)"),
        ("pow(%sub)", "pow(%cast)"),
        ("mean(%cast) {dim=-1", "mean(%cast) {dim=-1"),
    ],
)
def test_what_is_no_norm_stays(old: str, new: str) -> None:
    graph = parse_graph(LAYER_NORM.replace(old, new))
    is_norm = [node.op for node in raise_graph(graph).nodes] == ["layer_norm"]
    assert is_norm == (old == new)


# ------------------------------------------------------------------------------------------- rope

ROPE_HALF = """
graph @rope(%x: f32[T, 2, 8], %y: f32[T, 2, 8], %cos: f32[T, 8], %sin: f32[T, 8]) {
  %reshape: f32[T, 1, 8] = reshape(%cos) {shape=(-1, 1, 8)}
  %reshape_1: f32[T, 1, 8] = reshape(%sin) {shape=(-1, 1, 8)}
  %mul: f32[T, 2, 8] = mul(%x, %reshape)
  %slice: f32[T, 2, 4] = slice(%x) {dim=-1, start=0, stop=4}
  %slice_1: f32[T, 2, 4] = slice(%x) {dim=-1, start=4, stop=8}
  %neg: f32[T, 2, 4] = neg(%slice_1)
  %concat: f32[T, 2, 8] = concat(%neg, %slice) {dim=-1}
  %mul_1: f32[T, 2, 8] = mul(%concat, %reshape_1)
  %add: f32[T, 2, 8] = add(%mul, %mul_1)
  return %add
}
"""


def test_rope_over_halves() -> None:
    check(
        ROPE_HALF,
        """
graph @rope(%x: f32[T, 2, 8], %y: f32[T, 2, 8], %cos: f32[T, 8], %sin: f32[T, 8]) {
  %rope: f32[T, 2, 8] = rope(%x, %cos, %sin) {rotary_dim=8, style="half"}
  return %rope
}
""",
    )


def test_rope_in_wider_tables_that_is_rounded_back() -> None:
    """OLMo-2 turns bf16 heads by fp32 tables."""
    before = ROPE_HALF.replace("%x: f32[T, 2, 8]", "%x: bf16[T, 2, 8]")
    for value in ("slice", "slice_1", "neg", "concat"):
        before = before.replace(f"%{value}: f32", f"%{value}: bf16")
    rounded = before.replace(
        "  return %add", '  %cast: bf16[T, 2, 8] = cast(%add) {dtype="bf16"}\n  return %cast'
    )
    check(
        rounded,
        """
graph @rope(%x: bf16[T, 2, 8], %y: f32[T, 2, 8], %cos: f32[T, 8], %sin: f32[T, 8]) {
  %rope: bf16[T, 2, 8] = rope(%x, %cos, %sin) {rotary_dim=8, style="half"}
  return %rope
}
""",
    )
    # Where fp32 is what comes out, a bf16 rope would round what the model does not.
    assert "rope" not in {node.op for node in raise_graph(parse_graph(before)).nodes}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("concat(%neg, %slice)", "concat(%slice, %neg)"),
        ("neg(%slice_1)", "neg(%slice)"),
        ("mul(%x, %reshape)", "mul(%y, %reshape)"),
        (
            "stop=4}\n  %slice_1: f32[T, 2, 4] = slice(%x)",
            "stop=4}\n  %slice_1: f32[T, 2, 4] = slice(%y)",
        ),
    ],
)
def test_what_is_no_rotation_stays(old: str, new: str) -> None:
    graph = parse_graph(ROPE_HALF.replace(old, new))
    verify(graph)
    assert "rope" not in {node.op for node in raise_graph(graph).nodes}


# ------------------------------------------------------------------------------------ activations

NEW_GELU = """
graph @act(%x: f32[T, 8]) {
  %mul: f32[T, 8] = mul(%x) {scalar=0.5}
  %pow: f32[T, 8] = pow(%x) {exponent=3.0}
  %mul_1: f32[T, 8] = mul(%pow) {scalar=0.044715}
  %add: f32[T, 8] = add(%x, %mul_1)
  %mul_2: f32[T, 8] = mul(%add) {scalar=0.7978845608028654}
  %tanh: f32[T, 8] = tanh(%mul_2)
  %add_1: f32[T, 8] = add(%tanh) {scalar=1.0}
  %mul_3: f32[T, 8] = mul(%mul, %add_1)
  return %mul_3
}
"""

BLOOM_GELU = """
graph @act(%x: f32[T, 8]) {
  %mul: f32[T, 8] = mul(%x) {scalar=0.5}
  %mul_1: f32[T, 8] = mul(%x) {scalar=0.79788456}
  %mul_2: f32[T, 8] = mul(%x) {scalar=0.044715}
  %mul_3: f32[T, 8] = mul(%mul_2, %x)
  %add: f32[T, 8] = add(%mul_3) {scalar=1}
  %mul_4: f32[T, 8] = mul(%mul_1, %add)
  %tanh: f32[T, 8] = tanh(%mul_4)
  %add_1: f32[T, 8] = add(%tanh) {scalar=1.0}
  %mul_5: f32[T, 8] = mul(%mul, %add_1)
  return %mul_5
}
"""


SWISH = """
graph @act(%x: f32[T, 8]) {
  %sigmoid: f32[T, 8] = sigmoid(%x)
  %mul: f32[T, 8] = mul(%x, %sigmoid)
  return %mul
}
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NEW_GELU, '%gelu: f32[T, 8] = gelu(%x) {approximate="tanh"}'),
        (BLOOM_GELU, '%gelu: f32[T, 8] = gelu(%x) {approximate="tanh"}'),
        (SWISH, "%silu: f32[T, 8] = silu(%x)"),
    ],
    ids=["gpt2", "bloom", "swish"],
)
def test_activations_by_their_values(before: str, after: str) -> None:
    name = after.split(":")[0]
    check(before, f"graph @act(%x: f32[T, 8]) {{ {after} return {name} }}")


@pytest.mark.parametrize(
    ("before", "old", "new"),
    [(NEW_GELU, "0.044715", "0.0447"), (SWISH, "sigmoid(%x)", "tanh(%x)")],
)
def test_an_activation_of_other_values_stays(before: str, old: str, new: str) -> None:
    changed = parse_graph(before.replace(old, new))
    assert [n.op for n in raise_graph(changed).nodes] == [n.op for n in changed.nodes]


def test_blooms_gelu_is_its_own_in_fp64() -> None:
    """Its √(2/π) has eight digits, and so has its gelu."""
    text = BLOOM_GELU.replace("f32", "f64")
    check(text, text)
    check(
        NEW_GELU.replace("f32", "f64"),
        """
graph @act(%x: f64[T, 8]) { %gelu: f64[T, 8] = gelu(%x) {approximate="tanh"} return %gelu }
""",
    )


# --------------------------------------------------------------------------------------- products


def test_a_product_that_is_read_without_its_bias_keeps_it_apart() -> None:
    graph = parse_graph(
        """
graph @mlp(%x: f32[T, 4]) {
  frozen %w: f32[6, 4] = "w"
  frozen %b: f32[6] = "b"
  %linear: f32[T, 6] = linear(%x, %w)
  %add: f32[T, 6] = add(%linear, %b)
  %mul: f32[T, 6] = mul(%linear, %add)
  return %mul
}
"""
    )
    assert [node.op for node in raise_graph(graph).nodes] == ["linear", "add", "mul"]


@given(st.lists(st.sampled_from([LLAMA_NORM, GEMMA_NORM]), min_size=1, max_size=3))
def test_raising_twice_changes_nothing(texts: list[str]) -> None:
    for text in texts:
        once = raise_graph(parse_graph(text))
        assert raise_graph(once) == once


# --------------------------------------------------------------------------------------- families

LLAMA = "2 rms_norm, 7 linear, 2 rope, attention, silu, mul, 2 add"
LAYER_NORM_ROPE = "2 layer_norm, 4 linear, 2 rope, attention, gelu, 2 add"
GPT = "2 layer_norm, 4 linear, attention, gelu, 2 add"
FALCON = "layer_norm, 4 linear, 2 rope, attention, gelu, 2 add"
COHERE = "layer_norm, 7 linear, 2 rope, attention, silu, mul, 2 add"
MIXTURE = (
    "2 rms_norm, 5 linear, 2 rope, attention, softmax, topk, 2 expert_linear, 2 slice, silu, "
    "2 mul, sum, 2 add"
)

BLOCKS = {
    "bloom": GPT,
    "bloom-post_residual": GPT,
    "cohere": COHERE,
    "cohere-qk_norm": COHERE.replace("layer_norm", "3 layer_norm"),
    "falcon-40b": FALCON.replace("layer_norm", "2 layer_norm"),
    "falcon-7b": FALCON,
    "falcon-mha": FALCON,
    "falcon-serial": LAYER_NORM_ROPE,
    "gemma2": "4 rms_norm, 7 linear, 2 rope, attention, gelu, mul, 2 add",
    "gemma3": "6 rms_norm, 7 linear, 2 rope, attention, gelu, mul, 2 add",
    "gpt2": GPT,
    "gpt2-scaled_by_layer": GPT,
    "gpt_bigcode": GPT,
    "gpt_bigcode-mha": GPT,
    "gpt_neox": LAYER_NORM_ROPE,
    "gpt_neox-serial": LAYER_NORM_ROPE,
    "gptj": "layer_norm, 6 linear, 2 rope, attention, gelu, 2 add",
    "granite": LLAMA.replace("mul", "3 mul"),
    "llama-biases": LLAMA,
    "llama2": LLAMA,
    "llama3": LLAMA,
    "llama3.1": LLAMA,
    "llama3.2": LLAMA,
    "mistral": LLAMA,
    "mistral-window": LLAMA,
    "mixtral": MIXTURE.replace("sum", "div, 2 sum"),
    "mpt": GPT,
    "olmo2": LLAMA.replace("2 rms_norm", "4 rms_norm"),
    "opt": "2 layer_norm, 6 linear, mul, attention, relu, 2 add",
    "opt-post_norm": "2 layer_norm, 6 linear, mul, attention, relu, 2 add",
    "opt-projected": "2 layer_norm, 6 linear, mul, attention, relu, 2 add",
    "phi": FALCON.replace("4 linear", "6 linear"),
    "phi3": LLAMA.replace("7 linear", "4 linear"),
    "phi3-partial": LLAMA.replace("7 linear", "4 linear"),
    "qwen2": LLAMA,
    "qwen2.5-layer_types": LLAMA,
    "qwen2.5-windows": LLAMA,
    "qwen3": LLAMA.replace("2 rms_norm", "4 rms_norm"),
    "qwen3_moe": MIXTURE.replace("2 rms_norm", "4 rms_norm"),
    "stablelm": LLAMA.replace("rms_norm", "layer_norm"),
    "stablelm-parallel": COHERE,
    # One norm for each of 4 heads and of 2 KV heads, between a split and a concat of heads.
    "stablelm-qk_norm": LLAMA.replace("2 rms_norm", "8 layer_norm, 2 concat"),
    "starcoder2": "2 layer_norm, 6 linear, 2 rope, attention, gelu, 2 add",
}
"""The operators of each family's block, views apart."""

EPILOGUES = {
    "cohere": "layer_norm, linear, mul",
    "gemma2": "rms_norm, linear, div, tanh, mul",
    "granite": "rms_norm, linear, div",
    "opt-post_norm": "linear",
    "opt-projected": "layer_norm, 2 linear",
}
"""Where it is not one norm and the head: multipliers, a soft cap, a projection."""

IN_BF16 = {
    "cohere": "4 cast",
    "cohere-qk_norm": "4 cast",
    "mixtral": "cast",
    "qwen3_moe": "2 cast",
}
"""Cohere turns its heads in fp32: two casts there, two back. Routers choose experts in fp32."""


def counted(text: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for item in filter(None, text.split(", ")):
        *count, op = item.split()
        counts[op] += int(count[0]) if count else 1
    return counts


def operators(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes if not operator(node.op).is_view)


CASES = mostly_slow(
    itertools.product(map(str, FAMILIES), ("float32", "bfloat16")),
    *((name, "float32") for name in (
        "bloom", "falcon-40b", "gpt_neox-serial", "llama3", "mpt", "opt", "qwen2.5-windows",
        "stablelm-parallel",
    )),
    ("qwen3", "bfloat16"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_blocks_are_model_operators_and_compute_the_same(name: str, dtype: str) -> None:
    model = raised(name, dtype)
    extra = counted(IN_BF16.get(name, "") if dtype == "bfloat16" else "")
    for block in model.blocks:
        assert operators(block) == counted(BLOCKS[name]) + extra
    norm = "rms_norm" if "rms_norm" in BLOCKS[name] else "layer_norm"
    default = EPILOGUES.get(name.split("-")[0], f"{norm}, linear")
    assert operators(model.epilogue) == counted(EPILOGUES.get(name, default))
    for old, new in zip(folded(name, dtype).graphs, model.graphs, strict=True):
        assert_same_function(old, new)
