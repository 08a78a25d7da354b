"""Finetuning jobs: steps, optimizers, schedules, checkpoints."""
