"""Encoders of virtual tokens: networks trained in place of their output, a prompt.

    MLP      p = W₂ relu(W₁ relu(W₀ e + b₀) + b₁) + b₂
    LSTM     p = W₁ relu(W₀ lstm(e) + b₀) + b₁,  lstm of both directions
    PREFIX   p = W₁ tanh(W₀ e + b₀) + b₁,  the keys and values of all layers

with e: [tokens, width], and p: [tokens, width], or [tokens, 2 · layers · width] for a prefix.

A saved adapter holds the encoder's output, so a saved adapter cannot be trained further. In
training an encoder is a PyTorch module around the compiled program, which reads the output and
returns its gradient: a step's forward follows the encoder's, and the encoder's backward follows the
step's.

    dL/dθ = (dp/dθ)ᵀ dL/dp,  dL/dp of the program

torch is imported in the functions that compute, so that recipes are read without it.

Source: `PromptEncoder` and `PrefixEncoder` of peft 0.21.2; the parameters have their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from pcg.errors import AdapterError, UnsupportedError
from pcg.peft.weights import ModuleWeights

if TYPE_CHECKING:
    from torch import Tensor, nn

MLP, LSTM, PREFIX = "MLP", "LSTM", "PREFIX"
KEY = "prompt_embeddings"
"""The key of an encoder's output in an adapter's file."""
_SEEDING = Lock()
"""Lock of torch's own generator, which seeds networks and is shared by threads."""


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """The description of an encoder.

    Attributes:
        kind: MLP, LSTM or PREFIX.
        tokens: virtual tokens.
        hidden: features within the encoder; None is the width.
        layers: layers of the LSTM; other encoders have a fixed number.
        dropout: dropout between the layers of the LSTM.
        makes_zeros: True if a fresh encoder outputs zeros.
    """

    kind: str
    tokens: int
    hidden: int | None = None
    layers: int = 1
    dropout: float = 0.0
    makes_zeros: bool = False

    def widths(self, shapes: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
        """Return the features of an embedding, within the encoder, and of the output.

        Args:
            shapes: (out, in) of the token embedding, or (values, keys) of each layer.
        Raises:
            AdapterError: values and keys differ in width, or layers differ; peft has no such
                prefix.
        """
        width = shapes[0][1]
        if self.kind == PREFIX and any(shape != (width, width) for shape in shapes):
            raise AdapterError(
                f"prefix_projection=True makes keys and values of {width} features in each layer, "
                "and this base has others; use prefix_projection=False"
            )
        out = 2 * len(shapes) * width if self.kind == PREFIX else width
        return width, self.hidden or width, out

    def shapes(self, shapes: Sequence[tuple[int, int]]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name; arguments are those of `widths`."""
        import torch

        with torch.device("meta"):
            network = _network(self, *self.widths(shapes))
        return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}

    def fresh(self, shapes: Sequence[tuple[int, int]], seed: int) -> dict[str, Tensor]:
        """Return fresh parameters, as peft initialises them, in float32; `shapes` as for `widths`.

        Raises:
            UnsupportedError: the encoder has dropout.
        """
        import torch

        self.check_trainable()
        with _SEEDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = _network(self, *self.widths(shapes))
        if self.makes_zeros:
            for parameter in network["transform"][-1].parameters():  # type: ignore[index]
                torch.nn.init.zeros_(parameter)
        return {name: parameter.detach() for name, parameter in network.named_parameters()}

    def check_trainable(self) -> None:
        """Raise an UnsupportedError for an encoder with dropout."""
        if self.dropout:
            raise UnsupportedError(
                f"encoder_dropout={self.dropout:g}: what an LSTM drops is drawn within it, so that "
                "a job that is resumed would drop something else; use encoder_dropout=0"
            )

    def __str__(self) -> str:
        hidden = "" if self.hidden is None else f" with {self.hidden} features within"
        layers = f" of {self.layers} layers" if self.kind == LSTM else ""
        return f"the encoder {self.kind}{layers}{hidden}"


def _network(encoder: PromptEncoder, width: int, hidden: int, out: int) -> nn.ModuleDict:
    from torch import nn

    parts: dict[str, nn.Module] = {"embedding": nn.Embedding(encoder.tokens, width)}
    if encoder.kind == PREFIX:
        layers = (nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, out))
        return nn.ModuleDict(parts | {"transform": nn.Sequential(*layers)})
    if encoder.kind == LSTM:
        parts["lstm_head"] = nn.LSTM(
            width, hidden, encoder.layers, bidirectional=True, batch_first=True
        )
        head = [nn.Linear(2 * hidden, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, out)]
    else:
        head = [nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
        head.append(nn.Linear(hidden, out))
    return nn.ModuleDict(parts | {"mlp_head": nn.Sequential(*head)})


def _bound_network(encoder: PromptEncoder, tensors: Mapping[str, Tensor]) -> nn.ModuleDict:
    """Return a network with parameters in the tensors' memory."""
    import torch

    head = "transform" if encoder.kind == PREFIX else "mlp_head"
    last = max(key for key in tensors if key.startswith(head) and key.endswith("weight"))
    out, width = tensors[last].shape[0], tensors["embedding.weight"].shape[1]
    inner = "lstm_head.weight_hh_l0" if encoder.kind == LSTM else f"{head}.2.weight"
    hidden = tensors[inner].shape[1]
    with torch.device("meta"):
        network = _network(encoder, width, hidden, out)
    network.load_state_dict(dict(tensors), assign=True)
    return network


def _made(encoder: PromptEncoder, network: Any) -> Tensor:
    import torch

    x = network["embedding"].weight
    if encoder.kind == LSTM:
        # cuDNN wants contiguous parameters, and warns at each call.
        with torch.backends.cudnn.flags(enabled=False):
            x = network["lstm_head"](x.unsqueeze(0))[0]
    prompt: Tensor = network["transform" if encoder.kind == PREFIX else "mlp_head"](x)
    return prompt[0] if encoder.kind == LSTM else prompt


def made_by_encoder(recipe: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, ModuleWeights]:
    """Return the weights, by path, that the recipe's encoder computes with these parameters."""
    prompt = _made(recipe.encoder, _bound_network(recipe.encoder, tensors)).detach()
    return recipe.weights.read_whole({KEY: prompt}, recipe)  # type: ignore[no-any-return]


class EncodedTraining:
    """The encoder of an adapter in training.

    Attributes:
        parameters: the trained tensors, by name, in the memory of the adapter's tensors.
    """

    def __init__(
        self, recipe: Any, tensors: Mapping[str, Tensor], weights: Mapping[str, ModuleWeights]
    ) -> None:
        """Take an adapter's recipe, its encoder's parameters and its weights."""
        self._recipe = recipe
        self._encoder: PromptEncoder = recipe.encoder
        self._encoder.check_trainable()
        self._network = _bound_network(self._encoder, tensors)
        self._tensors = [tensor for each in weights.values() for tensor in each.tensors]
        self._made: tuple[Tensor, ...] = ()
        self.parameters = {
            f"encoder.{name}": parameter for name, parameter in self._network.named_parameters()
        }

    def make(self) -> None:
        """Compute the weights, before a forward."""
        import torch

        with torch.enable_grad():
            whole = _made(self._encoder, self._network)
            by_path = self._recipe.weights.read_whole({KEY: whole}, self._recipe)
        self._made = tuple(tensor for weights in by_path.values() for tensor in weights.tensors)
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._made, strict=True):
                tensor.copy_(value)

    def publish(self) -> None:
        """Recompute the weights, after the parameters have changed."""
        self.make()
        self._made = ()

    def backward(self) -> None:
        """Propagate the weights' gradients through the encoder, and clear them."""
        import torch

        torch.autograd.backward(self._made, [tensor.grad for tensor in self._tensors])
        self._made = ()
        for tensor in self._tensors:
            tensor.grad = None
