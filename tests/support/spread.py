"""Ranks of one process: a batch whose collectives are threads that wait for each other."""

from __future__ import annotations

from tests.support.threads import ThreadRanks


class Spread:
    def __init__(self, ranks: ThreadRanks) -> None:
        self.ranks = ranks
        self.tokens = 5
