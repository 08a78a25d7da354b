"""Bypass networks by their sites, without recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcg.passes.attach import Bypasses
from pcg.peft.lora import LoraBypass


def lora(ranks: Mapping[str, int | None], *, use_dora: bool = False, **options: Any) -> Bypasses:
    """LoRA or DoRA, by the rank of each site."""
    at = {site: (LoraBypass(rank, use_dora=use_dora),) for site, rank in ranks.items()}
    return Bypasses(at, **options)
