"""Adapters: their recipe, their weights, their files. The public names of the subject."""

from pcg.peft.adapter import Adapter, check_biases, check_fits, new_adapter, with_shared
from pcg.peft.config_reader import recipe_from
from pcg.peft.lora_weights import LoraWeights
from pcg.peft.reader import read_adapter
from pcg.peft.writer import write_adapter

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
