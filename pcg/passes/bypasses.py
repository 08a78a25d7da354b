"""Where bypass networks attach: what `sites` makes of recipes, and `attach` builds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bottleneck:
    """Where one kind of bottleneck adapter attaches.

    Attributes:
        site: whose output it adds to.
        non_linearity: a name of `bottleneck_recipe.NON_LINEARITIES`.
        is_parallel: it reads the input of the MLP that the site ends.
    """

    site: str
    non_linearity: str
    is_parallel: bool

    @property
    def kind(self) -> str:
        """What its parameters are called by."""
        return f"{self.non_linearity}{'_parallel' * self.is_parallel}_adapter"


@dataclass(frozen=True)
class Bypasses:
    """Where bypass networks attach.

    Attributes:
        ranks: of each LoRA site, the largest of the adapters that meet there; None leaves it open.
        biases: sources of the base biases that adapters have their own of.
        dtype: of the adapters' parameters.
        dropout: probability that an element of A's input is dropped in training.
        vera: rank of each VeRA site.
        adalora: the largest rank at each AdaLoRA site.
        bottlenecks: size of each bottleneck adapter, as for `ranks`.
        magnitudes: LoRA sites with DoRA.
        lora_biases: LoRA sites whose B has a bias.
        scaled: sites whose output is scaled, (IA)³.
        scaled_inputs: sites whose input is.
        prompt: virtual tokens at most before a sequence; 0 for none, None leaves it open.
        prefix: the same of those whose keys and values every layer has its own of.
        serving: adapters of any rank meet, and what can be made once of an adapter is a parameter.
    """

    ranks: Mapping[str, int | None] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()
    dtype: str = "f32"
    dropout: float = 0.0
    vera: Mapping[str, int] = field(default_factory=dict)
    adalora: Mapping[str, int] = field(default_factory=dict)
    bottlenecks: Mapping[Bottleneck, int | None] = field(default_factory=dict)
    magnitudes: frozenset[str] = frozenset()
    lora_biases: frozenset[str] = frozenset()
    scaled: frozenset[str] = frozenset()
    scaled_inputs: frozenset[str] = frozenset()
    prompt: int | None = 0
    prefix: int | None = 0
    serving: bool = False

    def __bool__(self) -> bool:
        """Whether anything attaches."""
        matrices = (self.ranks, self.vera, self.adalora, self.bottlenecks)
        rest = (self.biases, self.scaled, self.scaled_inputs, self.prompt != 0, self.prefix != 0)
        return any((*matrices, *rest))

    def for_serving(self) -> Bypasses:
        """The same as serving has it, without what training alone does."""
        ranks = dict.fromkeys([*self.ranks, *self.vera, *self.adalora])
        sizes: dict[Bottleneck, int | None] = dict.fromkeys(self.bottlenecks)
        return dataclasses.replace(
            self,
            ranks=ranks,
            dropout=0.0,
            vera={},
            adalora={},
            bottlenecks=sizes,
            prompt=None if self.prompt else self.prompt,
            prefix=None if self.prefix else self.prefix,
            serving=True,
        )
