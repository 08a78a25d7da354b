"""Tracing: what a graph is named by and holds, and the options that change it."""

from __future__ import annotations

import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import TraceError
from pcg.ir.analysis.verifier import verify
from pcg.trace import TracedModel
from tests.support import oracle
from tests.support.families import BY_NAME, WINDOW
from tests.support.models import traced
from tests.support.parameters import mostly_slow

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 97, 9, 32]


@pytest.mark.parametrize("name", ["bloom", "gpt2", "llama3.2"])
def test_parameters_are_the_checkpoints(name: str) -> None:
    """Every frozen parameter has a name, a shape and a transposition that the checkpoint fits."""
    trace = traced(name, whole=True)
    verify(trace.graph)
    held = oracle.random_model(BY_NAME[name].config(3)).state_dict()
    frozen = [p for p in trace.graph.parameters if p.role == "frozen"]
    for parameter in frozen:
        shape = tuple(held[parameter.source].shape)
        expected = parameter.type.shape
        assert shape == (expected[::-1] if parameter.transposed else expected)
    assert {p.source for p in frozen} <= held.keys()
    constants = {p.name: p.type.shape for p in trace.graph.parameters if p.role == "constant"}
    assert {name: tuple(value.shape) for name, value in trace.constants.items()} == constants


def test_a_tied_head_is_one_parameter() -> None:
    tied, untied = traced("llama3.2"), traced("llama3")
    sources = [{p.source for p in trace.graph.parameters} for trace in (tied, untied)]
    assert "lm_head.weight" in sources[1]
    assert "lm_head.weight" not in sources[0]


def test_tokens_are_the_only_symbol() -> None:
    for name in ("gemma3", "mpt"):
        graph = traced(name).graph
        assert [str(value.type) for value in graph.inputs] == ["i64[T]", "i64[T]"]
        sizes = {size for type_ in graph.types.values() for size in type_.shape}
        assert {str(size) for size in sizes if not isinstance(size, int)} == {"T"}


def attributes_of_attention(trace: TracedModel) -> list[dict[str, object]]:
    return [dict(node.attributes) for node in trace.graph.nodes if node.op == "attention"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bloom", {"scale": 0.25, "alibi": True}),
        ("gemma2", {"scale": 20**-0.5, "softcap": 50.0, "window": WINDOW}),
        ("granite", {"scale": 0.3}),
        ("mistral-window", {"scale": 0.25, "window": WINDOW}),
        ("opt", {"scale": 1.0}),
    ],
)
def test_what_attention_is_told(name: str, expected: dict[str, object]) -> None:
    found = attributes_of_attention(traced(name))[0]
    scale = pytest.approx(expected["scale"])
    assert found == {"window": 0, "softcap": 0.0, **expected, "scale": scale}


def test_scores_scaled_by_layer_differ() -> None:
    scales = [a["scale"] for a in attributes_of_attention(traced("gpt2-scaled_by_layer"))]
    assert scales == pytest.approx([0.25, 0.125, 0.25 / 3])


def test_falcons_slopes_are_rounded_in_bf16_alone() -> None:
    """Falcon makes its bias in bf16 in every dtype: in fp32 it is another one than ALiBi's."""
    fields = {"alibi": True, "hidden_size": 128, "num_attention_heads": 16}
    falcon = BY_NAME["falcon-7b"].config(2, **fields)
    with pytest.raises(TraceError, match="its bias is rounded to"):
        compiler.trace(falcon)
    (slopes,) = compiler.trace(falcon, "bfloat16").constants.values()
    # Falcon scales its slopes as it scales its scores, and adds them once.
    exact = 2.0 ** (-torch.arange(1, 17) / 2) * 8**-0.5
    torch.testing.assert_close(slopes, exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", mostly_slow(["bloom", "gpt2", "gptj", "mpt"], "gptj", "mpt"))
@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float16"], "bfloat16"))
def test_own_attention_in_half_precision(name: str, dtype: str) -> None:
    """GPT-J and MPT compute their scores in fp32, with a bias in the dtype of their weights."""
    found, expected = (
        attributes_of_attention(compiler.trace(BY_NAME[name].config(2), d)) for d in (dtype, None)
    )
    assert found == expected


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    },
    "by its old name": {"type": "linear", "factor": 2.0},
}
ACTIVATIONS = ("gelu", "gelu_python", "quick_gelu", "relu", "relu2", "silu", "tanh")
OPTIONS = [
    *(pytest.param("llama3", {"rope_scaling": ROPES[name]}, id=f"rope {name}") for name in ROPES),
    *(
        pytest.param("gpt2", {"activation_function": n}, id=n, marks=pytest.mark.slow)
        for n in ACTIVATIONS
    ),
    pytest.param("gpt2", {"activation_function": "gelu_fast"}, id="gelu_fast"),
    pytest.param(
        "gpt2", {"tie_word_embeddings": False, "reorder_and_upcast_attn": True}, id="untied, upcast"
    ),
    pytest.param("opt", {"enable_bias": False}, id="without biases"),
    pytest.param("gpt_neox", {"rotary_pct": 1.0}, id="whole rotary", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "changes"), OPTIONS)
def test_options_that_change_the_graph(name: str, changes: dict[str, object]) -> None:
    model = oracle.random_model(BY_NAME[name].config(2, **changes))
    executor = compiler.compile(model)
    expected = oracle.logits(model, PROMPT)
    assert oracle.relative_error(executor.logits(PROMPT), expected) < 1e-5


OTHERS = {
    "codegen": {"model_type": "codegen", "n_layer": 2, "rotary_dim": 8, **BY_NAME["gpt2"].fields},
    "cohere2": {**BY_NAME["cohere"].config(2), "model_type": "cohere2", "sliding_window": WINDOW},
    "glm": {**BY_NAME["llama3"].config(2), "model_type": "glm", "head_dim": 16},
    "glm4": {**BY_NAME["llama3"].config(2), "model_type": "glm4", "head_dim": 16},
    "nemotron": {**BY_NAME["llama3"].config(2), "model_type": "nemotron"},
    "olmo": {**BY_NAME["llama3"].config(2), "model_type": "olmo"},
    "olmo3": {**BY_NAME["llama3"].config(2), "model_type": "olmo3", "sliding_window": WINDOW},
    "phi": {**BY_NAME["llama3"].config(2), "model_type": "phi"},
    "smollm3": {**BY_NAME["llama3"].config(2), "model_type": "smollm3"},
}
"""Architectures that nothing in pcg names."""


@pytest.mark.parametrize("name", mostly_slow(OTHERS, "codegen", "glm4", "olmo3"))
def test_architectures_that_nobody_named(name: str) -> None:
    model = oracle.random_model(OTHERS[name])
    executor = compiler.compile(model)
    expected = oracle.logits(model, PROMPT)
    assert oracle.relative_error(executor.logits(PROMPT), expected) < 1e-5


def test_two_traces_are_equal() -> None:
    """No ids, addresses or times get into a graph."""
    once, again = (compiler.trace(BY_NAME["qwen3"].config(2)) for _ in range(2))
    assert str(once.graph) == str(again.graph)
    fields = ("layers_path", "schedule", "base_prefix", "dtype")
    assert [getattr(once, f) for f in fields] == [getattr(again, f) for f in fields]
