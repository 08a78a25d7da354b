"""Adapters: their recipe, their weights, their files. The public names of the subject."""

from pcg.runtime.adapter_config import recipe_from
from pcg.runtime.adapter_reader import read_adapter
from pcg.runtime.adapter_weights import Adapter, check_biases, check_fits, new_adapter, with_shared
from pcg.runtime.adapter_writer import write_adapter
from pcg.runtime.lora_weights import LoraWeights

__all__ = [
    "Adapter",
    "LoraWeights",
    "check_biases",
    "check_fits",
    "new_adapter",
    "read_adapter",
    "recipe_from",
    "with_shared",
    "write_adapter",
]
