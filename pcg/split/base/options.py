"""The options of a base executor, and so of `pcg serve-base`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from pcg.errors import SplitError
from pcg.split.curve import BaseCurve, is_loopback

PolicyName: TypeAlias = Literal["none", "lockstep", "opportunistic"]


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """Options of a base executor.

    Attributes:
        host: the address to listen at. Only this machine reaches 127.0.0.1; at others,
            connections have to be encrypted.
        port: the port to listen at; 0 takes a free port.
        curve_key: the base's CURVE certificate, NAME.key_secret, which encrypts its connections.
        curve_clients: a folder of the certificates, *.key, of clients that may connect; by default
            all may, and their key decides.
        plaintext: let connections of other machines go unencrypted.
        api_key: a key that clients may use for everything. Repeatable. Without any, and without
            `api_keys`, a key is drawn and printed.
        api_keys: a JSON file of keys with scopes, as for `pcg serve` (docs/serving.md).
        layers: the layers that this base holds, as 0-15; by default all. Others are at other bases,
            and clients name all bases (docs/split.md).
        policy: how requests of several clients are batched: none, lockstep or opportunistic.
        wait_ms: the longest that a request waits for others, with the opportunistic policy, ms; it
            waits less where they are not expected, or where that saves less than it takes.
        max_batch_tokens: the most tokens of a batch; a larger request is a batch by itself.
        max_request_mib: the most bytes of a request, MiB.
        key_mib: the most bytes of all waiting requests of a key, MiB.
        key_tokens: the most tokens of these.
        downloads: let clients download the weights, to compute the effects of noise.
        max_piece_mib: the most bytes of all values of a request for a graph, MiB.
        max_clients: the most clients at a time.
        drain_s: time that clients have to end after SIGTERM, s.
    Raises:
        SplitError: a value is out of range.
    """

    title: ClassVar[str] = "Base executor"

    host: str = "127.0.0.1"
    port: int = 8300
    curve_key: Path | None = None
    curve_clients: Path | None = None
    plaintext: bool = False
    api_key: Sequence[str] = ()
    api_keys: Path | None = None
    layers: str | None = None
    policy: PolicyName = "opportunistic"
    wait_ms: float = 100.0
    max_batch_tokens: int = 8192
    max_request_mib: int = 512
    key_mib: int = 4096
    key_tokens: int = 2**18
    downloads: bool = False
    max_piece_mib: int = 4096
    max_clients: int = 256
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        bounds = {
            "port": (0, 65535),
            "wait_ms": (0, 10_000),
            "max_batch_tokens": (1, 2**20),
            "max_request_mib": (1, 2**16),
            "max_piece_mib": (1, 2**20),
            "key_mib": (1, 2**20),
            "key_tokens": (1, 2**30),
            "max_clients": (1, 10_000),
            "drain_s": (0, 3600),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise SplitError(f"{name}={value}; use {least} to {most}")
        if self.policy not in ("none", "lockstep", "opportunistic"):
            raise SplitError(f"policy={self.policy!r}; use none, lockstep or opportunistic")
        if self.curve_clients is not None and self.curve_key is None:
            raise SplitError("curve_clients is for encrypted connections; give curve_key, too")
        if not (is_loopback(self.host) or self.curve_key is not None or self.plaintext):
            raise SplitError(
                f"host={self.host} is reached from other machines, and keys and tensors would be "
                "sent to it in clear; give --curve-key, or --plaintext to let them"
            )

    @property
    def curve(self) -> BaseCurve | None:
        """The encryption. SplitError: a certificate is damaged."""
        if self.curve_key is None:
            return None
        return BaseCurve.read(self.curve_key, self.curve_clients)
