"""A model's prompt: the embeddings of virtual tokens.

    prompt_embeddings      [tokens, hidden]

Source: `PromptEmbedding`, `PromptEncoder` and `get_peft_model_state_dict` of peft 0.21.2, which
saves what P-tuning's encoder makes and not the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from pcg.errors import AdapterError, UnsupportedError
from pcg.ir.module_paths import WHOLE_MODEL
from pcg.peft.module_weights import AdapterWeight, Around, ModuleWeights, Shape
from pcg.peft.prompt import PromptRecipe, PromptSite, PromptTuningRecipe

KEY = "prompt_embeddings"


@dataclass(frozen=True, eq=False)
class PromptWeights(ModuleWeights):
    """The prompt of a model.

    Attributes:
        embeddings: [tokens, hidden].
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    whole_keys: ClassVar[tuple[str, ...]] = (KEY,)

    embeddings: Tensor

    @classmethod
    def fresh(
        cls,
        recipe: PromptRecipe,
        site: PromptSite,
        shape: Shape,
        generator: torch.Generator,
        around: Around,
    ) -> Self:
        if isinstance(recipe, PromptTuningRecipe) and recipe.init != "RANDOM":
            raise UnsupportedError(
                f"prompt_tuning_init={recipe.init!r}: pcg begins a prompt with random numbers; use "
                '"RANDOM", or let peft make and save one, and load that'
            )
        return cls(torch.randn(site.tokens, shape[1], generator=generator))

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: PromptRecipe) -> Self:
        (embeddings,) = parts.values()
        if embeddings.ndim != 2 or len(embeddings) != recipe.prompt_tokens:
            raise AdapterError(
                f"{KEY} is {list(embeddings.shape)}, and its configuration gives it "
                f"[{recipe.prompt_tokens}, hidden]; the two files are not of one save"
            )
        return cls(embeddings)

    @classmethod
    def read_whole(cls, parts: Mapping[str, Tensor], recipe: PromptRecipe) -> Mapping[str, Self]:
        return {WHOLE_MODEL: cls.read(WHOLE_MODEL, parts, recipe)}

    @classmethod
    def stored_whole(cls, weights: Mapping[str, Self]) -> Mapping[str, Tensor]:
        return {KEY: weights[WHOLE_MODEL].embeddings}

    @property
    def site(self) -> PromptSite:
        return PromptSite(len(self.embeddings))

    @property
    def stored(self) -> Mapping[str, Tensor]:
        return {}

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        return {KEY: AdapterWeight(self.embeddings)}

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        return {KEY: lambda around: self.embeddings}

    def misfit(self, shape: Shape) -> str:
        fits = self.embeddings.shape[1] == shape[1]
        return "" if fits else f"{KEY} {list(self.embeddings.shape)}"
