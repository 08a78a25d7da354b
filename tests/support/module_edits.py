"""Edits of a model's modules: what they hold, the hooks on them, and their gradients."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as process_hooks
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from transformers.pytorch_utils import Conv1D

from tests.support.edited_model import (
    Change,
    EditedModel,
    UnfitError,
    changed,
    edit,
    hidden_of,
    wrapped_method,
)

# ------------------------------------------------------------------------- activations and norms


class Bent(nn.Module):
    """An activation with a parameter."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.by * x)


@edit(5)
def activation(m: EditedModel) -> None:
    """Another module, or a function of its own."""
    c, change, kind = m.number(0.3, 2), m.token_function(), m.kind(5)
    makers: tuple[Callable[[], nn.Module], ...] = (
        nn.ReLU, nn.GELU, nn.Mish, nn.ELU, nn.Softplus, nn.Hardswish, nn.LeakyReLU, nn.Identity,
        lambda: nn.GELU("tanh"), lambda: nn.ReLU6(inplace=True), lambda: Bent(c), nn.Tanhshrink,
        lambda: nn.PReLU(init=c), nn.Softsign, lambda: nn.Hardtanh(-c, c), lambda: nn.CELU(c),
        lambda: nn.Threshold(0.1, c), nn.LogSigmoid, nn.RReLU, lambda: nn.Softmax(-1),
    )  # fmt: skip
    maker = m.pick(makers)
    shared = maker()
    for layer in m.some_layers():
        for holder, name, own in m.activations_of(layer):
            if kind < 2:
                setattr(holder, name, shared if kind else maker())
            elif kind == 2:
                own.forward = change
            elif kind == 3:
                wrapped_method(own, lambda original, x: change(original(x)))
            else:
                del holder._modules[name]
                setattr(holder, name, change)


@edit(8)
def norm(m: EditedModel) -> None:
    """Another norm, one norm for several layers, another epsilon, or another computation."""
    width, eps, c, kind = m.width(), m.pick((1e-6, 0.1, 0.5)), m.number(0.2, 2), m.kind(4)
    makers: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.LayerNorm(width, eps),
        lambda: nn.LayerNorm(width, eps, elementwise_affine=False),
        lambda: nn.RMSNorm(width, eps),
        lambda: nn.RMSNorm(width),
        nn.Identity,
        lambda: nn.Sequential(nn.LayerNorm(width, eps, bias=False), nn.Tanh()),
    )
    around = m.pick(
        (
            lambda original, x: original(x) + c * x,
            lambda original, x: original(c * x),
            lambda original, x: original(x.double()).to(x.dtype),
            lambda original, x: original(original(x)),
        )
    )
    maker, shared = m.pick(makers), m.pick(m.norms_of(m.layers[0]))[2]
    for layer in m.some_layers():
        norms = [found for found in m.norms_of(layer) if found[0] is layer]
        for holder, name, own in m.some(norms):
            if kind == 0:
                setattr(holder, name, m.perturbed(maker()))
            elif kind == 1:
                setattr(holder, name, shared)
            elif kind == 2:
                for field in {"variance_epsilon", "eps"} & vars(own).keys():
                    setattr(own, field, m.number(0.01, 1))
            else:
                wrapped_method(own, around)


@edit(2)
def norm_behind(m: EditedModel) -> None:
    """A norm of the result of an attention or of an MLP."""
    extra = m.perturbed(nn.LayerNorm(m.width())).requires_grad_(m.chance(0.5))
    for layer in m.some_layers():
        module = m.attention_of(layer) if m.chance(0.5) else m.mlp_of(layer)
        if m.chance(0.5):
            module.extra_norm = extra
        module.register_forward_hook(lambda _, __, out: changed(out, extra))


# ---------------------------------------------------------------------------------------- residuals


@edit(3)
def scaled_residual(m: EditedModel) -> None:
    c, gate = m.number(0.3, 1.5), nn.Parameter(0.3 * m.vector(m.width()))
    change = m.pick(
        (
            lambda x, out: c * x + out,
            lambda x, out: x + c * (out - x),
            lambda x, out: out + torch.sigmoid(gate) * x,
            lambda x, out: out - x,
            lambda x, out: x + (out - x).clamp(-c, c),
        )
    )

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        x = hidden_of(args, kwargs)
        return changed(original(*args, **kwargs), lambda out: change(x, out))

    for layer in m.some_layers():
        wrapped_method(layer, around)


@edit(2)
def other_order_in_a_layer(m: EditedModel) -> None:
    kind = m.kind(4)
    if not all(hasattr(m.layers[0], f"{n}_layernorm") for n in ("input", "post_attention")):
        raise UnfitError
    m.mlp_of(m.layers[0])

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x, mlp = hidden_states, m.mlp_of(self)
        before, behind = self.input_layernorm, self.post_attention_layernorm

        def attend(x: Tensor) -> Tensor:
            return m.attention_of(self)(hidden_states=x, **kwargs)[0]  # type: ignore[no-any-return]

        if kind == 0:
            return x + attend(before(x)) + mlp(before(x))
        if kind == 1:
            x = before(x + attend(x))
            return behind(x + mlp(x))
        if kind == 2:
            x = x + mlp(behind(x))
            return x + attend(before(x))
        return attend(before(x)) + mlp(behind(x))

    for layer in m.some_layers():
        layer.forward = types.MethodType(forward, layer)


@edit()
def residual_from_elsewhere(m: EditedModel) -> None:
    """A layer adds the embedding, or the result of an earlier layer."""
    kept: dict[str, Tensor] = {}
    kind, c = m.kind(3), m.number(0.1, 0.6)

    def keep(_: Any, __: Any, out: Any) -> None:
        kept["x"] = out if isinstance(out, Tensor) else out[0]

    def add(_: Any, __: Any, out: Any) -> Any:
        before = kept.get("x")
        if kind == 2:
            keep(None, None, out)
        return out if before is None else changed(out, lambda y: y + c * before)

    if kind < 2:
        source = m.model.get_input_embeddings() if kind else m.layers[0]
        source.register_forward_hook(keep)
    m.model.register_forward_pre_hook(lambda _, __: kept.clear())
    for layer in m.some(list(m.layers)[1:]):
        layer.register_forward_hook(add)


# ------------------------------------------------------------------------------------------ linears


class Doubled(nn.Parameter):
    """A parameter that doubles what `functional.linear` makes of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * out if func is functional.linear else out


class Bounded(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 0.7 * torch.tanh(weight)


class Beside(nn.Module):
    """A linear module with a LoRA written by hand."""

    def __init__(self, inner: nn.Linear, by: float) -> None:
        super().__init__()
        self.inner, self.by = inner, by
        self.a = nn.Linear(inner.in_features, 2, bias=False)
        self.b = nn.Linear(2, inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.by * self.b(self.a(x))  # type: ignore[no-any-return]


def _transposed(linear: nn.Linear) -> Conv1D:
    new = Conv1D(linear.out_features, linear.in_features)
    new.weight.data.copy_(linear.weight.data.T)
    if linear.bias is not None:
        new.bias.data.copy_(linear.bias.data)
    return new


@edit(4)
def linear(m: EditedModel) -> None:
    """Of another form, or with a weight that is computed."""
    kind, c, has_bias = m.kind(10), m.number(0.3, 1.5), m.chance(0.5)
    for layer in m.some_layers():
        holder, name, own = m.linear_of(layer)
        if not isinstance(own, nn.Linear):
            raise UnfitError
        if kind > 2:  # peft may adapt the first three
            m.unadapted |= {name, "a", "b", "inner"}
        if kind == 0:
            own.bias = nn.Parameter(0.2 * m.vector(own.out_features))
        elif kind == 1:
            own.bias = None  # type: ignore[assignment]
        elif kind == 2:
            own.weight.data.mul_(8).round_().div_(8)
        elif kind == 3:
            first = nn.Linear(own.in_features, 8, bias=False)
            second = nn.Linear(8, own.out_features, bias=has_bias)
            setattr(holder, name, m.filled(nn.Sequential(first, second)))
        elif kind == 4:
            setattr(holder, name, _transposed(own))
        elif kind == 5:
            setattr(holder, name, m.perturbed(Beside(own, c)))
        elif kind == 6:
            own.weight = Doubled(own.weight.data)
        elif kind == 7:
            parametrize.register_parametrization(own, "weight", Bounded())
        elif kind == 8:
            parametrizations.weight_norm(own)
        else:
            prune.l1_unstructured(own, "weight", amount=0.5)


@edit(2)
def linear_with_a_forward_of_its_own(m: EditedModel) -> None:
    c = m.number(0.3, 1.5)

    def swapped(own: Any, x: Tensor) -> Tensor:
        half = own.out_features // 2
        halves = (own.weight[half:], own.weight[:half])
        return torch.cat([functional.linear(x, weight) for weight in halves], -1)

    forwards = (
        swapped,
        lambda own, x: torch.einsum("bti,oi->bto", x, own.weight),
        lambda own, x: x @ own.weight.T * c,
        lambda own, x: nn.Linear.forward(own, x) + c * nn.Linear.forward(own, x.flip(-1)),
        lambda own, x: nn.Linear.forward(own, x) + c * x.mean(-1, keepdim=True),
    )
    forward = m.pick(forwards)
    for layer in m.some_layers():
        _, name, own = m.linear_of(layer)
        if not isinstance(own, nn.Linear):
            raise UnfitError
        m.unadapted.add(name)
        own.forward = types.MethodType(forward, own)


@edit()
def mixture_of_experts(m: EditedModel) -> None:
    """Dense experts with weights from a router."""
    kind, layer = m.kind(3), m.pick(list(m.layers))
    mlp = m.mlp_of(layer)

    class Experts(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.experts = nn.ModuleList([mlp, copy.deepcopy(mlp)])
            self.router = nn.Linear(width, 2)

        def forward(self, x: Tensor) -> Any:
            weights = self.router(x).softmax(-1)
            if kind == 1:
                best = weights.argmax(-1, keepdim=True)
                weights = torch.zeros_like(weights).scatter(-1, best, 1.0) * weights
            if kind == 2:
                weights = torch.where(weights > 0.5, weights, 0.0)
            return sum(weights[..., i, None] * own(x) for i, own in enumerate(self.experts))

    setattr(layer, next(n for n, c in layer.named_children() if c is mlp), Experts(m.width()))
    m.unadapted |= {n for n, c in mlp.named_modules() if isinstance(c, nn.Linear)} | {"router"}


# ----------------------------------------------------------------------- the embedding and the head


@edit(2)
def head(m: EditedModel) -> None:
    kind, c = m.kind(7), m.number(0.3, 2)
    embedding, own = m.model.get_input_embeddings(), m.model.get_output_embeddings()
    if kind < 4:
        changes: tuple[Change, ...] = (
            lambda out: c * torch.tanh(out / c),
            lambda out: out.log_softmax(-1),
            lambda out: torch.cat([out, out[..., :5]], -1),
            lambda out: out[..., :-3],
        )
        own.register_forward_hook(lambda _, __, out: changes[kind](out))
    elif kind == 4:
        own.bias = nn.Parameter(m.vector(own.weight.shape[0]))
    elif kind == 5:
        own.weight = nn.Parameter(0.1 * m.vector(*own.weight.shape))
    elif own.weight.shape == embedding.weight.shape:
        own.weight = embedding.weight


@edit(2)
def embedding(m: EditedModel) -> None:
    kind, c = m.kind(6), m.number(0.3, 2)
    own = m.model.get_input_embeddings()

    def embedded(original: Any, *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs.pop("input_ids")
        return original(None, *args[1:], **{**kwargs, "inputs_embeds": c * own(ids)})

    def shifted(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % 100}

    if kind == 0:
        own.register_forward_hook(lambda _, __, out: c * out)
    elif kind == 1:
        m.model.resize_token_embeddings(m.config.vocab_size + 7)
    elif kind == 2:
        own.second = nn.Embedding(own.num_embeddings, own.embedding_dim)
        own.register_forward_hook(lambda module, given, out: out + module.second(given[0]))
    elif kind == 3:
        own.max_norm = c
    elif kind == 4:
        wrapped_method(m.trunk, embedded)
    else:
        m.model.register_forward_pre_hook(
            lambda _, args, kwargs: (
                args,
                {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % 100},
            ),
            with_kwargs=True,
        )


# -------------------------------------------------------------------------------------------- hooks


@edit(10)
def hook(m: EditedModel) -> None:
    """Before or behind modules, with every option that PyTorch has."""
    change, kind = m.token_function(), m.kind(6)
    options: dict[str, bool] = {"prepend": m.chance(0.3)}

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        if args and args[0].is_floating_point():
            return (change(args[0]), *args[1:]), kwargs
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
        return None

    def plain(_: Any, args: Any) -> Any:
        return (change(args[0]), *args[1:]) if args and args[0].is_floating_point() else None

    for _ in range(m.draw.randint(1, 2)):
        module = m.pick((m.model, m.trunk)) if kind == 5 else m.site()
        if kind == 0:
            module.register_forward_pre_hook(before, with_kwargs=True, **options)
        elif kind == 1:
            module.register_forward_pre_hook(plain, **options)
        elif kind == 2:
            module.register_forward_hook(
                lambda _, __, ___, out: changed(out, change),
                with_kwargs=True, always_call=m.chance(0.5), **options,
            )  # fmt: skip
        else:
            module.register_forward_hook(lambda _, __, out: changed(out, change), **options)


@edit(2)
def hook_that_writes_in_place(m: EditedModel) -> None:
    c, kind = m.number(0.3, 1.5), m.kind(5)

    def write(x: Tensor) -> Tensor:
        if kind == 3:
            x[..., :3] *= c
        if kind == 4:
            x[..., 1] = c
        writes = (lambda: x.mul_(c), lambda: x.clamp_(-c, c), lambda: x.add_(c).tanh_())
        return writes[kind]() if kind < 3 else x

    for _ in range(m.draw.randint(1, 2)):
        m.part().register_forward_hook(lambda _, __, out: (changed(out, write), None)[1])


@edit(2)
def hook_of_the_process(m: EditedModel) -> None:
    """Registered for all modules; it changes those of one class."""
    change = m.token_function()
    chosen = type(m.pick([m.mlp_of(m.layers[0]), m.norms_of(m.layers[0])[0][2]]))

    def behind(module: nn.Module, _: Any, out: Any) -> Any:
        return change(out) if type(module) is chosen else None

    def before(module: nn.Module, args: Any) -> Any:
        return (change(args[0]), *args[1:]) if type(module) is chosen and args else None

    if m.chance(0.5):
        m.undo.callback(process_hooks.register_module_forward_hook(behind).remove)
    else:
        m.undo.callback(process_hooks.register_module_forward_pre_hook(before).remove)


@edit(3)
def method_of_one_instance(m: EditedModel) -> None:
    change, kind, module = m.token_function(), m.kind(4), m.site()
    own: Any = type(module)
    if isinstance(module, nn.Embedding):
        raise UnfitError
    if kind == 0:
        wrapped_method(module, lambda original, *a, **k: changed(original(*a, **k), change))
    elif kind == 1:
        original = own.forward
        m.set(own, "forward", lambda s, *a, **k: changed(original(s, *a, **k), change))
    else:
        name = "forward" if kind == 2 else "__call__"
        around = lambda s, *a, **k: changed(getattr(own, name)(s, *a, **k), change)  # noqa: E731
        module.__class__ = type("Changed", (own,), {name: around})


# ---------------------------------------------------------------------------------------- gradients


@edit(2)
def gradient_hook(m: EditedModel) -> None:
    """A hook of a tensor, of a node of autograd, of a module, or of a parameter."""
    c, kind, module = m.number(1.5, 3), m.kind(7), m.part()

    def grown(grads: Any) -> Any:
        return tuple(None if g is None else c * g for g in grads)

    def hooked(x: Tensor) -> Tensor:
        if x.requires_grad:
            y = x if kind == 0 else x * 1.0
            assert y.grad_fn is not None
            if kind < 2:
                y.register_hook(lambda g: c * g)
            elif kind == 2:
                y.grad_fn.register_prehook(grown)
            else:
                y.grad_fn.register_hook(lambda grads, _: grown(grads))
            return y
        return x

    if kind < 4:
        module.register_forward_hook(lambda _, __, out: changed(out, hooked))
    elif kind == 4:
        module.register_full_backward_hook(lambda _, given, __: grown(given))
    elif kind == 5:
        m.undo.callback(
            process_hooks.register_module_full_backward_pre_hook(
                lambda own, out: grown(out) if own is module else None
            ).remove
        )
    else:
        m.linear_of(module)[2].weight.register_hook(lambda g: 3 * g)


class Straight(torch.autograd.Function):
    """Scaled gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.scale * gradient, None


@edit(2)
def gradient_that_is_not_the_forwards(m: EditedModel) -> None:
    c = m.number(0.2, 0.8)

    def without(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.tanh(x)
        return x + y

    def packed(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: c * t):
            return torch.tanh(x)

    def disabled(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        y = torch.sin(x)
        torch.set_grad_enabled(True)
        return x + y

    def inference(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = torch.tanh(x)
        return x + y.clone()

    def own_gradient(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(leaf).sum(), leaf)
        return x + slope

    changes: tuple[Change, ...] = (
        lambda x: c * x + (1 - c) * x.detach(),
        lambda x: x + ((x * 4).round() / 4 - x).detach(),
        lambda x: Straight.apply(x, c),  # type: ignore[no-untyped-call,no-any-return]
        lambda x: x + c * x.data,
        lambda x: x.clone().detach_() * c + x,
        without,
        packed,
        disabled,
        inference,
        own_gradient,
    )
    change = m.pick(changes)
    m.part().register_forward_hook(lambda _, __, out: changed(out, change))


@edit()
def checkpointed_layer(m: EditedModel) -> None:
    """An equal gradient, by a second computation of the forward."""
    kind, module = m.kind(3), m.mlp_of(m.pick(list(m.layers)))

    def around(original: Any, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args)
        return checkpoint.checkpoint(original, *args, use_reentrant=kind == 2)

    if kind == 0:
        m.model.gradient_checkpointing_enable()
    else:
        wrapped_method(module, around)


@edit()
def state_dict_hook(m: EditedModel) -> None:
    """The module saves other values than it computes with."""
    module: Any = m.mlp_of(m.pick(list(m.layers)))

    def scale(_: Any, state: Any, prefix: str, __: Any) -> None:
        for key in list(state):
            if key.startswith(prefix) and key.endswith("weight"):
                state[key] = 2 * state[key]

    original = m.model.state_dict
    kind = m.kind(3)
    if kind == 0:
        module.register_state_dict_post_hook(scale)
    elif kind == 1:
        module.register_load_state_dict_pre_hook(lambda *_: None)
    else:
        m.model.state_dict = lambda *a, **k: {n: 1.5 * t for n, t in original(*a, **k).items()}


# -------------------------------------------------------------------------- other ways of PyTorch's


class Doubling(TorchFunctionMode):
    """Doubles the result of every `functional.linear`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is functional.linear else out


@edit()
def context_of_a_module(m: EditedModel) -> None:
    """Another dtype, a mode, complex numbers, or a functional call inside a module."""
    kind, module = m.kind(7), m.mlp_of(m.pick(list(m.layers)))

    def around(original: Any, x: Tensor) -> Any:
        if kind == 0:
            return torch.tanh(original(x).double()).to(x.dtype)
        if kind in (1, 2):
            with torch.autocast("cpu", enabled=kind == 2, dtype=torch.bfloat16):
                return original(x).to(x.dtype)
        if kind == 3:
            return torch.vmap(torch.tanh)(original(x))
        if kind == 4:
            with Doubling():
                return original(x)
        if kind == 5:
            parameters = dict(module.inner.named_parameters())
            return torch.func.functional_call(module.inner, parameters, x)
        pairs = torch.view_as_complex(original(x).reshape(*x.shape[:-1], -1, 2).contiguous())
        turn = torch.polar(torch.ones(()), torch.tensor(0.7))
        return torch.view_as_real(pairs * turn).flatten(-2)

    if kind == 5:
        module.inner = copy.deepcopy(module)
    wrapped_method(module, around)


@edit()
def random_or_compiled(m: EditedModel) -> None:
    c, kind, layer = m.number(0.1, 0.4), m.kind(5), m.pick(list(m.layers))
    module = m.mlp_of(layer)
    changes: tuple[Change, ...] = (
        lambda x: x + c * torch.randn_like(x),
        lambda x: functional.dropout(x, c, training=True),
        lambda x: functional.dropout(x, c, training=module.training),
    )
    if kind < 3:
        module.register_forward_hook(lambda _, __, out: changes[kind](out))
        return
    holder, name, own = m.activations_of(layer)[0]
    if kind == 3:
        setattr(holder, name, torch.jit.script(nn.SiLU()))
    else:
        own.forward = torch.compile(own.forward, backend="eager")
