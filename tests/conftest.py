"""What holds for every test: no network, no GPU unless marked, reproducible property tests."""

import gc
import os
import signal
from collections.abc import Generator

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch starts its threads: bits may depend on their number, here and in processes we start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's kernels run in its interpreter: read once, where they are decorated. Tests on a GPU run
# by themselves, with `TRITON_INTERPRET=0`.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

# As the command line does: collections are a quarter of the time otherwise.
gc.set_threshold(50_000, 20, 20)

# A shell that starts us in the background has Ctrl-C ignored, here and in processes we start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("pcg", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("pcg")


def pytest_collection_finish() -> None:
    """Let collections skip what the imports of tests created."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """After a file, free its garbage, and let later collections skip what it cached.

    Executors over ranks collect garbage several times each, at seconds per ten million objects.
    """
    handled = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return handled


def pytest_unconfigure() -> None:
    gc.unfreeze()  # bindings warn of objects that nothing deletes in the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that are marked `gpu` where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
