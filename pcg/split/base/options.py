"""The options of a base executor; `pcg serve-base` is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from pcg.errors import SplitError

PolicyName: TypeAlias = Literal["none", "lockstep", "opportunistic"]


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """Options of a base executor.

    Attributes:
        host: the address to listen at. Only this machine reaches 127.0.0.1; what crosses a network
            is not encrypted.
        port: the port to listen at; 0 takes a free one.
        api_key: a key that clients may use for everything. Repeatable. Without any, and without
            `api_keys`, one is made and printed.
        api_keys: a JSON file of keys with scopes, as of `pcg serve` (docs/serving.md).
        policy: how requests of several clients are batched: none, lockstep or opportunistic.
        wait_ms: the longest that a request of `wait_tokens` tokens waits for others, with the
            opportunistic policy, ms; a smaller one waits less.
        wait_tokens: the tokens of a request that waits longest.
        max_batch_tokens: the most tokens that run as one; a larger request runs alone.
        max_request_mib: the most bytes of a request, MiB.
        downloads: let clients download the weights, of which they compute the effects of noise.
        max_clients: the most clients at once.
        drain_s: time that clients have to end after SIGTERM, s.
    Raises:
        SplitError: a value is out of range.
    """

    title: ClassVar[str] = "Base executor"

    host: str = "127.0.0.1"
    port: int = 8300
    api_key: Sequence[str] = ()
    api_keys: Path | None = None
    policy: PolicyName = "opportunistic"
    wait_ms: float = 2.0
    wait_tokens: int = 512
    max_batch_tokens: int = 8192
    max_request_mib: int = 512
    downloads: bool = False
    max_clients: int = 256
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        bounds = {
            "port": (0, 65535),
            "wait_ms": (0, 10_000),
            "wait_tokens": (1, 2**20),
            "max_batch_tokens": (1, 2**20),
            "max_request_mib": (1, 2**16),
            "max_clients": (1, 10_000),
            "drain_s": (0, 3600),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise SplitError(f"{name}={value}; use {least} to {most}")
        if self.policy not in ("none", "lockstep", "opportunistic"):
            raise SplitError(f"policy={self.policy!r}; use none, lockstep or opportunistic")
