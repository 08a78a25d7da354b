"""Recorded windows: layers of finetuning windows as CUDA graphs."""
