"""Sharing: how much finetuning goes into each step beside serving.

`CoServing` is the engine's rule: as much as fits beside the step's requests within their SLOs, and
a share of the time beside requests without (FlexLLM v2 §6.2). The rules that it is compared with
are in `pcg.simulate.papers.sharing_rules`.
"""

from __future__ import annotations

from pcg.runtime.engine.sharing.co_serving import CoServing
from pcg.runtime.engine.sharing.rule import Sharing
from pcg.runtime.engine.sharing.step import Step

__all__ = ["CoServing", "Sharing", "Step"]
