"""Lossy activations: bounds of operators, gradients within them, and bytes as planned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.explain import explain as explaining
from pcg.ir.operators import OPERATORS, operator
from pcg.passes.registry import run_text
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import compiled as programs
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.measured_memory import measured
from tests.support.operator_cases import NAMESPACE, AdapterWeight, OneStep

bf16.install()

# ---------------------------------------------------------------------------- bounds of operators

Bound = Callable[..., Tensor]
ROWS = OneStep.tokens


def _standardized_bound(dy: Tensor, x: Tensor, rstd: Tensor, w: Tensor, *, e: Tensor) -> Tensor:
    g = dy * w
    mean = (g * x).mean(-1, keepdim=True).abs()
    most = (g.abs() * e).mean(-1, keepdim=True)
    return rstd.unsqueeze(-1) * (e * mean + (x.abs() + e) * most)


BOUNDS: dict[tuple[str, int], Bound] = {
    ("cast", 0): lambda x, *, e: e,
    ("dropout", 0): lambda x, *, e: e / (1 - 0.25),
    ("gelu", 0): lambda x, *, e: 1.13 * e,
    ("gelu_backward", 1): lambda dy, x, *, e: 0.8 * dy.abs() * e,
    ("inner", 1): lambda dz, y, *, e: (dz.abs() * e).sum(0),
    ("mul", 0): lambda x, y, *, e: y.abs() * e,
    ("mul", 1): lambda x, y, *, e: x.abs() * e,
    ("neg", 0): lambda x, *, e: e,
    ("outer", 1): lambda ds, x, *, e: ds.abs().T @ e,
    ("relu", 0): lambda x, *, e: e,
    ("scaled_outer", 1): lambda dz, s, b, *, e: b.scale * (dz.abs().T @ e),
    ("sigmoid", 0): lambda x, *, e: e / 4,
    ("sigmoid_backward", 1): lambda dy, y, *, e: dy.abs() * e,
    ("silu", 0): lambda x, *, e: 1.1 * e,
    ("silu_backward", 1): lambda dy, x, *, e: dy.abs() * e / 2,
    ("standardized_backward", 1): _standardized_bound,
    ("tanh", 0): lambda x, *, e: e,
    ("tanh_backward", 1): lambda dy, y, *, e: 2 * dy.abs() * e,
}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "cast": {"dtype": "f64"},
    "dropout": {"key": 3, "p": 0.25},
    "inner": {"dtype": "f64"},
    "standardized_backward": {"centered": True, "offset": 0.0},
}


def test_every_bound_is_checked() -> None:
    stated = {
        (name, index)
        for name, entry in OPERATORS.items()
        if "bounded_in" in vars(type(entry))
        for index in entry.bounded_in
    }
    assert stated == set(BOUNDS)


def _operands(op: str, generator: torch.Generator) -> list[Any]:
    """An operator's inputs, [ROWS, 8] each but for weights."""

    def matrix() -> Tensor:
        size = torch.exp(2 * torch.randn(ROWS, 8, generator=generator, dtype=torch.float64))
        return size * torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)

    if op == "scaled_outer":
        return [matrix(), matrix(), AdapterWeight(matrix())]
    if op == "standardized_backward":
        x = torch.nn.functional.layer_norm(matrix(), (8,))
        return [matrix(), x, matrix().abs()[:, 0], matrix()[0]]
    if op in ("sigmoid_backward", "tanh_backward"):
        y = torch.sigmoid(matrix()) if op == "sigmoid_backward" else torch.tanh(matrix())
        return [matrix(), y]
    count = operator(op).inputs[0]
    return [matrix() for _ in range(2 if op == "mul" else count)]


@given(
    case=st.sampled_from(sorted(BOUNDS)),
    approximate=st.sampled_from(["none", "tanh"]),
    seed=st.integers(0, 2**20),
)
def test_errors_stay_within_the_bounds_of_operators(
    case: tuple[str, int], approximate: str, seed: int
) -> None:
    op, index = case
    generator = torch.Generator().manual_seed(seed)
    inputs = _operands(op, generator)
    attributes = {
        **ATTRIBUTES.get(op, {}),
        **({"approximate": approximate} if "gelu" in op else {}),
    }
    names = [f"x{i}" for i in range(len(inputs))]
    source = operator(op).source(names, attributes)

    def result() -> Tensor:
        found: Tensor = eval(source, {**NAMESPACE, **dict(zip(names, inputs, strict=True))})
        return found

    exact, x = result(), inputs[index]
    share = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
    inputs[index] = x + share * x.abs() / 16
    if op in ("sigmoid_backward", "tanh_backward"):  # e4m3 rounds 1 to 1
        inputs[index] = inputs[index].clamp(-1, 1)
    error = (inputs[index] - x).abs()
    approximated = result()
    inputs[index] = x
    bound = BOUNDS[case](*inputs, e=error)
    assert ((approximated - exact).abs() <= bound * (1 + 1e-9) + 1e-12 * exact.abs()).all()


@given(seed=st.integers(0, 2**20), index=st.sampled_from([1, 3, 4, 5]))
def test_errors_stay_within_the_bounds_of_attention(seed: int, index: int) -> None:
    """p dp of a token's keys, and p itself by queries and keys, against their definitions."""
    generator = torch.Generator().manual_seed(seed)

    def matrix() -> Tensor:
        return 2 * torch.randn(6, 32, generator=generator, dtype=torch.float64)

    dout, q, k, v = (matrix() for _ in range(4))
    scale = 32**-0.5
    hidden = torch.ones(6, 6).triu(1).bool()
    lse = (scale * q @ k.T).masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True)

    def weights(q: Tensor, k: Tensor) -> Tensor:
        return ((scale * q @ k.T).masked_fill(hidden, -torch.inf) - lse).exp()

    p = weights(q, k)
    out = p @ v

    def ds(out: Tensor, v: Tensor) -> Tensor:
        return p * (dout @ v.T - (dout * out).sum(-1, keepdim=True))

    x = {1: out, 3: q, 4: k, 5: v}[index]
    e = torch.rand(x.shape, generator=generator, dtype=torch.float64) * x.abs().amax() / 254
    off = x + e * torch.randn(x.shape, generator=generator, dtype=torch.float64).sign()
    if index == 1:
        error, bound = ds(off, v) - ds(out, v), p * (dout.abs() * e).sum(-1, keepdim=True)
    elif index == 5:
        error, bound = ds(out, off) - ds(out, v), p * (dout.abs() @ e.T)
    elif index == 3:
        error, bound = weights(off, k) - p, p * torch.expm1(scale * e @ k.abs().T)
    else:
        error, bound = weights(q, off) - p, p * torch.expm1(scale * q.abs() @ e.T)
    assert (error.abs() <= bound * (1 + 1e-9)).all()


# --------------------------------------------------------------------------- gradients of a model

SIZES = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
SLOW = ("gpt2", "falcon-40b")
BATCH, SEQ = 2, 12
IDS = torch.randint(2, 63, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
EXAMPLES = [Example(row, row) for row in IDS.tolist()]


def llama(dtype: torch.dtype) -> Any:
    config = transformers.LlamaConfig(**SIZES).to_dict()
    return oracle.random_model({**config, "model_type": "llama"}, dtype)


def adapted(model: Any, targets: Sequence[str], layers: list[int] | None = None) -> Any:
    """The model wrapped by peft, with an adapter that does something."""
    recipe = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(targets), layers_to_transform=layers,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    wrapped = peft.get_peft_model(copy.deepcopy(model), recipe).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in oracle.lora_parameters(wrapped).values():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def compiled(model: Any, wrapped: Any, **options: Any) -> Executor:
    """A program whose adapter is peft's."""
    recipe = wrapped.peft_config["default"]
    options |= {"batch": BATCH, "seq": SEQ}
    executor = programs.executor(model, {"a": recipe}, is_own=True, **options)
    parameters = executor.training_runner("a").parameters
    for name, theirs in oracle.lora_parameters(wrapped).items():
        parameters[name].data.copy_(theirs.data)
    return executor


def gradients(executor: Executor) -> dict[str, Tensor]:
    runner = executor.training_runner("a")
    runner.forward_backward(EXAMPLES, BATCH * (SEQ - 1))
    return {name: parameter.grad.double() for name, parameter in runner.parameters.items()}  # type: ignore[union-attr]


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {n: float((found[n] - x).norm() / x.norm()) for n, x in expected.items()}


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float64, "torch"),
        pytest.param(torch.bfloat16, "torch", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "triton", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_near_the_exact_ones(dtype: torch.dtype, backend: str) -> None:
    model = llama(dtype)
    wrapped = adapted(model, TARGETS)
    exact = gradients(compiled(model, wrapped, backend=backend))
    lossy = gradients(compiled(model, wrapped, backend=backend, lossy_activations="fp8"))
    off = errors(lossy, exact)
    assert max(off.values()) < 0.12
    assert max(off.values()) > 0.005  # something was rounded
    # Nothing lossy is between the loss and what the last layer adds.
    assert off["model.layers.1.mlp.down_proj.lora_B"] < 1e-6


@pytest.mark.parametrize("name", ["gemma2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_gradients_behind_norms_with_offsets(name: str) -> None:
    """Backward adds gradients by nodes of the same name as that which adds 1 to a norm's weight."""
    model = oracle.random_model(BY_NAME[name].config(2), torch.float64)
    wrapped = adapted(model, TARGETS)
    exact = gradients(compiled(model, wrapped))
    off = errors(gradients(compiled(model, wrapped, lossy_activations="fp8")), exact)
    assert 0.005 < max(off.values()) < 0.12


def code_error(x: Tensor) -> Tensor:
    """How far off a value's e4m3 code is at most, by its rows of 64 and of blocks of 128."""
    greatest = [part.abs().amax(-1, keepdim=True).expand_as(part) for part in x.split(128, -1)]
    return torch.maximum(x.abs() / 16, torch.cat(greatest, -1) / 2**17)


@pytest.mark.parametrize("layers", [None, [1]], ids=["every layer", "the last"])
def test_a_gradient_is_off_by_its_bound_at_most(layers: list[int] | None) -> None:
    """Of A, dsᵀ h: where h = silu(g) u is recomputed from g and u, and where it has codes."""
    model = llama(torch.float64)
    wrapped = adapted(model, ["down_proj"], layers)
    mlp = wrapped.base_model.model.model.layers[1].mlp
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Any, Any, Tensor], None]:
        return lambda module, given, out: kept.update({name: out.detach().flatten(0, 1)})

    mlp.gate_proj.register_forward_hook(keep("g"))
    mlp.up_proj.register_forward_hook(keep("u"))

    def keep_gradient(module: Any, given: Any, out: Tensor) -> None:
        out.register_hook(lambda ds: kept.update(ds=ds.flatten(0, 1)))

    mlp.down_proj.lora_A["default"].register_forward_hook(keep_gradient)
    wrapped(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    theirs = oracle.lora_parameters(wrapped)
    found = gradients(compiled(model, wrapped, lossy_activations="fp8"))
    name = "model.layers.1.mlp.down_proj.lora_A"
    error = (found[name] - theirs[name].grad).abs()
    g, u, ds = kept["g"], kept["u"], kept["ds"]
    silu, of_u = torch.nn.functional.silu(g), code_error(u)
    off = code_error(silu * u)
    if layers is None:
        off = silu.abs() * of_u + 1.1 * code_error(g) * (u.abs() + of_u)
    assert float(error.max()) > 1e-6
    assert bool((error <= ds.abs().T @ off * (1 + 1e-6) + 1e-9).all())


# -------------------------------------------------------------------------------- bytes and plans


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["llama3", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_a_family_keeps_what_is_predicted(name: str, backend: str) -> None:
    family = BY_NAME[name]
    recipe = LoraConfig(
        r=4, target_modules="all-linear", exclude_modules=tuple(family.excluded) or None
    )
    base = oracle.random_model(family.config(3), torch.bfloat16)
    options: dict[str, Any] = {"lossy_activations": "fp8"}
    executor = programs.executor(base, {"a": recipe}, backend=backend, **options)
    given = {"batch": 2, "seq": 16, "dtype": "bfloat16"}
    report = explaining.explain(base.config.to_dict(), recipe, **given, **options)
    saved = {stage.stage: stage.bytes for stage in report.activations}
    assert saved["fp8"] == measured(executor)
    assert saved["fp8"] < 0.8 * saved["compressed"]
    exact = explaining.explain(base.config.to_dict(), recipe, **given)
    assert saved["compressed"] == exact.stage("compressed").bytes  # type: ignore[union-attr]
    assert exact.stage("fp8") is None


def test_nothing_is_lossy_where_inputs_alone_are_saved() -> None:
    model = llama(torch.float32)
    wrapped = adapted(model, TARGETS)
    exact = gradients(compiled(model, wrapped, memory_budget=0))
    lossy = compiled(model, wrapped, memory_budget=0, lossy_activations="fp8")
    ops = {n.op for plan in lossy.program.training.plans for n in plan.backward.nodes}  # type: ignore[union-attr]
    assert not any("dequantize" in op for op in ops)
    assert max(errors(gradients(lossy), exact).values()) < 1e-5


def test_other_encodings_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="lossy_activations='fp4'; use 'fp8'"):
        explaining.explain("meta-llama/Llama-3.1-8B", lossy_activations="fp4")


MLP = """
graph @block_0(%x: bf16[T, 64]) {
  frozen %gate: bf16[128, 64] = "gate"
  adapter %a: f32[4, 128] = "a"
  %g: bf16[T, 128] = linear(%x, %gate)
  %silu: bf16[T, 128] = silu(%g)
  %s: f32[T, 4] = shrink(%silu, %a)
  return %s
}
"""


def test_backward_reads_codes() -> None:
    text = run_text(MLP, "differentiate{wrt=x},prune,quantize")
    forward, backward = text.split("graph @block_0_backward")
    lines = [line.strip() for line in forward.splitlines()]
    assert "%g_fp8: u8[T, 128], %g_fp8_scale: u8[T, 1] = quantize_fp8(%g)" in lines
    assert lines.index("%g_fp8: u8[T, 128], %g_fp8_scale: u8[T, 1] = quantize_fp8(%g)") == (
        lines.index("%g: bf16[T, 128] = linear(%x, %gate)") + 1
    )
    decoded = '%g_approximate: bf16[T, 128] = dequantize_fp8(%g_fp8, %g_fp8_scale) {dtype="bf16"}'
    assert decoded in lines
    assert "%silu_approximate: bf16[T, 128] = silu(%g_approximate)" in lines
    assert "= outer(%d_s, %silu_approximate)" in backward
    assert "%g_approximate)" in backward
