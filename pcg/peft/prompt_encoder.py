"""Encoders of virtual tokens in training: PyTorch modules around the compiled program.

The program reads what an encoder makes, and gives its gradient; autograd takes that through the
encoder. So a step's forward is preceded by the encoder's, and its backward followed by it.

    p = encoder(e);   dL/dθ = (dp/dθ)ᵀ dL/dp,  dL/dp of the program

Source: `PromptEncoder` and `PrefixEncoder` of peft 0.21.2, whose names the parameters have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pcg.errors import UnsupportedError
from pcg.peft.module_weights import ModuleWeights, Shape
from pcg.peft.registry import Recipe
from pcg.peft.virtual_token_encoder import LSTM, PREFIX, PromptEncoder

KEY = "prompt_embeddings"
"""What an encoder makes is called by in a file."""


class EncoderModule(nn.Module):
    """An encoder."""

    def __init__(self, encoder: PromptEncoder, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(encoder.tokens, width)
        self.kind = encoder.kind
        if encoder.kind == PREFIX:
            self.transform = nn.Sequential(
                nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, out)
            )
        elif encoder.kind == LSTM:
            self.lstm_head = nn.LSTM(
                width, hidden, encoder.layers, bidirectional=True, batch_first=True
            )
            self.mlp_head = nn.Sequential(
                nn.Linear(2 * hidden, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, out)
            )
        else:
            self.mlp_head = nn.Sequential(
                nn.Linear(width, hidden),
                nn.ReLU(),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
                nn.Linear(hidden, out),
            )

    def forward(self) -> Tensor:
        """What the virtual tokens are, [tokens, out]."""
        x = self.embedding.weight
        if self.kind == PREFIX:
            made: Tensor = self.transform(x)
        elif self.kind == LSTM:
            # cuDNN would have its parameters in one piece of memory, and warns at each call.
            with torch.backends.cudnn.flags(enabled=False):
                made = self.mlp_head(self.lstm_head(x.unsqueeze(0))[0])[0]
        else:
            made = self.mlp_head(x)
        return made


def fresh_encoder(
    encoder: PromptEncoder, shapes: Sequence[Shape], generator: torch.Generator
) -> dict[str, Tensor]:
    """A fresh encoder's parameters, as peft initialises them, in float32.

    Args:
        encoder: what it is like.
        shapes: (out, in) of the token embedding, or (values, keys) of each layer.
        generator: whose seed is used.
    Raises:
        UnsupportedError: it has dropout.
    """
    check_encoder(encoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        module = EncoderModule(encoder, *encoder.widths(shapes))
    if encoder.makes_zeros:
        for parameter in module.transform[-1].parameters():
            nn.init.zeros_(parameter)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def check_encoder(encoder: PromptEncoder) -> None:
    """Refuse an encoder that is not trained. UnsupportedError: it has dropout."""
    if encoder.dropout:
        raise UnsupportedError(
            f"encoder_dropout={encoder.dropout:g}: what an LSTM drops is drawn within it, so that "
            "a job that is resumed would drop something else; use encoder_dropout=0"
        )


def module_of(encoder: PromptEncoder, tensors: Mapping[str, Tensor]) -> EncoderModule:
    """An encoder whose parameters share the tensors' memory.

    Args:
        encoder: what it is like.
        tensors: its parameters by name.
    """
    name = "transform" if encoder.kind == PREFIX else "mlp_head"
    last = max(key for key in tensors if key.startswith(name) and key.endswith("weight"))
    out = tensors[last].shape[0]
    width = tensors["embedding.weight"].shape[1]
    hidden = (
        tensors["lstm_head.weight_hh_l0"].shape[1]
        if encoder.kind == LSTM
        else tensors[f"{name}.0.weight"].shape[0]
    )
    with torch.device("meta"):
        module = EncoderModule(encoder, width, hidden, out)
    module.load_state_dict(dict(tensors), assign=True)
    return module


def made_by_encoder(
    recipe: Recipe, tensors: Mapping[str, Tensor], kind: type[ModuleWeights]
) -> Mapping[str, ModuleWeights]:
    """The weights, by path, that an encoder makes.

    Args:
        recipe: with the encoder.
        tensors: its parameters.
        kind: of the method's weights.
    """
    assert recipe.encoder is not None
    with torch.no_grad():
        return kind.read_whole({KEY: module_of(recipe.encoder, tensors)()}, recipe)


class EncodedTraining:
    """The encoder of an adapter that is trained.

    Attributes:
        parameters: what is trained, by name, in the memory of the adapter's tensors.
    """

    def __init__(
        self,
        recipe: Recipe,
        tensors: Mapping[str, Tensor],
        weights: Mapping[str, ModuleWeights],
    ) -> None:
        """Take an adapter's encoder.

        Args:
            recipe: with the encoder.
            tensors: its parameters.
            weights: what it makes, by path; written over.
        Raises:
            UnsupportedError: it has dropout.
        """
        assert recipe.encoder is not None
        check_encoder(recipe.encoder)
        self._recipe = recipe
        self._module = module_of(recipe.encoder, tensors)
        self._weights = weights
        self._made: tuple[Tensor, ...] = ()
        self.parameters = {
            f"encoder.{name}": parameter for name, parameter in self._module.named_parameters()
        }

    def make(self) -> None:
        """Make the weights, before a forward."""
        with torch.enable_grad():
            whole = self._module()
            kind = type(next(iter(self._weights.values())))
            made = kind.read_whole({KEY: whole}, self._recipe)
        self._made = tuple(tensor for weights in made.values() for tensor in weights.tensors)
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._made, strict=True):
                tensor.copy_(value)

    def publish(self) -> None:
        """Make the weights anew, after the parameters have changed."""
        self.make()
        self._made = ()

    def backward(self) -> None:
        """Take the weights' gradients through the encoder, and leave none on the weights."""
        gradients = [tensor.grad for tensor in self._tensors]
        torch.autograd.backward(self._made, gradients)
        self._made = ()
        for tensor in self._tensors:
            tensor.grad = None

    @property
    def _tensors(self) -> list[Tensor]:
        return [tensor for weights in self._weights.values() for tensor in weights.tensors]
