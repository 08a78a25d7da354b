"""A frozen head and its loss in one operator, where nothing else is done to the logits."""

from __future__ import annotations

import pytest

from pcg.compiler import compile_program
from pcg.ir.graph import Graph
from pcg.ir.operators import operator
from pcg.passes.fusion.fuse_products import FuseLoss
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow

LORA = {"peft_type": "LORA", "r": 4}


def epilogue(name: str, peft: object = "lora") -> Graph:
    program = compile_program(BY_NAME[name].config(2), peft)
    assert program.training is not None
    return program.training.epilogue


@pytest.mark.parametrize(
    ("name", "bias", "scale", "softcap"),
    mostly_slow(
        [
            ("llama3", False, 1.0, 0.0),
            ("phi", True, 1.0, 0.0),
            ("granite", False, 0.5, 0.0),
            ("cohere", False, 0.5, 0.0),
            ("gemma2", False, 1.0, 30.0),
        ],
        ("phi", True, 1.0, 0.0),
    ),
)
def test_what_is_done_to_the_logits(name: str, bias: bool, scale: float, softcap: float) -> None:
    before = epilogue(name)
    fused = FuseLoss().run(before)
    assert fused.outputs == before.outputs
    (node,) = [node for node in fused.nodes if node.op == "linear_cross_entropy"]
    assert node.attribute("bias") is bias
    assert node.attribute("scale") == pytest.approx(scale)
    assert node.attribute("softcap") == pytest.approx(softcap)
    assert len(fused.nodes) == 3  # beside the norm, forward and backward
    assert [fused.types[name] for name in fused.outputs] == [
        before.types[name] for name in before.outputs
    ]
    inferred = operator(node.op).infer(
        tuple(fused.types[name] for name in node.inputs), dict(node.attributes)
    )
    assert inferred == tuple(value.type for value in node.outputs)


def test_a_head_that_is_adapted_stays_as_it_is() -> None:
    adapted = epilogue("llama3", {**LORA, "target_modules": ["lm_head", "q_proj"]})
    assert FuseLoss().run(adapted) == adapted
    block = compile_program(BY_NAME["llama3"].config(2)).serving.model.blocks[0]
    assert FuseLoss().run(block) is block
