"""PEFT methods, a file each, and adapters: in memory, on disk, by name."""

from collections.abc import Mapping

METHODS: Mapping[str, str] = {
    "LoraConfig": "lora",
    "VeraConfig": "vera",
    "AdaLoraConfig": "adalora",
    "LoHaConfig": "loha",
    "BottleneckConfig": "bottleneck",
    "IA3Config": "ia3",
    "BitFitConfig": "bitfit",
    "PrefixTuningConfig": "prefix",
    "PromptTuningConfig": "prompt",
    "PromptEncoderConfig": "prompt",
}
"""The methods: each recipe's public class, and its file in this folder.

The order is that of the methods' operators at a shared module.
"""
