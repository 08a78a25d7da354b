"""BitFit: trains all biases of the base, and nothing else (Ben Zaken et al. 2022).

peft lacks it; the configuration is pcg's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pcg.errors import AdapterError
from pcg.peft.method import Bypass
from pcg.peft.recipe import OF_PCG, Names, OtherField, Recipe
from pcg.peft.weights import ModuleWeights


@dataclass(frozen=True, kw_only=True)
class BitFitConfig(Recipe):
    """A BitFit configuration: it has no options, and no module gets a bypass network."""

    method: ClassVar[str] = "BitFit"
    peft_type: ClassVar[str] = "BITFIT"
    weights: ClassVar[type[ModuleWeights]] = ModuleWeights  # type: ignore[type-abstract]
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"bitfit": {}}
    other_fields: ClassVar[Mapping[str, OtherField]] = OF_PCG

    @property
    def bias(self) -> str:
        return "all"

    def bypass_at(self, path: str) -> Bypass:
        raise AdapterError(f"BitFit trains biases alone, and none but those at {path}")

    def bypasses(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> dict[str, Bypass]:
        return {}
