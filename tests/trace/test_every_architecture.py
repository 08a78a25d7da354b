"""Every causal LM of transformers compiles, or is refused in one line within ten seconds."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

import pcg.compiler as compiler
from pcg.errors import PcgError

CLASSES = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
MOST_SECONDS = 10


def small(config_class: Any) -> dict[str, Any]:
    """The default configuration as a checkpoint has it, with few layers and experts."""
    try:
        own: dict[str, Any] = json.loads(config_class().to_json_string())
    except Exception:  # its defaults contradict one another
        return {"model_type": config_class.model_type}
    wanted = {"num_hidden_layers": 2, "num_experts": 8, "num_local_experts": 8}
    wanted["n_routed_experts"] = 8
    names = config_class.attribute_map
    fewer = {names.get(name, name): count for name, count in wanted.items()}
    lists = {key for key, value in own.items() if isinstance(value, list)}
    changed = {key: value for key, value in own.items() if key not in lists}
    changed |= {key: count for key, count in fewer.items() if key in own}
    try:
        config_class(**{key: value for key, value in changed.items() if key != "model_type"})
    except Exception:  # sizes that belong together
        return own
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CLASSES)
def test_it_compiles_or_is_refused_in_one_line(model_type: str) -> None:
    config = small(CLASSES[model_type])
    start, refusal = time.process_time(), ""
    try:
        compiler.compile_program(config)
    except PcgError as error:
        refusal = str(error)
    assert not refusal or time.process_time() - start < MOST_SECONDS
    assert "\n" not in refusal
    assert len(refusal) <= 400
    assert "TORCH_LOGS" not in refusal
    assert "names no" not in refusal or len(config) == 1
