"""Reinforcement learning by GRPO: rollouts are requests of the engine that trains the adapter."""

from pcg.train.grpo.loop import GrpoResult
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.train import train_grpo

__all__ = ["GrpoOptions", "GrpoResult", "train_grpo"]
