"""Sharing: how much finetuning goes into each step beside serving; `CoServing` is the rule."""

from pcg.runtime.engine.sharing.co_serving import CoServing
from pcg.runtime.engine.sharing.step import Sharing, Step

__all__ = ["CoServing", "Sharing", "Step"]
