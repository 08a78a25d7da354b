"""A small model while edits change it in place, and what edits of a model have in common."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

Item = TypeVar("Item")
LONGEST = 311
"""Tokens of the longest sequence that is compared: beyond every threshold that an edit draws."""
MOST = 300
"""The greatest threshold."""
_WIDEST = 1024
"""More than any tensor's features."""
_ATTENTION = ("self_attn", "self_attention", "attention", "attn")
_MLP = ("mlp", "ffn", "block_sparse_moe")


class UnfitError(Exception):
    """An edit has nothing to change in a model of this architecture."""


@dataclass(frozen=True)
class Edit:
    """A kind of change.

    Attributes:
        name: of its function.
        group: the kind of edits that it belongs to.
        apply: makes the change.
        weight: how often it is drawn.
        families: names of the families that it fits; empty for those of all or many.
    """

    name: str
    group: str
    apply: Callable[[EditedModel], None]
    weight: float
    families: tuple[str, ...]


EDITS: dict[str, Edit] = {}


def edit(group: str, weight: float = 1.0, families: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Register a function as a kind of change."""

    def note(apply: Callable[[EditedModel], None]) -> Callable[[EditedModel], None]:
        EDITS[apply.__name__] = Edit(apply.__name__, group, apply, weight, families)
        return apply

    return note


@dataclass
class EditedModel:
    """A causal LM of transformers that is edited in place.

    Attributes:
        model: the causal LM.
        undo: takes back what edits change outside the model.
        draw: the numbers of the present edit; the same seed draws the same edit.
        drawn: what the present edit has drawn, in words.
        unadapted: names of linear modules that do more than their product, so that peft's adapter
            would not be where pcg's is.
    """

    model: Any
    undo: contextlib.ExitStack
    draw: Random = field(default_factory=Random)
    drawn: list[str] = field(default_factory=list)
    unadapted: set[str] = field(default_factory=set)

    # --------------------------------------------------------------------------- parts of a model

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def trunk(self) -> Any:
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def layers_path(self) -> str:
        for path, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList):
                return str(path)
        raise UnfitError

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_submodule(self.layers_path)  # type: ignore[no-any-return]

    @layers.setter
    def layers(self, layers: nn.ModuleList) -> None:
        parent, _, name = self.layers_path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, layers)

    @staticmethod
    def attention_of(layer: nn.Module) -> Any:
        return _child(layer, _ATTENTION)

    @staticmethod
    def mlp_of(layer: nn.Module) -> Any:
        return _child(layer, _MLP)

    @property
    def has_interface(self) -> bool:
        """True if its attention goes through transformers' AttentionInterface."""
        return bool(self.model._supports_attention_backend)

    @property
    def has_plain_projections(self) -> bool:
        """True if its attention has q, k and v of its own, and rotary tables that it is given."""
        own = self.attention_of(self.layers[0])
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "scaling", "num_key_value_groups")
        return all(hasattr(own, name) for name in names) and hasattr(self.trunk, "rotary_emb")

    # --------------------------------------------------------------------------------- drawn parts

    def pick(self, items: Sequence[Item]) -> Item:
        place = self.draw.randrange(len(items))
        item = items[place]
        if isinstance(item, types.LambdaType):
            self.drawn.append(" ".join(inspect.getsource(item).split()))
        else:
            is_word = isinstance(item, str | int | float)
            self.drawn.append(str(item) if is_word else f"{type(item).__name__} {place}")
        return item

    def kind(self, count: int) -> int:
        """A number from 0 to below another."""
        drawn = self.draw.randrange(count)
        self.drawn.append(f"kind {drawn}")
        return drawn

    def some(self, items: Sequence[Item]) -> list[Item]:
        """All items, one of them, or a few; at least one."""
        if not items:
            raise UnfitError
        count = self.draw.choice((len(items), 1, self.draw.randint(1, len(items))))
        chosen = sorted(self.draw.sample(range(len(items)), count))
        return [items[i] for i in chosen]

    def some_layers(self) -> list[nn.Module]:
        return self.some(list(self.layers))

    def threshold(self) -> int:
        """A number of tokens, from 1 on; as often small as large."""
        drawn = self.draw.choice((self.draw.randint(1, MOST), self.draw.randint(1, 60)))
        self.drawn.append(f"threshold {drawn}")
        return drawn

    def number(self, low: float, high: float) -> float:
        drawn = round(self.draw.uniform(low, high), 3)
        self.drawn.append(f"number {drawn}")
        return drawn

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def vector(self, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.draw.randrange(2**31))
        return torch.randn(width, generator=generator)

    def linear_of(self, root: nn.Module) -> tuple[nn.Module, str, Any]:
        """A linear module below another: what holds it, its name there, and itself."""
        found = [
            (holder, name, child)
            for holder in root.modules()
            for name, child in holder._modules.items()
            if isinstance(child, nn.Linear | Conv1D)
        ]
        if not found:
            raise UnfitError
        return self.pick(found)

    def children_of(self, root: nn.Module, word: str) -> list[tuple[nn.Module, str, Any]]:
        """The modules below another whose class or name has a word in it."""
        found = [
            (holder, name, child)
            for holder in root.modules()
            for name, child in holder._modules.items()
            if child is not None and (word in name or word in type(child).__name__.lower())
        ]
        if not found:
            raise UnfitError
        return found

    def activations_of(self, layer: nn.Module) -> list[tuple[nn.Module, str, Any]]:
        found = [
            (holder, name, child)
            for holder in layer.modules()
            for name, child in holder._modules.items()
            if child is not None
            and ("act" in name or "gelu" in name)
            and not list(child.children())
        ]
        if not found:
            raise UnfitError
        return found

    def site(self) -> nn.Module:
        """Any module that computes."""
        layer = self.pick(list(self.layers))
        kind = self.kind(8)
        if kind == 0:
            return layer
        if kind == 1:
            return self.attention_of(layer)  # type: ignore[no-any-return]
        if kind == 2:
            return self.mlp_of(layer)  # type: ignore[no-any-return]
        if kind == 3:
            return self.pick(self.children_of(layer, "norm"))[2]  # type: ignore[no-any-return]
        if kind == 4:
            return self.pick(self.activations_of(layer))[2]  # type: ignore[no-any-return]
        if kind == 5:
            return self.model.get_input_embeddings()  # type: ignore[no-any-return]
        if kind == 6:
            return self.model.get_output_embeddings()  # type: ignore[no-any-return]
        _, name, linear = self.linear_of(layer)
        self.unadapted.add(name)
        return linear  # type: ignore[no-any-return]

    def filled(self, module: nn.Module) -> nn.Module:
        """The module, with weights of which each is something."""
        for parameter in module.parameters():
            drawn = self.vector(parameter.numel()).view(parameter.shape)
            parameter.data.copy_(0.2 * drawn)
        return module

    def width(self) -> int:
        return int(self.model.get_input_embeddings().embedding_dim)

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of something that outlives the model."""
        before = getattr(holder, name)
        self.undo.callback(setattr, holder, name, before)
        setattr(holder, name, value)

    def token_function(self) -> Callable[[Tensor], Tensor]:
        """A function of each token alone."""
        c, numbers = self.number(0.3, 1.7), self.vector(_WIDEST)

        def drawn(x: Tensor) -> Tensor:
            return numbers[: x.shape[-1]]

        functions: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda x: c * x,
            lambda x: x / (1 + c),
            lambda x: x + c,
            lambda x: x - c * x.mean(-1, keepdim=True),
            lambda x: c * torch.tanh(x / c),
            lambda x: x.clamp(-c, c),
            lambda x: x + c * torch.sin(x),
            lambda x: x * torch.sigmoid(c * x),
            lambda x: functional.layer_norm(x, x.shape[-1:]),
            lambda x: functional.normalize(x, dim=-1) * c,
            lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c),
            lambda x: torch.where(x > 0, x, c * x),
            lambda x: functional.softmax(x, -1) * x.shape[-1] * c,
            lambda x: x + x.abs() ** 1.5 * 0.1,
            lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
            lambda x: x.float().to(x.dtype) * c,
            lambda x: torch.maximum(x, c * x),
            lambda x: x - x.amax(-1, keepdim=True) * 0.1,
            lambda x: x + c * x[..., :1],
            lambda x: functional.dropout(x, 0.3, training=False) * c,
        )
        vector = (lambda x: x + c * drawn(x), lambda x: x * (1 + 0.3 * drawn(x)))
        return self.pick((*functions, *functions, *vector))


def _child(layer: nn.Module, names: Sequence[str]) -> Any:
    for name in names:
        if isinstance(getattr(layer, name, None), nn.Module):
            return getattr(layer, name)
    raise UnfitError


def changed(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module returns, with its tensor changed."""
    if isinstance(out, Tensor):
        return change(out)
    if isinstance(out, tuple):
        return (change(out[0]), *out[1:])
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(out, name, None), Tensor):
            out[name] = change(out[name])
            return out
    raise UnfitError


def wrapped_method(module: Any, around: Callable[..., Any]) -> None:
    """Replace a module's forward by `around(original, *args, **kwargs)`."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    module.forward = forward
