"""A small model while edits change it in place, and the functions that edits share."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

Item = TypeVar("Item")
Change = Callable[[Tensor], Tensor]
LONGEST = 311
"""Tokens of the longest compared sequence, beyond every threshold that an edit draws."""
_ATTENTION = ("self_attn", "self_attention", "attention", "attn")
_MLP = ("mlp", "ffn", "block_sparse_moe")


class UnfitError(Exception):
    """An edit has nothing to change in a model of this architecture."""


@dataclass(frozen=True)
class Edit:
    """A kind of change.

    Attributes:
        name: name of its function.
        apply: makes the change.
        weight: how often the edit is drawn.
        families: names of the families that the edit fits; empty for all.
    """

    name: str
    apply: Callable[[EditedModel], None]
    weight: int
    families: tuple[str, ...]


EDITS: dict[str, Edit] = {}


def edit(weight: int = 1, families: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Register a function as a kind of change."""

    def note(apply: Callable[[EditedModel], None]) -> Callable[[EditedModel], None]:
        EDITS[apply.__name__] = Edit(apply.__name__, apply, weight, families)
        return apply

    return note


@dataclass
class EditedModel:
    """A causal LM of transformers that is edited in place.

    Attributes:
        model: the causal LM.
        undo: reverts what edits change outside the model.
        draw: draws the numbers of the present edit; an equal seed draws an equal edit.
        unadapted: names of linear modules that compute more than their product, where peft's
            adapter would have another place than pcg's.
    """

    model: Any
    undo: contextlib.ExitStack
    draw: Random = field(default_factory=Random)
    unadapted: set[str] = field(default_factory=set)

    # --------------------------------------------------------------------------- parts of a model

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def trunk(self) -> Any:
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def _layers_path(self) -> str:
        modules = self.model.named_modules()
        return next(path for path, module in modules if isinstance(module, nn.ModuleList))

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_submodule(self._layers_path)  # type: ignore[no-any-return]

    @layers.setter
    def layers(self, layers: nn.ModuleList) -> None:
        parent, _, name = self._layers_path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, layers)

    @staticmethod
    def attention_of(layer: nn.Module) -> Any:
        return _child(layer, _ATTENTION)

    @staticmethod
    def mlp_of(layer: nn.Module) -> Any:
        return _child(layer, _MLP)

    @property
    def attentions(self) -> list[Any]:
        return [self.attention_of(layer) for layer in self.layers]

    def needs_interface(self) -> None:
        """Raise UnfitError unless attention goes through transformers' AttentionInterface."""
        if not self.model._supports_attention_backend:
            raise UnfitError

    def needs_plain_projections(self) -> None:
        """Raise UnfitError unless attention has q, k and v, and rotary tables as arguments."""
        own = self.attention_of(self.layers[0])
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "scaling", "num_key_value_groups")
        if not all(hasattr(own, n) for n in names) or not hasattr(self.trunk, "rotary_emb"):
            raise UnfitError

    def children_of(
        self, root: nn.Module, fits: Callable[[str, Any], bool]
    ) -> list[tuple[nn.Module, str, Any]]:
        """Modules below `root` that fit: each with its holder and its name there."""
        found = [
            (holder, name, child)
            for holder in root.modules()
            for name, child in holder._modules.items()
            if child is not None and fits(name, child)
        ]
        if not found:
            raise UnfitError
        return found

    def norms_of(self, root: nn.Module) -> list[tuple[nn.Module, str, Any]]:
        return self.children_of(
            root, lambda n, c: "norm" in n or "norm" in type(c).__name__.lower()
        )

    def activations_of(self, layer: nn.Module) -> list[tuple[nn.Module, str, Any]]:
        return self.children_of(
            layer, lambda n, c: ("act" in n or "gelu" in n) and not list(c.children())
        )

    def linear_of(self, root: nn.Module) -> tuple[nn.Module, str, Any]:
        """Pick a linear module: its holder, its name there, and itself."""
        return self.pick(self.children_of(root, lambda _, c: isinstance(c, nn.Linear | Conv1D)))

    def site(self) -> Any:
        """Pick any module that computes."""
        layer, kind = self.pick(list(self.layers)), self.kind(8)
        if kind == 7:
            _, name, linear = self.linear_of(layer)
            self.unadapted.add(name)
            return linear
        sites: tuple[Callable[[], Any], ...] = (
            lambda: layer,
            lambda: self.attention_of(layer),
            lambda: self.mlp_of(layer),
            lambda: self.pick(self.norms_of(layer))[2],
            lambda: self.pick(self.activations_of(layer))[2],
            self.model.get_input_embeddings,
            self.model.get_output_embeddings,
        )
        return sites[kind]()

    def part(self) -> Any:
        """Pick a layer, an attention or an MLP."""
        layer = self.pick(list(self.layers))
        return self.pick((layer, self.mlp_of(layer), self.attention_of(layer)))

    def width(self) -> int:
        return int(self.model.get_input_embeddings().embedding_dim)

    # --------------------------------------------------------------------------------- drawn values

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.draw.randrange(len(items))]

    def kind(self, count: int) -> int:
        return self.draw.randrange(count)

    def some(self, items: Sequence[Item]) -> list[Item]:
        """All items, one of them, or a few; at least one."""
        if not items:
            raise UnfitError
        count = self.draw.choice((len(items), 1, self.draw.randint(1, len(items))))
        return [items[i] for i in sorted(self.draw.sample(range(len(items)), count))]

    def some_layers(self) -> list[nn.Module]:
        return self.some(list(self.layers))

    def threshold(self) -> int:
        """A number of tokens, from 1 to 300; as often small as large."""
        return self.draw.choice((self.draw.randint(1, 300), self.draw.randint(1, 60)))

    def number(self, low: float, high: float) -> float:
        return round(self.draw.uniform(low, high), 3)

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def vector(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.draw.randrange(2**31))
        return torch.randn(*shape, generator=generator)

    def filled(self, module: nn.Module) -> nn.Module:
        """The module with weights none of which is zero."""
        for parameter in module.parameters():
            parameter.data.copy_(0.2 * self.vector(*parameter.shape))
        return module

    def perturbed(self, module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            parameter.data += 0.1 * self.vector(*parameter.shape)
        return module

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of an object that outlives the model."""
        self.undo.callback(setattr, holder, name, getattr(holder, name))
        setattr(holder, name, value)

    def register(self, mapping: dict[str, Any], name: str, value: Any) -> None:
        """Set an entry of a mapping that outlives the model."""
        before = dict(mapping)
        self.undo.callback(lambda: (mapping.clear(), mapping.update(before)))
        mapping[name] = value

    def token_function(self) -> Change:
        """A function of each token alone."""
        c, numbers = self.number(0.3, 1.7), self.vector(1024)
        functions: tuple[Change, ...] = (
            lambda x: c * x,
            lambda x: x / (1 + c),
            lambda x: x + c,
            lambda x: x - c * x.mean(-1, keepdim=True),
            lambda x: c * torch.tanh(x / c),
            lambda x: x.clamp(-c, c),
            lambda x: x + c * torch.sin(x),
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
            lambda x: x + c * numbers[: x.shape[-1]],
            lambda x: x * (1 + 0.3 * numbers[: x.shape[-1]]),
        )
        return self.pick(functions)


def _child(layer: nn.Module, names: Sequence[str]) -> Any:
    for name in names:
        if isinstance(getattr(layer, name, None), nn.Module):
            return getattr(layer, name)
    raise UnfitError


def hidden_of(args: Any, kwargs: Any) -> Tensor:
    """The hidden states among the arguments of a layer or of an attention."""
    return args[0] if args else kwargs["hidden_states"]  # type: ignore[no-any-return]


def changed(out: Any, change: Change) -> Any:
    """The result of a module, with its tensor changed."""
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
