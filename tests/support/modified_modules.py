"""Changes of a Hugging Face model in memory, each with what compiling the result must do.

A change takes a freshly built model and modifies it in place.

Long because each change is a function of its own.
"""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Modification:
    """A change of a model.

    Attributes:
        name: what it does.
        family: the name of the family whose model is changed.
        change: makes it.
        refused: a part of the message of the error that compiling raises; empty where the modified
            model compiles, to its own logits and gradients.
        excluded: modules without an adapter: what they compute is more than a product.
    """

    name: str
    family: str
    change: Change
    refused: str = ""
    excluded: tuple[str, ...] = ()


MODIFICATIONS: list[Modification] = []


def _case(
    family: str = "llama3", refused: str = "", excluded: tuple[str, ...] = ()
) -> Callable[[Change], Change]:
    def note(change: Change) -> Change:
        name = change.__name__.removeprefix("_")
        MODIFICATIONS.append(Modification(f"{family}: {name}", family, change, refused, excluded))
        return change

    return note


def _layers(model: Any) -> Any:
    return model.model.layers


# --------------------------------------------------------------------------------- activations


@_case()
def relu_everywhere(model: Any) -> None:
    for layer in _layers(model):
        layer.mlp.act_fn = nn.ReLU()


@_case()
def gelu_in_one_layer(model: Any) -> None:
    _layers(model)[2].mlp.act_fn = nn.GELU()


@_case()
def one_activation_for_all_layers(model: Any) -> None:
    activation = nn.Mish()
    for layer in _layers(model):
        layer.mlp.act_fn = activation


@_case("gpt2")
def silu_in_gpt2(model: Any) -> None:
    model.transformer.h[1].mlp.act = nn.SiLU()


@_case()
def scaled_activation(model: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: Tensor) -> Tensor:
            return self.by * torch.tanh(x)

    for i, layer in enumerate(_layers(model)):
        layer.mlp.act_fn = Scaled(0.5 + (i % 2))


@_case()
def mlp_method_of_one_instance(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(functional.relu(self.gate_proj(x)) * self.up_proj(x))

    mlp = _layers(model)[0].mlp
    mlp.forward = types.MethodType(forward, mlp)


@_case()
def wrapped_forward(model: Any) -> None:
    mlp = _layers(model)[1].mlp
    original = mlp.forward
    mlp.forward = lambda x: 0.5 * original(x)


@_case()
def a_linear_called_twice(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        once = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return once + self.down_proj(torch.relu(self.up_proj(2.0 * x)))

    for layer in _layers(model):
        layer.mlp.forward = types.MethodType(forward, layer.mlp)


# ----------------------------------------------------------------------------- hooks, and scale


@_case()
def soft_capped_logits(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _, __, out: 3.0 * torch.tanh(out / 3.0))


@_case("gemma2")
def another_cap_of_scores(model: Any) -> None:
    for layer in _layers(model):
        layer.self_attn.attn_logit_softcapping = 1.0


@_case()
def hook_on_the_model(model: Any) -> None:
    def halve(_: Any, __: Any, out: Any) -> Any:
        out.logits = 0.5 * out.logits
        return out

    model.register_forward_hook(halve)


@_case()
def hook_on_a_layer(model: Any) -> None:
    _layers(model)[1].register_forward_hook(lambda _, __, out: out * 1.25)


@_case()
def hook_that_writes_in_place(model: Any) -> None:
    def scale(_: Any, __: Any, out: Tensor) -> None:
        out.mul_(0.5)

    _layers(model)[1].mlp.register_forward_hook(scale)


@_case()
def hook_before_a_module(model: Any) -> None:
    _layers(model)[2].mlp.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))


@_case("gptj")
def hook_that_keeps_what_it_sees(model: Any) -> None:
    seen: dict[str, Tensor] = {}

    def scale(module: Any, given: Any, out: Tensor) -> Tensor:
        seen["given"], seen["out"] = given[0], out
        return seen["out"] * 1.25

    model.transformer.h[1].mlp.register_forward_hook(scale)


@_case()
def steering_vector(model: Any) -> None:
    vector = torch.linspace(-1, 1, model.config.hidden_size)
    _layers(model)[1].register_forward_hook(lambda _, __, out: out + vector)


@_case()
def scaled_embeddings(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda _, __, out: out * 3.0)


@_case()
def clamped_states(model: Any) -> None:
    for layer in _layers(model):
        layer.register_forward_hook(lambda _, __, out: out.clamp(-0.5, 0.5))


@_case()
def functions_of_two_tensors(model: Any) -> None:
    bound = torch.linspace(-0.5, 0.5, model.config.hidden_size)

    def bounded(_: Any, given: Any, out: Tensor) -> Tensor:
        out = torch.maximum(out, bound) + torch.minimum(out, given[0])
        out = torch.clamp(out, min=bound - 1, max=3 + given[0].abs())
        out = out + (2 + bound).pow(torch.sigmoid(out))
        return torch.where(out > 0.1, out, 0.3 * given[0]).masked_fill(out < -2, -2.0)

    def leaky(_: Any, given: Any) -> Any:
        return torch.where(given[0] > 0, given[0], 0.3 * given[0]), *given[1:]

    _layers(model)[1].mlp.register_forward_hook(bounded)
    _layers(model)[2].register_forward_pre_hook(leaky)


@_case(family="mistral-window", refused="logits of")
def a_mask_where_there_is_none(model: Any) -> None:
    """transformers gives none below the window."""

    def see_all(_: Any, args: Any, kwargs: Any) -> Any:
        tokens, mask = kwargs["hidden_states"].shape[1], kwargs["attention_mask"]
        mask = torch.zeros(1, 1, tokens, tokens) if mask is None else mask
        return args, {**kwargs, "attention_mask": mask}

    for layer in _layers(model):
        layer.self_attn.register_forward_pre_hook(see_all, with_kwargs=True)


@_case(refused="positions that are computed by clamp")
def positions_that_stop_going_up(model: Any) -> None:
    """transformers begins a sequence of one token at each of them."""
    original = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        places = torch.arange(kwargs["input_ids"].shape[1])[None]
        return original(*args, **{**kwargs, "position_ids": places.clamp(max=100)})

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    model.model.forward = forward


@_case()
def functions_of_rows(model: Any) -> None:
    def of_rows(_: Any, __: Any, out: Tensor) -> Tensor:
        scaled = functional.normalize(out, dim=-1) + out.amax(-1, keepdim=True)
        return scaled - out.flip(-1).std(-1, keepdim=True) + functional.log_softmax(out, -1) / 9

    _layers(model)[2].mlp.register_forward_hook(of_rows)
    _layers(model)[0].mlp.register_forward_hook(lambda _, __, out: out + out.argmax(-1)[..., None])


@_case(family="opt")
def functions_of_the_position(model: Any) -> None:
    def scaled(_: Any, __: Any, out: Tensor) -> Tensor:
        places = torch.arange(out.shape[1], dtype=out.dtype)
        return out / (1 + places // 4)[:, None] + torch.arange(3).sum()

    model.model.decoder.layers[1].self_attn_layer_norm.register_forward_hook(scaled)


@_case()
def other_scale_of_attention(model: Any) -> None:
    _layers(model)[2].self_attn.scaling = 0.05


@_case()
def forward_of_the_model(model: Any) -> None:
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        out.logits = out.logits - 1.0 + out.logits * 0.5
        return out

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    model.forward = forward


@_case()
def scale_by_the_index_of_the_layer(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        up = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(up) / (self.layer_idx + 1)

    for i, layer in enumerate(_layers(model)):
        layer.mlp.layer_idx = i
        layer.mlp.forward = types.MethodType(forward, layer.mlp)


@_case()
def activations_that_write_in_place(model: Any) -> None:
    def clamp(_: Any, given: Any) -> None:
        given[0].clamp_(-0.5, 0.5)

    def shift(_: Any, __: Any, out: Tensor) -> None:
        out.mul_(0.5)
        out.add_(0.1)
        out.tanh_()

    _layers(model)[0].mlp.act_fn = nn.ReLU6(inplace=True)
    _layers(model)[1].mlp.register_forward_pre_hook(clamp)
    _layers(model)[2].mlp.register_forward_hook(shift)


@_case()
def entries_that_are_written(model: Any) -> None:
    def write(_: Any, __: Any, out: Tensor) -> Tensor:
        out[..., 3] = 0.25
        out[..., 5:9].mul_(2.0)
        out[..., -4:] += out[..., :4]
        return out

    _layers(model)[1].mlp.register_forward_hook(write)


@_case(refused="writes into memory that clone shares")
def a_write_into_the_first_token(model: Any) -> None:
    def blank(_: Any, __: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 0] = 0
        return out

    _layers(model)[0].register_forward_hook(blank)


@_case()
def a_view_read_after_a_write(model: Any) -> None:
    def scale(_: Any, __: Any, out: Tensor) -> Tensor:
        flat = out.view(-1, out.shape[-1])
        out.mul_(0.5)
        return flat.view(out.shape) + 0.0

    _layers(model)[0].mlp.register_forward_hook(scale)


@_case(refused="embedding_renorm_")
def an_embedding_of_bounded_norms(model: Any) -> None:
    model.model.embed_tokens.max_norm = 0.5


# ------------------------------------------------------------------------------- norms, biases


@_case()
def norms_of_one_plus_their_weight(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * (x * scale)

    for norm in (_layers(model)[1].input_layernorm, model.model.norm):
        norm.forward = types.MethodType(forward, norm)


@_case()
def layer_norm_for_rms_norm(model: Any) -> None:
    for layer in _layers(model):
        layer.input_layernorm = _perturbed(nn.LayerNorm(model.config.hidden_size))


@_case("gpt2")
def rms_norm_of_torch(model: Any) -> None:
    for layer in model.transformer.h:
        layer.ln_1 = nn.RMSNorm(model.config.n_embd)
        layer.ln_1.weight.data += 0.1 * torch.randn(model.config.n_embd)
    model.transformer.ln_f = nn.RMSNorm(model.config.n_embd, 1e-5, elementwise_affine=False)


@_case()
def one_norm_for_all_layers(model: Any) -> None:
    for layer in _layers(model):
        layer.input_layernorm = model.model.norm


@_case()
def no_final_norm(model: Any) -> None:
    model.model.norm = nn.Identity()


@_case()
def epsilon_of_one_norm(model: Any) -> None:
    _layers(model)[1].input_layernorm.variance_epsilon = 0.3


@_case(excluded=("o_proj",))
def norm_of_the_attention(model: Any) -> None:
    projection = _layers(model)[0].self_attn.o_proj
    norm = _perturbed(nn.LayerNorm(projection.out_features)).requires_grad_(False)
    projection.register_forward_hook(lambda _, __, out: norm(out))


@_case()
def a_bias_on_q(model: Any) -> None:
    for layer in _layers(model):
        layer.self_attn.q_proj = _with_bias(layer.self_attn.q_proj)


@_case()
def a_bias_on_one_down_projection(model: Any) -> None:
    _layers(model)[2].mlp.down_proj = _with_bias(_layers(model)[2].mlp.down_proj)


@_case()
def a_bias_on_the_head(model: Any) -> None:
    model.lm_head = _with_bias(model.lm_head)


@_case("gpt_neox")
def frequencies_and_a_hook(model: Any) -> None:
    model.gpt_neox.rotary_emb.inv_freq *= 0.5
    model.gpt_neox.layers[1].mlp.register_forward_hook(lambda _, __, out: torch.tanh(out) * 2.0)


@_case("opt")
def no_bias_on_fc1(model: Any) -> None:
    for layer in model.model.decoder.layers:
        layer.fc1.bias = None


@_case()
def a_trained_gate(model: Any) -> None:
    class Gated(nn.Module):
        def __init__(self, inner: nn.Module, width: int) -> None:
            super().__init__()
            self.inner = inner
            self.gate = nn.Parameter(torch.linspace(0.1, 2.0, width))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.gate

    for layer in _layers(model):
        layer.mlp = Gated(layer.mlp, model.config.hidden_size)


# ------------------------------------------------------------------------- positions, and masks


@_case()
def other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


@_case()
def other_scale_of_the_rotary_tables(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.3


@_case()
def no_positions_in_one_layer(model: Any) -> None:
    def forget(_: Any, args: Any, kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = (cos * 0 + 1, sin * 0)
        return args, kwargs

    _layers(model)[2].self_attn.register_forward_pre_hook(forget, with_kwargs=True)


@_case("qwen2", refused="not the Qwen2ForCausalLM that was given")
def a_window_that_sdpa_does_not_see(model: Any) -> None:
    _layers(model)[1].self_attn.sliding_window = 5


@_case(refused="attends to later tokens")
def attention_to_later_tokens(model: Any) -> None:
    _layers(model)[1].self_attn.is_causal = False


@_case(refused="attention")
def a_mask_of_its_own(model: Any) -> None:
    def see_all(_: Any, args: Any, kwargs: Any) -> Any:
        tokens = args[0].shape[1] if args else kwargs["hidden_states"].shape[1]
        kwargs["attention_mask"] = torch.zeros(1, 1, tokens, tokens)
        return args, kwargs

    for layer in _layers(model):
        layer.self_attn.register_forward_pre_hook(see_all, with_kwargs=True)


@_case(refused="roll")
def a_shift_of_tokens(model: Any) -> None:
    _layers(model)[0].register_forward_hook(lambda _, __, out: out + out.roll(1, dims=1))


@_case(refused="cannot trace")
def a_mean_over_tokens(model: Any) -> None:
    _layers(model)[0].register_forward_hook(lambda _, __, out: out - out.mean(1, keepdim=True))


# ------------------------------------------------------------------------------ order, and depth


@_case()
def attention_beside_the_mlp(model: Any) -> None:
    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        return hidden_states + attended + self.mlp(normed)

    for layer in _layers(model):
        layer.forward = types.MethodType(forward, layer)


@_case()
def norms_after_the_sums(model: Any) -> None:
    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden = self.input_layernorm(hidden_states + attended)
        return self.post_attention_layernorm(hidden + self.mlp(hidden))

    for layer in list(_layers(model))[1:]:
        layer.forward = types.MethodType(forward, layer)


@_case()
def layers_in_another_order(model: Any) -> None:
    _layers(model)[1].mlp.act_fn = nn.ReLU()
    model.model.layers = nn.ModuleList(reversed(list(_layers(model))))


@_case()
def fewer_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList(list(_layers(model))[:2])
    model.config.num_hidden_layers = 2


@_case()
def all_layers_tied(model: Any) -> None:
    first, *others = _layers(model)
    for layer in others:
        for path, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                module.weight = first.get_submodule(path).weight


@_case()
def all_layers_of_two_kinds_tied(model: Any) -> None:
    all_layers_tied(model)
    _layers(model)[1].mlp.act_fn = nn.GELU()


def _skipped(layer: Any) -> None:
    layer.forward = lambda hidden_states, **_: hidden_states


@_case(refused=r"model.layers.\d, as traced, computes nothing")
def a_skipped_layer(model: Any) -> None:
    _skipped(_layers(model)[1])


@_case(refused=r"model.layers.\d, as traced, computes nothing")
def a_skipped_last_layer(model: Any) -> None:
    _skipped(_layers(model)[-1])


@_case(refused="model.layers.1.mlp is the same module as model.layers.0.mlp")
def one_mlp_for_all_layers(model: Any) -> None:
    for layer in _layers(model):
        layer.mlp = model.model.layers[0].mlp


@_case(refused="model.layers.1.mlp.act_fn is a module of torch.jit")
def a_scripted_activation(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        _layers(model)[1].mlp.act_fn = torch.jit.script(nn.SiLU())


@_case(refused="no finite logits")
def a_weight_that_is_no_number(model: Any) -> None:
    _layers(model)[1].mlp.down_proj.weight.data[0, 0] = torch.nan


@_case(refused="holds one layer more than once")
def a_layer_twice(model: Any) -> None:
    _layers(model)[2] = _layers(model)[0]


@_case("llama3.2")
def an_untied_head(model: Any) -> None:
    head = model.lm_head
    head.weight = nn.Parameter(0.05 * torch.randn(head.weight.shape))


@_case()
def a_tied_head(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


@_case()
def a_longer_vocabulary(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _, __, out: torch.cat([out, out[..., :8]], -1))


@_case(refused="hand on 1 or 2 tensors")
def layers_that_read_two_before(model: Any) -> None:
    before: dict[int, Tensor] = {}

    def add(index: int, out: Tensor) -> Tensor:
        before[index] = out
        return out + 0.2 * before[index - 1] if index else out

    for i, layer in enumerate(_layers(model)):
        layer.register_forward_hook(lambda _, __, out, i=i: add(i, out))


# ----------------------------------------------------------------------------------- gradients


@_case()
def a_cut_gradient(model: Any) -> None:
    _layers(model)[1].register_forward_hook(lambda _, given, out: out + given[0].detach())


@_case()
def a_layer_without_gradients(model: Any) -> None:
    mlp = _layers(model)[1].mlp
    mlp.forward = torch.no_grad()(lambda x, own=mlp.forward: 1.5 * own(x))


@_case(refused="torch.autograd.Function")
def a_gradient_of_its_own(model: Any) -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.relu(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    _layers(model)[0].mlp.register_forward_hook(lambda _, __, out: Straight.apply(out))


@_case(refused="backward hooks")
def a_backward_hook(model: Any) -> None:
    _layers(model)[0].register_full_backward_hook(lambda _, given, __: (given[0] * 2,))


class _TwoAttentions(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.second = attention, copy.deepcopy(attention)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = self.first(*args, **kwargs)
        return out - self.second(*args, **kwargs)[0] / 2, weights


@_case(refused="two attentions in one layer: model.layers.0 computes 2")
def a_second_attention(model: Any) -> None:
    for layer in _layers(model):
        layer.self_attn = _TwoAttentions(layer.self_attn)


@_case(refused="randn_like")
def noise(model: Any) -> None:
    _layers(model)[0].register_forward_hook(lambda _, __, out: out + torch.randn_like(out))


@_case(refused="not the LlamaForCausalLM that was given")
def a_count_of_calls(model: Any) -> None:
    calls = []

    def scale(_: Any, __: Any, out: Tensor) -> Tensor:
        calls.append(1)
        return out * len(calls)

    for layer in _layers(model):
        layer.mlp.register_forward_hook(scale)


@_case(refused=r"no list of config.num_hidden_layers=4 layers; model.layers has 3\..*set model")
def removed_layers_that_the_configuration_counts(model: Any) -> None:
    del _layers(model)[1]


@_case(excluded=("up_proj", "down_proj", "gate_proj"))
def weight_norms_of_rows_columns_and_all(model: Any) -> None:
    for layer in _layers(model):
        for name, dim in (("up_proj", 0), ("down_proj", 1), ("gate_proj", None)):
            linear = parametrizations.weight_norm(layer.mlp.get_submodule(name), dim=dim)
            linear.parametrizations.weight.original0.data *= 1.5


def _perturbed(norm: nn.LayerNorm) -> nn.LayerNorm:
    norm.weight.data += 0.1 * torch.randn(norm.weight.shape)
    norm.bias.data += 0.1 * torch.randn(norm.bias.shape)
    return norm


def _with_bias(linear: nn.Linear) -> nn.Linear:
    new = nn.Linear(linear.in_features, linear.out_features)
    new.weight = linear.weight
    new.bias.data.copy_(0.1 * torch.randn(linear.out_features))
    return new
