"""What holds for every test: no network, no GPU unless marked, reproducible property tests."""

import os

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch starts its threads: bits may depend on their number, here and in processes we start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("pcg", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("pcg")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
