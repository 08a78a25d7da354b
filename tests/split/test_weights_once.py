"""Adapters that come to a server never make it hold the base's weights twice."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import pcg
import pcg.compiler as compiler
from pcg.errors import SplitError
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.shared_base import SharedBase
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.live_tensors import live_bytes, new_tensors
from tests.support.split_base import running_base

Q = "model.layers.0.self_attn.q_proj.weight"


def test_new_adapters_leave_the_weights_where_a_base_has_them() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 200}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
    grown = dict[str, int]()
    with new_tensors() as live:
        whole = compiler.compile(model, verify=False, packed_weights=False)
        base = BaseExecutor(whole)  # as that of `pcg serve --split-port`
        bound = live_bytes(live())
        # What serving multiplies by as one differs: q, k and v, or some of them.
        for targets in (["k_proj"], ["q_proj", "v_proj"], ["up_proj"]):
            name = " ".join(targets)
            whole.add_adapter(name, pcg.LoraConfig(r=1, target_modules=targets))
            whole.generate([[3, 4, 5]], name, max_new_tokens=2)
            grown[name] = live_bytes(live()) - bound
    assert bound >= base.size_bytes
    assert max(grown.values()) < base.multiplied[Q].nbytes, grown


def test_clients_have_no_weights_to_share() -> None:
    model = oracle.random_model(BY_NAME["llama3"].config(1))
    whole = compiler.compile(model, verify=False)
    with (
        running_base(whole) as base,
        base.connect(cut="linear") as split,
        split.engine().start() as engine,
        pytest.raises(SplitError, match="leave split_port out"),
    ):
        SharedBase(split, engine)
