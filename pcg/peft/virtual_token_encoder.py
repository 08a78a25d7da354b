"""Encoders of virtual tokens: what is trained in place of a prompt or a prefix.

An encoder is a network over an embedding of each virtual token, and a saved adapter holds what it
makes. So the adapter that is served needs none, and one that was saved cannot be trained further.

    MLP      p = W₂ relu(W₁ relu(W₀ e + b₀) + b₁) + b₂
    LSTM     p = W₁ relu(W₀ lstm(e) + b₀) + b₁,  lstm of both directions
    PREFIX   p = W₁ tanh(W₀ e + b₀) + b₁,  the keys and values of all layers

with e: [tokens, width], and p: [tokens, width], or [tokens, 2 · layers · width] for a prefix.

Source: `PromptEncoder` and `PrefixEncoder` of peft 0.21.2; their names of parameters are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pcg.errors import AdapterError

MLP, LSTM, PREFIX = "MLP", "LSTM", "PREFIX"


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """What an encoder is like.

    Attributes:
        kind: MLP, LSTM or PREFIX.
        tokens: virtual tokens.
        hidden: features within; None is the width.
        layers: of the LSTM; the others have as many as they have.
        dropout: between the layers of the LSTM.
        makes_zeros: at the start.
    """

    kind: str
    tokens: int
    hidden: int | None = None
    layers: int = 1
    dropout: float = 0.0
    makes_zeros: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("encoder_hidden_size", self.hidden),
            ("encoder_num_layers", self.layers),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise AdapterError(f"{name}={value!r}; use an int of at least 1")
        dropout = self.dropout
        is_number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
        if not is_number or not 0 <= dropout <= 1:
            raise AdapterError(f"encoder_dropout={dropout!r}; use a probability in [0, 1]")

    def widths(self, shapes: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
        """Features of an embedding, within, and of what is made.

        Args:
            shapes: (out, in) of the token embedding, or (values, keys) of each layer.
        Raises:
            AdapterError: values are not as wide as keys, or layers differ, as no prefix of peft's.
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
        """The encoder's parameters; as `widths`."""
        width, hidden, out = self.widths(shapes)
        found: dict[str, tuple[int, ...]] = {"embedding.weight": (self.tokens, width)}
        sizes = [width, hidden, hidden, out]
        name = "mlp_head"
        if self.kind == PREFIX:
            sizes, name = [width, hidden, out], "transform"
        if self.kind == LSTM:
            sizes = [2 * hidden, 2 * hidden, out]
            for layer in range(self.layers):
                for direction in ("", "_reverse"):
                    read = 2 * hidden if layer else width
                    end = f"l{layer}{direction}"
                    found[f"lstm_head.weight_ih_{end}"] = (4 * hidden, read)
                    found[f"lstm_head.weight_hh_{end}"] = (4 * hidden, hidden)
                    found[f"lstm_head.bias_ih_{end}"] = (4 * hidden,)
                    found[f"lstm_head.bias_hh_{end}"] = (4 * hidden,)
        for index, (in_, size) in enumerate(pairwise(sizes)):
            found[f"{name}.{2 * index}.weight"] = (size, in_)  # a function stands between two
            found[f"{name}.{2 * index}.bias"] = (size,)
        return found

    def __str__(self) -> str:
        hidden = "" if self.hidden is None else f" with {self.hidden} features within"
        layers = f" of {self.layers} layers" if self.kind == LSTM else ""
        return f"the encoder {self.kind}{layers}{hidden}"
