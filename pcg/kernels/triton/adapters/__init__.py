"""Adapters in Triton: segmented LoRA, vectors and activations, for serving and for training."""
