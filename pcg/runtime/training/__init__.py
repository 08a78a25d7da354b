"""Finetuning jobs: data, steps, optimizers, schedules, checkpoints."""
