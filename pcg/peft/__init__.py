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
"""The methods: the class of each one's recipe, which is public, and its file in this folder.

The order is that in which the operators of several methods stand at one module.
"""
