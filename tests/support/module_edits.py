"""Edits of a layer's modules, of the embedding and of the head."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from tests.support.edited_model import (
    EditedModel,
    UnfitError,
    changed,
    edit,
    wrapped_method,
)

# -------------------------------------------------------------------------------------- activations


class Bent(nn.Module):
    """An activation of its own."""

    def __init__(self, by: float, is_trained: bool) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by)) if is_trained else by

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.by * x)


@edit("activations", 3)
def swapped_activation(m: EditedModel) -> None:
    c, trained = m.number(0.3, 2), m.chance(0.5)
    makers = (
        nn.ReLU, nn.GELU, nn.Mish, nn.ELU, nn.Softplus, nn.Hardswish, nn.Tanh, nn.LeakyReLU,
        lambda: nn.GELU("tanh"), lambda: nn.ReLU6(inplace=True), lambda: Bent(c, trained),
        lambda: nn.PReLU(init=c), nn.Identity, lambda: nn.Softsign(), lambda: nn.Hardtanh(-c, c),
        lambda: nn.CELU(c), lambda: nn.Threshold(0.1, c), nn.LogSigmoid, lambda: nn.RReLU(),
        lambda: nn.Softmax(-1), nn.Tanhshrink,
    )  # fmt: skip
    maker, is_shared = m.pick(makers), m.chance(0.3)
    shared = maker()
    for layer in m.some_layers():
        for holder, name, _ in m.activations_of(layer):
            setattr(holder, name, shared if is_shared else maker())


@edit("activations", 3)
def function_for_activation(m: EditedModel) -> None:
    change = m.token_function()
    for layer in m.some_layers():
        for holder, name, _ in m.activations_of(layer):
            own = getattr(holder, name)
            kind = m.kind(3)
            if kind == 0:
                own.forward = change
            elif kind == 1:
                wrapped_method(own, lambda original, x: change(original(x)))
            else:
                del holder._modules[name]
                setattr(holder, name, change)


# -------------------------------------------------------------------------------------------- norms


def _perturbed(m: EditedModel, norm: nn.Module) -> nn.Module:
    for parameter in norm.parameters():
        parameter.data += 0.1 * m.vector(parameter.numel()).view(parameter.shape)
    return norm


@edit("norms", 3)
def swapped_norm(m: EditedModel) -> None:
    width, eps = m.width(), m.pick((1e-6, 1e-5, 0.1, 0.5))
    makers = (
        lambda: nn.LayerNorm(width, eps),
        lambda: nn.LayerNorm(width, eps, elementwise_affine=False),
        lambda: nn.LayerNorm(width, eps, bias=False),
        lambda: nn.RMSNorm(width, eps),
        lambda: nn.RMSNorm(width),
        nn.Identity,
        lambda: nn.Sequential(nn.LayerNorm(width, eps), nn.Tanh()),
    )
    maker = m.pick(makers)
    for layer in m.some_layers():
        norms = [x for x in m.children_of(layer, "norm") if x[0] is layer]
        if not norms:
            raise UnfitError
        for holder, name, _ in m.some(norms):
            setattr(holder, name, _perturbed(m, maker()))


@edit("norms", 2)
def norm_that_computes_otherwise(m: EditedModel) -> None:
    kind, c = m.kind(4), m.number(0.2, 2)

    def around(original: Any, x: Tensor) -> Any:
        if kind == 0:
            return original(x) + c * x
        if kind == 1:
            return original(x.double()).to(x.dtype) if c > 3 else original(c * x)
        if kind == 2:
            return original(x - x.mean(-1, keepdim=True))
        return original(original(x))

    for layer in m.some_layers():
        wrapped_method(m.pick(m.children_of(layer, "norm"))[2], around)


@edit("norms")
def shared_norm(m: EditedModel) -> None:
    holder, name, first = m.pick(m.children_of(m.layers[0], "norm"))
    if holder is not m.layers[0]:
        raise UnfitError
    for layer in m.some_layers():
        setattr(layer, name, first)


@edit("norms", 2)
def epsilon(m: EditedModel) -> None:
    for layer in m.some_layers():
        _, _, norm = m.pick(m.children_of(layer, "norm"))
        for name in ("variance_epsilon", "eps"):
            if hasattr(norm, name):
                setattr(norm, name, m.number(0.01, 1))


@edit("norms", 2)
def norm_behind(m: EditedModel) -> None:
    """A norm of the attention's or the MLP's result."""
    norm = _perturbed(m, nn.LayerNorm(m.width())).requires_grad_(m.chance(0.5))
    for layer in m.some_layers():
        module = m.attention_of(layer) if m.chance(0.5) else m.mlp_of(layer)
        if m.chance(0.5):
            module.extra_norm = norm
        module.register_forward_hook(lambda _, __, out: changed(out, norm))


# ---------------------------------------------------------------------------------------- residuals


@edit("residuals", 3)
def scaled_residual(m: EditedModel) -> None:
    kind, c = m.kind(5), m.number(0.3, 1.5)
    gate = nn.Parameter(0.3 * m.vector(m.width()))

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        change = (
            lambda out: c * x + out,
            lambda out: x + c * (out - x),
            lambda out: out + torch.sigmoid(gate) * x,
            lambda out: out - x,
            lambda out: x + (out - x).clamp(-c, c),
        )[kind]
        return changed(original(*args, **kwargs), change)

    for layer in m.some_layers():
        wrapped_method(layer, around)


@edit("residuals", 2)
def other_order_in_a_layer(m: EditedModel) -> None:
    kind = m.kind(5)
    first = m.layers[0]
    if not hasattr(first, "input_layernorm") or not hasattr(first, "post_attention_layernorm"):
        raise UnfitError
    m.mlp_of(first)

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        own, mlp = m.attention_of(self), m.mlp_of(self)
        before, behind = self.input_layernorm, self.post_attention_layernorm

        def attend(x: Tensor) -> Tensor:
            return own(hidden_states=x, **kwargs)[0]  # type: ignore[no-any-return]

        if kind == 0:
            normed = before(hidden_states)
            return hidden_states + attend(normed) + mlp(normed)
        if kind == 1:
            hidden = before(hidden_states + attend(hidden_states))
            return behind(hidden + mlp(hidden))
        if kind == 2:
            hidden = hidden_states + mlp(behind(hidden_states))
            return hidden + attend(before(hidden))
        if kind == 3:
            return attend(before(hidden_states)) + mlp(behind(hidden_states))
        hidden = mlp(behind(hidden_states))
        return hidden_states + attend(before(hidden)) + hidden

    for layer in m.some_layers():
        layer.forward = types.MethodType(forward, layer)


@edit("residuals")
def residual_from_elsewhere(m: EditedModel) -> None:
    """A layer adds the embedding, or an earlier layer's input or result."""
    kept: dict[str, Tensor] = {}
    kind, c = m.kind(3), m.number(0.1, 0.6)
    if kind == 0:
        m.model.get_input_embeddings().register_forward_hook(
            lambda _, __, out: kept.update(x=out) or None
        )
    elif kind == 1:
        m.layers[0].register_forward_hook(
            lambda _, __, out: kept.update(x=out if isinstance(out, Tensor) else out[0]) or None
        )

    def add(_: Any, __: Any, out: Any) -> Any:
        before = kept.get("x")
        if kind == 2:
            kept["x"] = out if isinstance(out, Tensor) else out[0]
        return out if before is None else changed(out, lambda y: y + c * before)

    m.model.register_forward_pre_hook(lambda _, __: kept.clear())
    for layer in m.some(list(m.layers)[1:]):
        layer.register_forward_hook(add)


# ------------------------------------------------------------------------------------------ linears


class WeightOfItsOwn(nn.Parameter):
    """A parameter that doubles what `functional.linear` makes of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * out if func is functional.linear else out


class Bounded(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 0.7 * torch.tanh(weight)


def _linear(m: EditedModel, layer: nn.Module) -> tuple[nn.Module, str, nn.Linear]:
    holder, name, linear = m.linear_of(layer)
    if not isinstance(linear, nn.Linear):
        raise UnfitError
    m.unadapted.add(name)
    return holder, name, linear


@edit("linears", 3)
def linear_of_another_form(m: EditedModel) -> None:
    """With or without a bias, in two factors, transposed, rounded."""
    kind = m.kind(5)
    for layer in m.some_layers():
        holder, name, linear = _linear(m, layer)
        inputs, outputs = linear.in_features, linear.out_features
        if kind not in (2, 3):
            m.unadapted.discard(name)
        if kind == 0:
            linear.bias = nn.Parameter(0.2 * m.vector(outputs))
        elif kind == 1:
            linear.bias = None  # type: ignore[assignment]
        elif kind == 2:
            first = nn.Linear(inputs, 8, bias=False)
            factors = nn.Sequential(first, nn.Linear(8, outputs, bias=m.chance(0.5)))
            setattr(holder, name, m.filled(factors))
        elif kind == 3:
            new = Conv1D(outputs, inputs)
            new.weight.data.copy_(linear.weight.data.T)
            if linear.bias is not None:
                new.bias.data.copy_(linear.bias.data)
            setattr(holder, name, new)
        else:
            linear.weight.data.mul_(8).round_().div_(8)


@edit("linears", 2)
def weight_that_is_computed(m: EditedModel) -> None:
    kind = m.kind(4)
    for layer in m.some_layers():
        _, _, linear = _linear(m, layer)
        if kind == 0:
            parametrizations.weight_norm(linear)
        elif kind == 1:
            parametrize.register_parametrization(linear, "weight", Bounded())
        elif kind == 2:
            prune.l1_unstructured(linear, "weight", amount=0.5)
        else:
            linear.weight = WeightOfItsOwn(linear.weight.data)


@edit("linears", 2)
def linear_with_a_forward_of_its_own(m: EditedModel) -> None:
    kind, c = m.kind(5), m.number(0.3, 1.5)
    for layer in m.some_layers():
        _, _, linear = _linear(m, layer)

        def forward(x: Tensor, own: Any = linear) -> Tensor:
            stock, half = type(own).forward, own.out_features // 2
            if kind == 0:
                return torch.einsum("bti,oi->bto", x, own.weight)
            if kind == 1:
                return x @ own.weight.T * c
            if kind == 2:
                return stock(own, x) + c * stock(own, x.flip(-1))  # type: ignore[no-any-return]
            if kind == 3:
                halves = (own.weight[half:], own.weight[:half])
                return torch.cat([functional.linear(x, weight) for weight in halves], -1)
            return stock(own, x) + c * x.mean(-1, keepdim=True)  # type: ignore[no-any-return]

        linear.forward = forward


@edit("linears")
def adapter_beside(m: EditedModel) -> None:
    """A bypass of the user's own, as a LoRA written by hand."""
    c = m.number(0.3, 1.5)
    for layer in m.some_layers():
        holder, name, linear = m.linear_of(layer)
        if isinstance(linear, Conv1D):
            raise UnfitError
        a, b = nn.Linear(linear.in_features, 2, bias=False), nn.Linear(2, linear.out_features)

        class Beside(nn.Module):
            def __init__(self, inner: nn.Module, a: nn.Module, b: nn.Module) -> None:
                super().__init__()
                self.inner, self.a, self.b = inner, a, b

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x) + c * self.b(self.a(x))  # type: ignore[no-any-return]

        setattr(holder, name, Beside(linear, m.filled(a), m.filled(b)))
        m.unadapted.add(name)
    m.unadapted |= {"a", "b", "inner"}


@edit("linears")
def mixture_of_experts(m: EditedModel) -> None:
    """Dense experts that are weighed by a router."""
    kind = m.kind(3)
    layer = m.pick(list(m.layers))
    mlp = m.mlp_of(layer)
    name = next(n for n, c in layer.named_children() if c is mlp)

    class Experts(nn.Module):
        def __init__(self, inner: nn.Module, width: int) -> None:
            super().__init__()
            self.experts = nn.ModuleList([inner, copy.deepcopy(inner)])
            self.router = nn.Linear(width, 2)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.router(x).softmax(-1)
            if kind == 1:
                best = weights.argmax(-1, keepdim=True)
                weights = torch.zeros_like(weights).scatter(-1, best, 1.0) * weights
            if kind == 2:
                weights = torch.where(weights > 0.5, weights, 0.0)
            outs = [expert(x) for expert in self.experts]
            return sum(weights[..., i : i + 1] * out for i, out in enumerate(outs))  # type: ignore[return-value]

    setattr(layer, name, Experts(mlp, m.width()))
    m.unadapted |= {n for n, c in mlp.named_modules() if isinstance(c, nn.Linear)} | {"router"}


# ----------------------------------------------------------------------- the embedding and the head


class NormedHead(nn.Module):
    """A head with a norm before it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight
        self.norm = nn.LayerNorm(inner.weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x))  # type: ignore[no-any-return]


@edit("embedding and head", 2)
def changed_head(m: EditedModel) -> None:
    kind, c = m.kind(8), m.number(0.3, 2)
    embedding, head = m.model.get_input_embeddings(), m.model.get_output_embeddings()
    if kind < 4:
        change = (
            lambda out: c * torch.tanh(out / c),
            lambda out: out.log_softmax(-1),
            lambda out: torch.cat([out, out[..., :5]], -1),
            lambda out: out[..., :-3],
        )[kind]
        head.register_forward_hook(lambda _, __, out: change(out))
    elif kind == 4:
        head.bias = nn.Parameter(m.vector(head.weight.shape[0]))
    elif kind == 5:
        if head.weight.shape != embedding.weight.shape:
            raise UnfitError
        head.weight = embedding.weight
    elif kind == 6:
        head.weight = nn.Parameter(0.1 * m.vector(head.weight.numel()).view(head.weight.shape))
    else:
        m.model.set_output_embeddings(NormedHead(head))


@edit("embedding and head", 2)
def changed_embedding(m: EditedModel) -> None:
    kind, c = m.kind(7), m.number(0.3, 2)
    embedding = m.model.get_input_embeddings()
    if kind == 0:
        embedding.register_forward_hook(lambda _, __, out: c * out)
    elif kind == 1:
        m.model.resize_token_embeddings(m.config.vocab_size + 7)
    elif kind == 2:
        embedding.second = nn.Embedding(embedding.num_embeddings, embedding.embedding_dim)
        embedding.register_forward_hook(lambda own, given, out: out + own.second(given[0]))
    elif kind == 3:
        embedding.padding_idx = 3
        embedding.weight.data[3] = 0.5
    elif kind == 4:
        embedding.max_norm = c
    elif kind == 5:

        def embedded(original: Any, *args: Any, **kwargs: Any) -> Any:
            ids = args[0] if args else kwargs.pop("input_ids")
            kwargs["inputs_embeds"] = c * embedding(ids)
            return original(None, *args[1:], **kwargs)

        wrapped_method(m.trunk, embedded)
    else:

        def shifted(_: Any, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % 100}

        m.model.register_forward_pre_hook(shifted, with_kwargs=True)


# -------------------------------------------------------------------------- other ways of PyTorch's


@edit("other")
def dtype_inside(m: EditedModel) -> None:
    """A part that computes in fp64, or under a context."""
    kind = m.kind(7)
    module = m.mlp_of(m.pick(list(m.layers)))

    class Doubled(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            return 2 * out if func is functional.linear else out

    def around(original: Any, x: Tensor) -> Any:
        if kind == 4:
            with Doubled():
                return original(x)
        if kind == 5:
            return torch.func.functional_call(
                module.inner, dict(module.inner.named_parameters()), x
            )
        if kind == 6:
            pairs = torch.view_as_complex(original(x).reshape(*x.shape[:-1], -1, 2).contiguous())
            return torch.view_as_real(
                pairs * torch.polar(torch.ones(()), torch.tensor(0.7))
            ).flatten(-2)
        if kind == 0:
            return torch.tanh(original(x).double()).to(x.dtype)
        if kind == 1:
            with torch.autocast("cpu", enabled=False):
                return original(x)
        if kind == 2:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return original(x).to(x.dtype)
        return torch.vmap(torch.tanh)(original(x))

    if kind == 5:
        module.inner = copy.deepcopy(module)
    wrapped_method(module, around)


@edit("other")
def random_numbers(m: EditedModel) -> None:
    kind, c = m.kind(4), m.number(0.1, 0.4)
    module = m.mlp_of(m.pick(list(m.layers)))
    changes = (
        lambda x: x + c * torch.randn_like(x),
        lambda x: functional.dropout(x, c, training=True),
        lambda x: functional.dropout(x, c, training=module.training),
        lambda x: nn.Dropout(c).eval()(x),
    )
    module.register_forward_hook(lambda _, __, out: changes[kind](out))


@edit("other")
def scripted_or_compiled(m: EditedModel) -> None:
    layer = m.pick(list(m.layers))
    holder, name, own = m.activations_of(layer)[0]
    kind = m.kind(2)
    if kind == 0:
        setattr(holder, name, torch.jit.script(nn.SiLU()))
    else:
        own.forward = torch.compile(own.forward, backend="eager")
