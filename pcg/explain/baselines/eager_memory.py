"""Bytes that eager transformers + peft save for backward, measured with saved-tensor hooks.

    saved = Σ layers saved(layer) + tensors shared by layers + tensors outside the layers

The model has true shapes and no data (`pcg.trace.computed_integers`), so nothing is modelled: the
measurement counts every storage that autograd holds after a forward with loss, once, without
parameters and buffers. Of equal layers only one runs, once for each distinct call; the others
return an output of the same shape and count the same bytes.

The base runs as in pcg's training, without its own dropout; adapters keep their dropout.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pcg.errors import PcgError, TraceError
from pcg.explain.baselines.peer_adapters import with_adapter
from pcg.explain.baselines.peer_model import loss_of, peer_model, tensors_of
from pcg.peft.method import Bypass
from pcg.peft.recipe import Recipe
from pcg.trace.computed_integers import ComputedIntegers, DropoutOfCuda, storage_key
from pcg.trace.export import quiet
from pcg.trace.layer_kinds import layer_kinds

_TOKEN = 3
"""The id of every token; no model uses it for padding."""
_MOST_TOKENS = 2**26
"""The maximum number of tokens of a step: the ids have data, half a GiB."""


@dataclass(frozen=True)
class EagerMemory:
    """The bytes that eager PyTorch saves for a step.

    Attributes:
        layers: the bytes of each layer.
        outside: the bytes of shared tensors and of tensors outside the layers.
    """

    layers: tuple[int, ...]
    outside: int

    @property
    def total(self) -> int:
        return sum(self.layers) + self.outside

    @property
    def bytes_per_layer(self) -> int:
        """The bytes of a layer, on average over all but the first."""
        inner = self.layers[1:] or self.layers
        return round(sum(inner) / len(inner))


class EagerModel:
    """A transformers model of fake tensors with an adapter, for measurements of steps.

    Args:
        source: the contents of a config.json, or the module itself.
        dtype: torch's name of the base's dtype.
        recipe: the adapter's recipe.
        at: the networks of the adapter, by module path.
    Raises:
        PcgError: transformers or peft cannot build the model; says why.
    """

    def __init__(
        self,
        source: Mapping[str, Any] | nn.Module,
        dtype: str,
        recipe: Recipe,
        at: Mapping[str, Bypass],
    ) -> None:
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._virtual = recipe.prompt_tokens

        def wrap(model: Any) -> Any:
            path, kinds = layer_kinds(model)
            self._kinds = _numbered(kinds, path, at)
            if not recipe.trains_beside:  # such a recipe may read the parameters of all layers
                _share(model.get_submodule(path), self._kinds)
            return with_adapter(model, recipe, at)

        with _reported(), self._fake:
            self._model, self._layers = peer_model(source, dtype, wrap)
        for module in self._model.modules():
            if hasattr(module, "base_layer"):  # only peft's modules apply dropout
                module.train()

    @property
    def trainable(self) -> int:
        """The number of trained parameters, in all layers."""
        of_layers = {parameter for layer in self._layers for parameter in layer.parameters()}
        others = [parameter for parameter in self._model.parameters() if parameter not in of_layers]
        return _trained(others) + sum(_trained(layer.parameters()) for layer in self._layers)

    def step(self, batch: int, seq: int) -> EagerMemory:
        """Return the bytes saved by a step.

        Args:
            batch: the number of sequences.
            seq: the number of tokens of a sequence, without virtual tokens.
        Raises:
            TraceError: the model does not run without data, or the ids exceed half a GiB.
        """
        if batch * seq > _MOST_TOKENS:
            raise TraceError(f"{batch * seq:,} tokens are more than {_MOST_TOKENS:,}")
        numbers = ComputedIntegers(self._fake, batch * (seq + self._virtual))
        ids = torch.full((batch, seq), _TOKEN)
        tensors = [*tensors_of(self._model).values(), ids]
        kinds = dict(zip(self._layers, self._kinds, strict=True))
        with _reported(), self._fake, _StandIns(kinds, numbers) as layers:
            saved = _SavedTensors(numbers)
            # An LSTM without oneDNN, as oneDNN's workspace exists only on CPUs.
            without_onednn = torch.backends.mkldnn.flags(enabled=False)
            with without_onednn, saved.hooks(), DropoutOfCuda(), numbers:
                loss = loss_of(self._model, ids)
            assert loss.requires_grad  # the loss keeps the saved tensors alive
            return _account(layers.calls, saved.by_place(tensors), numbers.places)


def _trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Convert errors of transformers, peft and torch to a TraceError of one line."""
    try:
        with quiet():
            yield
    except PcgError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise TraceError(f"{type(error).__name__}: {first}") from error


def _numbered(kinds: Sequence[object], path: str, at: Mapping[str, Bypass]) -> list[int]:
    """Return for each layer the first equal layer with the same adapters.

    The first layer is always distinct, as its input may need no gradient.
    """
    adapted: list[set[Hashable]] = [set() for _ in kinds]
    for module, bypass in at.items():
        number, _, name = module.removeprefix(f"{path}.").partition(".")
        if module.startswith(f"{path}.") and number.isdigit():
            adapted[int(number)].add((name, bypass))
    first: dict[Hashable, int] = {}
    keys = [(i == 0, kind, frozenset(adapted[i])) for i, kind in enumerate(kinds)]
    return [first.setdefault(key, index) for index, key in enumerate(keys)]


def _share(layers: Any, kinds: Sequence[int]) -> None:
    """Use the same module for all layers of a kind, so that peft adapts it once."""
    for index, kind in enumerate(kinds):
        layers[index] = layers[kind]


# ----------------------------------------------------------------------------- layers, once each


@dataclass(frozen=True)
class _Run:
    """A layer's run.

    Attributes:
        place: the mark of the storages allocated and saved in the run.
        hidden: the input hidden states.
        out: the output.
        others: the other arguments, held so that no other tensor gets their identity.
    """

    place: int
    hidden: Tensor
    out: Any
    others: tuple[Any, ...]


@dataclass(frozen=True)
class _Call:
    """A model's call of a layer.

    Attributes:
        run: the run of the layer in this call, or in an equal earlier call.
        hidden: the input hidden states.
        out: the output hidden states.
    """

    run: _Run
    hidden: Tensor
    out: Tensor


@dataclass
class _StandIns:
    """Context that replaces layers by stand-ins, which run once for all equal calls."""

    kinds: Mapping[nn.Module, int]
    numbers: ComputedIntegers
    calls: list[_Call] = field(default_factory=list)
    _runs: dict[Hashable, _Run] = field(default_factory=dict)

    def __enter__(self) -> _StandIns:
        for layer in self.kinds:
            layer.forward = self._standing_in(layer, layer.forward)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.kinds:
            del layer.forward

    def _standing_in(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            others = tuple(leaf for leaf in tree_leaves((args, kwargs)) if leaf is not hidden)
            key = (self.kinds[layer], hidden.requires_grad, hidden.shape, *map(_identity, others))
            run = self._runs.get(key)
            if run is None:
                self.numbers.place = len(self._runs)
                out = forward(*args, **kwargs)
                run = self._runs[key] = _Run(self.numbers.place, hidden, out, others)
                self.numbers.place = None
            else:
                out = tree_map_only(Tensor, _like, run.out)
            self.calls.append(_Call(run, hidden, _hidden(out)))
            return out

        return call


def _identity(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return storage_key(leaf), leaf.shape
    return leaf if isinstance(leaf, bool | int | float | str | None) else id(leaf)


def _like(tensor: Tensor) -> Tensor:
    """Return a non-leaf tensor of the same type with a new storage."""
    other = torch.empty_like(tensor)
    return other.requires_grad_().clone() if tensor.requires_grad else other


def _hidden(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------- saved tensors


class _Saved:
    """A tensor that autograd saved, until autograd frees it; DoRA frees some in the forward.

    Holding the tensor itself would also keep the tensor that it was detached from.
    """

    def __init__(self, tensor: Tensor, place: int | None) -> None:
        self.storage = tensor.untyped_storage()
        self.place = place


class _SavedTensors:
    """The tensors that autograd holds, and the places where they were saved."""

    def __init__(self, numbers: ComputedIntegers) -> None:
        self._numbers = numbers
        self._alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def by_place(self, resident: list[Tensor]) -> dict[int | None, dict[int, int]]:
        """Return the bytes of the storages saved at each place, without resident tensors."""
        known = {storage_key(tensor) for tensor in resident}
        sizes: dict[int | None, dict[int, int]] = {}
        for saved in self._alive:
            if (key := saved.storage._cdata) not in known:
                sizes.setdefault(saved.place, {})[key] = saved.storage.nbytes()
        return sizes

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self._numbers.place)
        self._alive.add(saved)
        return saved

    @staticmethod
    def _unpack(saved: _Saved) -> Tensor:
        raise AssertionError("nothing runs backward")


def _account(
    calls: list[_Call],
    saved: Mapping[int | None, Mapping[int, int]],
    allocated: Mapping[int, int | None],
) -> EagerMemory:
    """Return the bytes of each call, as its run saved them, and of the rest.

    Args:
        calls: the calls of layers, in order.
        saved: the bytes of storages, by the place where they were saved.
        allocated: the place where each storage was allocated.
    """
    held: set[Hashable] = set()
    shared: dict[int, int] = {}
    layers = []
    for index, call in enumerate(calls):
        run, size = call.run, 0
        names: dict[int, Hashable] = {
            storage_key(_hidden(run.out)): storage_key(call.out),
            storage_key(run.hidden): storage_key(call.hidden),
        }
        for key, nbytes in saved.get(run.place, {}).items():
            place = allocated.get(key, run.place)
            if key not in names and place is None:
                shared[key] = nbytes
                continue
            is_again = place == run.place and call.hidden is not run.hidden
            name = names.get(key, (index, key) if is_again else key)
            if name not in held:
                held.add(name)
                size += nbytes
        layers.append(size)
    outside = shared | {key: n for key, n in saved.get(None, {}).items() if key not in held}
    return EagerMemory(tuple(layers), sum(outside.values()))
