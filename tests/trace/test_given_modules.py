"""A module that was modified compiles to its own logits and gradients, or is refused by name."""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import pcg.compiler as compiler
from pcg.errors import PcgError
from pcg.runtime.data.example import Example
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow
from tests.support.prompts import prompts

LAYERS = 4
Change = Callable[[Any], Any]
slow = pytest.mark.slow


def modified(family: str, change: Change, dtype: torch.dtype = torch.float32) -> Any:
    model = oracle.random_model(BY_NAME[family].config(LAYERS))
    torch.manual_seed(0)
    change(model)
    return model.to(dtype).eval()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def behind(module: Any, change: Callable[..., Any]) -> None:
    """Change a module's result by a function of the result and of the first argument."""
    takes_both = len(inspect.signature(change).parameters) == 2
    module.register_forward_hook(lambda _, x, out: change(out, x[0]) if takes_both else change(out))


def before(module: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    module.register_forward_pre_hook(lambda _, a, k: (a, {**k, **change(k)}), with_kwargs=True)


def around(module: Any, change: Callable[..., Any]) -> None:
    """Replace a module's forward by a function of itself and of its arguments."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    module.forward = forward


# ------------------------------------------------------------------------------- what is compiled


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return self.by * torch.tanh(x)


class Gated(nn.Module):
    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.gate = nn.Parameter(torch.linspace(0.1, 2.0, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gate


def with_bias(linear: nn.Linear) -> nn.Linear:
    new = nn.Linear(linear.in_features, linear.out_features)
    new.weight = linear.weight
    new.bias.data.copy_(0.1 * torch.randn(linear.out_features))
    return new


def perturbed(norm: Any) -> Any:
    for parameter in norm.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return norm


def activations(model: Any) -> None:
    shared = nn.Mish()
    for i, layer in enumerate(model.model.layers):
        layer.mlp.act_fn = (shared, Scaled(0.5), Scaled(1.5), shared)[i]


def calls_of_linears(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        once = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return once + self.down_proj(torch.relu(self.up_proj(2.0 * x))) / (self.index + 1)

    for i, layer in enumerate(model.model.layers):
        layer.mlp.index = i
        layer.mlp.forward = types.MethodType(forward, layer.mlp)


def hooks(model: Any) -> None:
    vector = torch.linspace(-1, 1, model.config.hidden_size)
    behind(model.model.embed_tokens, lambda out: out * 3.0)
    behind(model.model.layers[0], lambda out: out.clamp(-2, 2) + vector)
    model.model.layers[2].mlp.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
    around(model.model.layers[3].mlp, lambda original, x: 0.5 * original(x))
    behind(model.lm_head, lambda out: 3.0 * torch.tanh(torch.cat([out, out[..., :8]], -1) / 3.0))
    around(model, _shifted_logits)


def _shifted_logits(original: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(*args, **kwargs)
    out.logits = out.logits * 1.5 - 1.0
    return out


def hook_that_keeps_what_it_sees(model: Any) -> None:
    seen: dict[str, Tensor] = {}

    def scale(module: Any, given: Any, out: Tensor) -> Tensor:
        seen["given"], seen["out"] = given[0], out
        return seen["out"] * 1.25

    model.transformer.h[1].mlp.register_forward_hook(scale)


def functions_of_tensors(model: Any) -> None:
    bound = torch.linspace(-0.5, 0.5, model.config.hidden_size)

    def bounded(out: Tensor, given: Tensor) -> Tensor:
        out = torch.maximum(out, bound) + torch.minimum(out, given)
        out = torch.clamp(out, min=bound - 1, max=3 + given.abs())
        out = out + (2 + bound).pow(torch.sigmoid(out))
        return torch.where(out > 0.1, out, 0.3 * given).masked_fill(out < -2, -2.0)

    def of_rows(out: Tensor) -> Tensor:
        scaled = functional.normalize(out, dim=-1) + out.amax(-1, keepdim=True)
        return scaled - out.flip(-1).std(-1, keepdim=True) + functional.log_softmax(out, -1) / 9

    def leaky(_: Any, given: Any) -> Any:
        return torch.where(given[0] > 0, given[0], 0.3 * given[0]), *given[1:]

    behind(model.model.layers[0].mlp, lambda out: out + out.argmax(-1)[..., None])
    behind(model.model.layers[1].mlp, bounded)
    behind(model.model.layers[2].mlp, of_rows)
    model.model.layers[2].register_forward_pre_hook(leaky)


def functions_of_the_position(model: Any) -> None:
    def scaled(out: Tensor) -> Tensor:
        places = torch.arange(out.shape[1], dtype=out.dtype)
        return out / (1 + places // 4)[:, None] + torch.arange(3).sum()

    behind(model.model.decoder.layers[1].self_attn_layer_norm, scaled)
    for layer in model.model.decoder.layers:
        layer.fc1.bias = None


def positions_of_kinds(model: Any) -> None:
    """Positions of text beside those of an image, of which all read the first."""

    def stacked(original: Any, **kwargs: Any) -> Any:
        places = kwargs.get("position_ids")
        if places is None:
            places = torch.arange(kwargs["input_ids"].shape[1])[None]
        return original(**{**kwargs, "position_ids": places[None].expand(4, 1, -1)[0]})

    around(model.model, stacked)
    behind(model.model.layers[1].mlp, lambda out: 0.5 * out)


def writes_in_place(model: Any) -> None:
    def entries(out: Tensor) -> Tensor:
        out[..., 3] = 0.25
        out[..., 5:9].mul_(2.0)
        out[..., -4:] += out[..., :4]
        out[..., 1:12:3] = out[..., 12:16]
        out[..., -1::4] *= 3
        return out

    def view(out: Tensor) -> Tensor:
        flat = out.view(-1, out.shape[-1])
        out.mul_(0.5)
        return flat.view(out.shape) + 0.0

    mlps = [layer.mlp for layer in model.model.layers]
    mlps[0].act_fn = nn.ReLU6(inplace=True)
    behind(mlps[0], view)
    mlps[1].register_forward_pre_hook(lambda _, given: (given[0].clamp_(-0.5, 0.5), None)[1])
    behind(mlps[1], entries)
    behind(mlps[2], lambda out: (out.mul_(0.5).add_(0.1).tanh_(), None)[1])


def norms(model: Any) -> None:
    def one_plus(self: Any, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * (x * scale)

    layers, width = model.model.layers, model.config.hidden_size
    layers[0].input_layernorm = perturbed(nn.LayerNorm(width))
    layers[1].input_layernorm.forward = types.MethodType(one_plus, layers[1].input_layernorm)
    layers[2].input_layernorm = layers[3].input_layernorm
    layers[3].post_attention_layernorm.variance_epsilon = 0.3
    model.model.norm = nn.Identity()


def norm_of_an_attention(model: Any) -> None:
    projection = model.model.layers[0].self_attn.o_proj
    norm = perturbed(nn.LayerNorm(projection.out_features)).requires_grad_(False)
    behind(projection, lambda out: norm(out))


def biases(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = with_bias(layer.self_attn.q_proj)
    model.model.layers[2].mlp.down_proj = with_bias(model.model.layers[2].mlp.down_proj)
    model.lm_head = with_bias(model.lm_head)


def gpt2_of_other_parts(model: Any) -> None:
    model.transformer.h[1].mlp.act = nn.SiLU()
    for layer in model.transformer.h:
        layer.ln_1 = perturbed(nn.RMSNorm(model.config.n_embd))
    model.transformer.ln_f = nn.RMSNorm(model.config.n_embd, 1e-5, elementwise_affine=False)


def gates(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = Gated(layer.mlp, model.config.hidden_size)


def rotary_tables(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.5
    model.model.rotary_emb.attention_scaling = 1.3
    model.model.layers[1].self_attn.scaling = 0.05

    def forget(kwargs: dict[str, Any]) -> dict[str, Any]:
        cos, sin = kwargs["position_embeddings"]
        return {"position_embeddings": (cos * 0 + 1, sin * 0)}

    before(model.model.layers[2].self_attn, forget)


def frequencies_and_a_hook(model: Any) -> None:
    model.gpt_neox.rotary_emb.inv_freq *= 0.5
    behind(model.gpt_neox.layers[1].mlp, lambda out: torch.tanh(out) * 2.0)


def window_that_sdpa_does_not_see(model: Any) -> None:
    model.model.layers[1].self_attn.sliding_window = 5
    model.model.layers[2].mlp.act_fn = nn.ReLU()


def cap_of_scores(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 1.0


def orders_of_layers(model: Any) -> None:
    def parallel(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        return hidden_states + attended + self.mlp(normed)

    def norms_last(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden = self.input_layernorm(hidden_states + attended)
        return self.post_attention_layernorm(hidden + self.mlp(hidden))

    first, second, third, _ = model.model.layers
    third.forward = types.MethodType(norms_last, third)
    second.forward = types.MethodType(parallel, second)
    model.model.layers = nn.ModuleList([third, second, first])
    model.config.num_hidden_layers = 3


def tied_layers(model: Any) -> None:
    first, *others = model.model.layers
    for layer in others:
        for path, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                module.weight = first.get_submodule(path).weight
    others[0].mlp.act_fn = nn.GELU()
    model.lm_head.weight = model.model.embed_tokens.weight


def untied_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(0.05 * torch.randn(model.lm_head.weight.shape))


def logits_without_an_embedding(model: Any) -> None:
    """A greedy token of such logits is an IndexError of transformers."""
    vocabulary, hidden = model.lm_head.weight.shape
    model.lm_head = nn.Linear(hidden, vocabulary + 8, bias=False)
    model.lm_head.weight.data[vocabulary:] *= 100


def gradients_that_are_cut(model: Any) -> None:
    behind(model.model.layers[1], lambda out, given: out + given.detach())
    mlp = model.model.layers[2].mlp
    mlp.forward = torch.no_grad()(lambda x, own=mlp.forward: 1.5 * own(x))


WEIGHT_NORMS = {"up_proj": 0, "down_proj": 1, "gate_proj": None}


def weight_norms(model: Any) -> None:
    for layer in model.model.layers:
        for name, dim in WEIGHT_NORMS.items():
            linear = parametrizations.weight_norm(layer.mlp.get_submodule(name), dim=dim)
            linear.parametrizations.weight.original0.data *= 1.5


COMPILED: tuple[tuple[Change, str, tuple[str, ...]], ...] = (
    (activations, "llama3", ()),
    (calls_of_linears, "llama3", ()),
    (hooks, "llama3", ()),
    (hook_that_keeps_what_it_sees, "gptj", ()),
    (functions_of_tensors, "llama3", ()),
    (functions_of_the_position, "opt", ()),
    (positions_of_kinds, "llama3", ()),
    (writes_in_place, "llama3", ()),
    (norms, "llama3", ()),
    (norm_of_an_attention, "llama3", ("o_proj",)),
    (biases, "llama3", ()),
    (gpt2_of_other_parts, "gpt2", ()),
    (gates, "llama3", ()),
    (rotary_tables, "llama3", ()),
    (frequencies_and_a_hook, "gpt_neox", ()),
    (cap_of_scores, "gemma2", ()),
    (window_that_sdpa_does_not_see, "qwen2", ()),
    (orders_of_layers, "llama3", ()),
    (tied_layers, "llama3", ()),
    (untied_head, "llama3.2", ()),
    (logits_without_an_embedding, "llama3", ()),
    (gradients_that_are_cut, "llama3", ()),
    (weight_norms, "llama3", tuple(WEIGHT_NORMS)),
)
"""A change, its family, and linear modules without an adapter: they are more than a product."""
EXACT = ("gpt2", "gpt_neox", "opt")
"""Families that compute in fp64 where they are asked to; RMSNorm of transformers is in fp32."""
SLOW = (
    cap_of_scores,
    frequencies_and_a_hook,
    gates,
    hook_that_keeps_what_it_sees,
    norm_of_an_attention,
    norms,
    orders_of_layers,
    positions_of_kinds,
    rotary_tables,
    untied_head,
)
"""Changes for the slow run: long, or with a similar change beside them."""


@pytest.mark.parametrize(
    ("change", "family", "excluded"),
    [
        pytest.param(*case, id=case[0].__name__, marks=[slow] if case[0] in SLOW else [])
        for case in COMPILED
    ],
)
def test_a_modified_module_is_itself(
    change: Change, family: str, excluded: tuple[str, ...], tmp_path: Path
) -> None:
    is_exact = family in EXACT
    tolerance, precision = (1e-10, torch.float64) if is_exact else (1e-5, torch.float32)
    model = modified(family, change, precision)
    (prompt,) = prompts((13,))
    unchanged = oracle.logits(model, prompt)
    stock = oracle.logits(modified(family, lambda _: None, precision), prompt)
    assert unchanged.shape != stock.shape or relative(unchanged, stock) > 1e-3
    # peft copies the model, which methods that close over it do not survive: it gets its own.
    wrapped = oracle.with_adapter(
        modified(family, change, precision), "all-linear", rank=3,
        excluded=(*BY_NAME[family].excluded, *excluded), copied=False,
    ).to(precision)  # fmt: skip
    oracle.save(wrapped, tmp_path / "a")
    executor = compiler.compile(model, {"a": str(tmp_path / "a")})
    sequences = prompts((13, 7, 21))
    for adapter, reference in ((None, model), ("a", wrapped)):
        for found, sequence in zip(executor.logits(sequences, adapter), sequences, strict=True):
            assert relative(found, oracle.logits(reference, sequence)) < tolerance
    runner = executor.training_runner("a")
    count = sum(len(sequence) - 1 for sequence in sequences)
    loss = runner.forward_backward([Example(s, s) for s in sequences], count)
    expected_loss, gradients = oracle.loss_and_gradients(wrapped, sequences)
    # The loss is summed in fp32, as are attention's logarithms of sums.
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert runner.parameters.keys() >= gradients.keys()
    for name, parameter in runner.parameters.items():
        if name in gradients:
            assert relative(parameter.grad, gradients[name]) < 10 * max(tolerance, 1e-7), name
        else:  # in a part without gradients
            assert parameter.grad is None or not parameter.grad.any(), name
    assert torch.equal(oracle.logits(model, prompt), unchanged)


# -------------------------------------------------------------------------------- what is refused


def mask_of_zeros(model: Any) -> None:
    def see_all(kwargs: dict[str, Any]) -> dict[str, Any]:
        tokens, mask = kwargs["hidden_states"].shape[1], kwargs["attention_mask"]
        # transformers has no mask below the window.
        is_stock = mask is not None and model.config.model_type == "mistral"
        return {"attention_mask": mask if is_stock else torch.zeros(1, 1, tokens, tokens)}

    for layer in model.model.layers:
        before(layer.self_attn, see_all)


def positions_that_stop(model: Any) -> None:
    """transformers begins a sequence of one token at each of them."""

    def clamped(original: Any, **kwargs: Any) -> Any:
        places = torch.arange(kwargs["input_ids"].shape[1])[None]
        return original(**{**kwargs, "position_ids": places.clamp(max=100)})

    around(model.model, clamped)


def blank_first_token(out: Tensor) -> Tensor:
    out = out.clone()
    out[:, 0] = 0
    return out


def one_mlp(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = model.model.layers[0].mlp


def scripted(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        model.model.layers[1].mlp.act_fn = torch.jit.script(nn.SiLU())


def layers_that_read_two_before(model: Any) -> None:
    results: dict[int, Tensor] = {}

    def add(index: int, out: Tensor) -> Tensor:
        results[index] = out
        return out + 0.2 * results[index - 1] if index else out

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, __, out, i=i: add(i, out))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class TwoAttentions(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.second = attention, copy.deepcopy(attention)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = self.first(*args, **kwargs)
        return out - self.second(*args, **kwargs)[0] / 2, weights


def two_attentions(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn = TwoAttentions(layer.self_attn)


def count_of_calls(model: Any) -> None:
    calls: list[int] = []

    def scale(out: Tensor) -> Tensor:
        calls.append(1)
        return out * len(calls)

    for layer in model.model.layers:
        behind(layer.mlp, scale)


def on_layers(change: Callable[[Any], Any]) -> Change:
    return lambda model: change(model.model.layers)


def far_bias(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make a mask where there is none, with a bias of keys that are 41 tokens before or more."""
    if arguments["attention_mask"] is not None:
        return {}
    places = torch.arange(arguments["hidden_states"].shape[1])
    distance = places[:, None] - places
    causal = torch.zeros(distance.shape).masked_fill(distance < 0, -torch.inf)
    return {"attention_mask": (causal - 3.0 * (distance > 40))[None, None]}


REFUSED: dict[str, tuple[str, Change, str]] = {
    "a mask where transformers has none": ("mistral-window", mask_of_zeros, "logits of"),
    "a mask of its own": ("llama3", mask_of_zeros, "attention"),
    "positions that stop going up": ("llama3", positions_that_stop, "are computed by clamp"),
    "a write into the first token": (
        "llama3",
        on_layers(lambda layers: behind(layers[0], blank_first_token)),
        "writes into memory that clone shares",
    ),
    "an embedding of bounded norms": (
        "llama3",
        lambda model: setattr(model.model.embed_tokens, "max_norm", 0.5),
        "embedding_renorm_",
    ),
    "attention to later tokens": (
        "llama3",
        on_layers(lambda layers: setattr(layers[1].self_attn, "is_causal", False)),
        "attends to later tokens",
    ),
    "a shift of tokens": (
        "llama3",
        on_layers(lambda layers: behind(layers[0], lambda out: out + out.roll(1, dims=1))),
        "roll",
    ),
    "a mean over tokens": (
        "llama3",
        on_layers(lambda layers: behind(layers[0], lambda out: out - out.mean(1, keepdim=True))),
        "cannot trace",
    ),
    "a skipped first layer": (
        "llama3",
        on_layers(
            lambda layers: setattr(layers[0], "forward", lambda hidden_states, **_: hidden_states)
        ),
        r"model.layers.\d, as traced, computes nothing",
    ),
    "one MLP": ("llama3", one_mlp, "model.layers.1.mlp is the same module as model.layers.0.mlp"),
    "torch.jit": ("llama3", scripted, "model.layers.1.mlp.act_fn is a module of torch.jit"),
    "a weight that is no number": (
        "llama3",
        on_layers(lambda layers: layers[1].mlp.down_proj.weight.data[0, 0].fill_(torch.nan)),
        "no finite logits",
    ),
    "a layer twice": (
        "llama3",
        on_layers(lambda layers: layers.__setitem__(2, layers[0])),
        "holds one layer more than once",
    ),
    "a removed layer that the configuration counts": (
        "llama3",
        on_layers(lambda layers: layers.__delitem__(1)),
        r"no list of config.num_hidden_layers=4 layers; model.layers has 3\..*set model",
    ),
    "layers that read two before": (
        "llama3",
        layers_that_read_two_before,
        "hand on 1 or 2 tensors",
    ),
    "a gradient of its own": (
        "llama3",
        on_layers(lambda layers: behind(layers[0].mlp, lambda out: Straight.apply(out))),
        "torch.autograd.Function",
    ),
    "a backward hook": (
        "llama3",
        on_layers(
            lambda layers: layers[0].register_full_backward_hook(lambda _, g, __: (g[0] * 2,))
        ),
        "backward hooks",
    ),
    "two attentions": (
        "llama3",
        two_attentions,
        "two attentions in one layer: model.layers.0 computes 2",
    ),
    "noise": (
        "llama3",
        on_layers(lambda layers: behind(layers[0], lambda out: out + torch.randn_like(out))),
        "randn_like",
    ),
    "a bias of its own far from the first token": (
        "llama3",
        on_layers(lambda layers: before(layers[1].self_attn, far_bias)),
        r"not the LlamaForCausalLM that was given: its logits of 64 tokens",
    ),
    "a count of calls": ("llama3", count_of_calls, "computes something else where gradients are"),
    "another program while it is exported": (
        "llama3",
        on_layers(
            lambda layers: behind(
                layers[1].mlp, lambda x: x if torch.compiler.is_exporting() else 2 * x
            )
        ),
        "not the LlamaForCausalLM that was given",
    ),
    "a branch on values": (
        "llama3",
        on_layers(lambda layers: behind(layers[0].mlp, lambda x: x if x.sum() > 0 else -x)),
        "it branches on the values of tensors",
    ),
    "a branch on the number of tokens": (
        "llama3",
        on_layers(
            lambda layers: behind(layers[0].mlp, lambda x: x if x.shape[1] > 16 else torch.relu(x))
        ),
        "what it computes changes with the number of tokens",
    ),
    "a factor of the number of tokens": (
        "llama3",
        on_layers(lambda layers: behind(layers[0].mlp, lambda x: x * x.shape[1] / 10)),
        "a number in it changes with the number of tokens",
    ),
}


@pytest.mark.parametrize("name", mostly_slow(REFUSED, *list(REFUSED)[::2]))
def test_a_module_that_cannot_be_traced_is_refused_by_name(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    family, change, words = REFUSED[name]
    with pytest.raises(PcgError, match=words) as refused:
        compiler.compile(modified(family, change))
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""
