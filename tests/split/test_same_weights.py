"""A client with files of its own is refused by a base with other weights, by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import pcg
from pcg.errors import SplitError
from tests.support import serving
from tests.support.split_base import running_base

NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("changed", [(), (NORM,), (UP,), (EMBEDDING, NORM)])
def test_files_are_those_of_the_base(tmp_path: Path, changed: tuple[str, ...]) -> None:
    own = shutil.copytree(serving.model_directory(), tmp_path / "own")
    (file,) = own.glob("*.safetensors")
    tensors = load_file(file)
    for name in changed:
        tensors[name].view(-1)[7].neg_()  # of one element, one bit
    save_file(tensors, file, {"format": "pt"})
    whole = pcg.compile(serving.model_directory())
    with running_base(whole) as base:
        if not changed:
            with base.connect(model=own) as split:
                assert split.generate([[5, 6]], max_new_tokens=1)
            return
        rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        with pytest.raises(SplitError, match=f"differ in {changed[0]}{rest} of"):
            base.connect(model=own)
        assert base.loop.clients <= 1
