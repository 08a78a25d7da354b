"""LoRA adapters: their recipe, their weights, their files. The public names of the subject."""

from pcg.runtime.adapter_config import recipe_from
from pcg.runtime.adapter_reader import read_adapter
from pcg.runtime.adapter_weights import Adapter, LoraWeights, check_fits, new_adapter
from pcg.runtime.adapter_writer import write_adapter

__all__ = [
    "Adapter",
    "LoraWeights",
    "check_fits",
    "new_adapter",
    "read_adapter",
    "recipe_from",
    "write_adapter",
]
