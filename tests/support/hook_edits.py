"""Edits by hooks of every kind that PyTorch has, and of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as process_hooks
from torch.utils import checkpoint

from tests.support.edited_model import (
    EditedModel,
    UnfitError,
    changed,
    edit,
    wrapped_method,
)

# -------------------------------------------------------------------------------------------- hooks


@edit("forward hooks", 6)
def forward_hook(m: EditedModel) -> None:
    change, prepend = m.token_function(), m.chance(0.3)
    always, keyword = m.chance(0.3), m.chance(0.3)
    for _ in range(m.draw.randint(1, 2)):
        module = m.site()
        if keyword:
            module.register_forward_hook(
                lambda _, __, ___, out: changed(out, change),
                prepend=prepend, with_kwargs=True, always_call=always,
            )  # fmt: skip
        else:
            module.register_forward_hook(
                lambda _, __, out: changed(out, change), prepend=prepend, always_call=always
            )


@edit("forward hooks", 5)
def pre_hook(m: EditedModel) -> None:
    change = m.token_function()

    def with_kwargs(_: Any, args: Any, kwargs: Any) -> Any:
        if args and args[0].is_floating_point():
            return (change(args[0]), *args[1:]), kwargs
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
        return None

    def plain(_: Any, args: Any) -> Any:
        return (change(args[0]), *args[1:]) if args and args[0].is_floating_point() else None

    for _ in range(m.draw.randint(1, 2)):
        module = m.site()
        if m.chance(0.6):
            module.register_forward_pre_hook(with_kwargs, with_kwargs=True, prepend=m.chance(0.5))
        else:
            module.register_forward_pre_hook(plain)


@edit("forward hooks", 2)
def hook_of_the_whole_model(m: EditedModel) -> None:
    change = m.token_function()
    root = m.model if m.chance(0.5) else m.trunk
    root.register_forward_hook(lambda _, __, out: changed(out, change))


@edit("forward hooks", 2)
def hook_that_writes_in_place(m: EditedModel) -> None:
    c, kind = m.number(0.3, 1.5), m.kind(5)

    def write(x: Tensor) -> Tensor:
        if kind == 0:
            return x.mul_(c)
        if kind == 1:
            return x.clamp_(-c, c)
        if kind == 2:
            return x.add_(c).tanh_()
        if kind == 3:
            x[..., :3] *= c
            return x
        x[..., 1] = c
        return x

    for layer in m.some_layers():
        module = m.pick((layer, m.mlp_of(layer), m.attention_of(layer)))
        module.register_forward_hook(lambda _, __, out: (changed(out, write), None)[1])


@edit("forward hooks", 2)
def hook_of_the_process(m: EditedModel) -> None:
    """Registered for all modules; it changes those of one class."""
    kind, change = m.kind(2), m.token_function()
    chosen = type(m.pick([m.mlp_of(m.layers[0]), m.pick(m.children_of(m.layers[0], "norm"))[2]]))

    def behind(module: nn.Module, _: Any, out: Any) -> Any:
        return change(out) if type(module) is chosen else None

    def before(module: nn.Module, args: Any) -> Any:
        return (change(args[0]), *args[1:]) if type(module) is chosen and args else None

    if kind == 0:
        m.undo.callback(process_hooks.register_module_forward_hook(behind).remove)
    else:
        m.undo.callback(process_hooks.register_module_forward_pre_hook(before).remove)


@edit("forward hooks")
def hook_that_looks(m: EditedModel) -> None:
    """And changes nothing."""
    seen: dict[str, Any] = {}
    m.site().register_forward_hook(lambda _, args, out: seen.update(out=out) or None)
    m.layers[0].register_forward_pre_hook(lambda _, args: seen.update(args=args) or None)


@edit("forward hooks", 3)
def method_of_one_instance(m: EditedModel) -> None:
    change, kind = m.token_function(), m.kind(4)
    module: Any = m.site()
    if isinstance(module, nn.Embedding):
        raise UnfitError
    own = type(module)
    if kind == 0:
        wrapped_method(module, lambda original, *a, **k: changed(original(*a, **k), change))
    elif kind == 1:

        class Changed(own):  # type: ignore[misc,valid-type]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return changed(super().forward(*args, **kwargs), change)

        module.__class__ = Changed
    elif kind == 2:

        class Called(own):  # type: ignore[misc,valid-type]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return changed(super().__call__(*args, **kwargs), change)

        module.__class__ = Called
    else:
        original = own.forward
        m.set(own, "forward", lambda s, *a, **k: changed(original(s, *a, **k), change))


# ---------------------------------------------------------------------------------------- gradients


@edit("gradient hooks")
def tensor_hook(m: EditedModel) -> None:
    c, kind = m.number(1.5, 3), m.kind(4)

    def hooked(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        y = x if kind == 0 else x * 1.0
        if kind < 2:
            y.register_hook(lambda g: c * g)
        elif kind == 2:
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(lambda grads: tuple(c * g for g in grads))
        else:
            assert y.grad_fn is not None
            y.grad_fn.register_hook(
                lambda grads, _: tuple(None if g is None else c * g for g in grads)
            )
        return y

    layer = m.pick(list(m.layers))
    module = m.pick((layer, m.mlp_of(layer), m.attention_of(layer)))
    if m.chance(0.5):
        module.register_forward_hook(lambda _, __, out: changed(out, hooked))
    else:
        wrapped_method(module, lambda original, *a, **k: changed(original(*a, **k), hooked))


@edit("gradient hooks")
def backward_hook(m: EditedModel) -> None:
    c, kind = m.number(1.5, 3), m.kind(4)
    module = m.mlp_of(m.pick(list(m.layers)))

    def grown(grads: Any) -> Any:
        return tuple(None if g is None else c * g for g in grads)

    if kind == 0:
        module.register_full_backward_hook(lambda _, given, __: grown(given))
    elif kind == 1:
        module.register_full_backward_pre_hook(lambda _, out: grown(out))
    elif kind == 2:
        m.undo.callback(
            process_hooks.register_module_full_backward_hook(
                lambda own, given, __: grown(given) if own is module else None
            ).remove
        )
    else:
        m.undo.callback(
            process_hooks.register_module_full_backward_pre_hook(
                lambda own, out: grown(out) if own is module else None
            ).remove
        )


@edit("gradient hooks")
def hook_of_a_frozen_parameter(m: EditedModel) -> None:
    """Hooks on the base's parameters, which have no gradient while an adapter is trained."""
    _, _, linear = m.linear_of(m.pick(list(m.layers)))
    if m.chance(0.5):
        linear.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3))
    else:
        linear.weight.register_hook(lambda g: 3 * g)


class Straight(torch.autograd.Function):
    """Scaled gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.scale * gradient, None


@edit("gradients", 2)
def gradient_that_is_not_the_forwards(m: EditedModel) -> None:
    c, kind = m.number(0.2, 0.8), m.kind(12)

    def quantized(x: Tensor) -> Tensor:
        return (x * 4).round() / 4

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

    changes = (
        lambda x: c * x + (1 - c) * x.detach(),
        lambda x: x + (quantized(x) - x).detach(),
        without,
        lambda x: Straight.apply(x, c),
        lambda x: x + c * x.data,
        packed,
        disabled,
        lambda x: x + torch.tensor(x.detach().numpy()) if not x.requires_grad else x,
        inference,
        own_gradient,
        lambda x: torch.no_grad()(torch.tanh)(x) + x,
        lambda x: x.clone().detach_() * c + x,
    )
    layer = m.pick(list(m.layers))
    module = m.pick((layer, m.mlp_of(layer), m.attention_of(layer)))
    module.register_forward_hook(lambda _, __, out: changed(out, changes[kind]))


@edit("gradients")
def checkpointed_layer(m: EditedModel) -> None:
    """The same gradient, computed again."""
    kind = m.kind(3)
    if kind == 0:
        m.model.gradient_checkpointing_enable()
        return
    layer = m.pick(list(m.layers))
    module = m.mlp_of(layer)

    def around(original: Any, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args)
        return checkpoint.checkpoint(original, *args, use_reentrant=kind == 2)

    wrapped_method(module, around)


@edit("gradients")
def base_that_is_frozen_in_part(m: EditedModel) -> None:
    for parameter in list(m.model.parameters())[:: m.draw.randint(1, 3)]:
        parameter.requires_grad_(False)


# --------------------------------------------------------------------------------- state-dict hooks


@edit("state-dict hooks")
def state_dict_hook(m: EditedModel) -> None:
    """What is saved is not what is computed with."""
    kind = m.kind(6)
    module: Any = m.mlp_of(m.pick(list(m.layers)))
    _, _, linear = m.linear_of(module)

    def scale(_: Any, state: Any, prefix: str, __: Any) -> None:
        for key in list(state):
            if key.startswith(prefix) and key.endswith("weight"):
                state[key] = 2 * state[key]

    if kind == 0:
        module.register_state_dict_post_hook(scale)
    elif kind == 1:
        module._register_state_dict_hook(scale)
    elif kind == 2:
        module.register_state_dict_pre_hook(lambda own, prefix, keep: linear.weight.data.mul_(1.0))
    elif kind == 3:
        module.register_load_state_dict_pre_hook(lambda *_: None)
    elif kind == 4:
        module.register_load_state_dict_post_hook(lambda *_: None)
    else:
        original = m.model.state_dict

        def state_dict(*args: Any, **kwargs: Any) -> Any:
            return {
                key: 1.5 * value if "norm" in key or "ln_" in key else value
                for key, value in original(*args, **kwargs).items()
            }

        m.model.state_dict = state_dict
