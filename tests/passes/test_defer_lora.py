"""LoRA that is left to the kernel of what reads its sum: at which sites, and what is launched."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from triton.runtime import interpreter

from pcg.compiler import compile_program
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.passes.fusion.defer_sums import DeferLora
from tests.support import compiled, oracle
from tests.support.emitted_programs import METHODS
from tests.support.families import BY_NAME
from tests.support.kernel_graphs import lowered
from tests.support.parameters import mostly_slow
from tests.support.prompts import prompts


def model_of(family: str, method: Any = "lora", **options: Any) -> ModelGraph:
    config = BY_NAME[family].config(2)
    return compile_program(config, method, backend="triton", **options).serving.model


def sites(block: Graph) -> dict[str, bool]:
    """For each product with LoRA, by its first output: whether some LoRA is left."""
    loras = [node for node in block.nodes if node.op == "lora_linear"]
    return {node.outputs[0].name.rpartition("_")[0]: bool(node.get("deferred")) for node in loras}


def test_all_sites_of_a_layer() -> None:
    model = model_of("llama3")
    (block,) = model.blocks
    assert sites(block) == dict.fromkeys(["q_proj", "o_proj", "gate_proj", "down_proj"], True)
    kernels = lowered(block).kernels
    of_kernel = {name: i for i, parts in enumerate(kernels) for part in parts for name in part}
    for node in block.nodes:
        if node.op == "add_deferred":
            assert node.name in of_kernel, "a launch of its own"
    (_, z, left), (_, given, of_last) = block.outputs, [v.name for v in block.inputs[:3]]
    assert block.producers[z] is block.producers[left]
    assert [reader.op for reader in block.consumers[given]] == ["add_deferred"]
    assert block.consumers[given] == block.consumers[of_last]
    first = model.prologue.producers[model.prologue.outputs[2]]
    assert first.op == "nothing_deferred"
    assert [node.op for node in model.epilogue.nodes][:2] == ["add_deferred", "add"]
    for graph in model.graphs:
        verify(graph)
    assert DeferLora().run(model) == model  # nothing else is left to do


@pytest.mark.parametrize(
    ("family", "method", "expected"),
    [
        pytest.param("gpt2", "lora", {"c_proj", "c_fc", "c_proj_1"}, id="keys of no kernel"),
        pytest.param("llama3", METHODS["dora"], set(), id="another operator reads the sum"),
        pytest.param(
            "gemma2", "lora", {"o_proj", "gate_proj", "down_proj"}, id="heads of no kernel's size"
        ),
    ],
)
def test_sites_that_keep_their_lora(family: str, method: Any, expected: set[str]) -> None:
    (block, *_) = model_of(family, method).blocks
    found = sites(block)
    assert {name for name, is_left in found.items() if is_left} == expected


def test_sums_that_ranks_add_up_keep_theirs() -> None:
    (block,) = model_of("llama3", tp=2).blocks
    found = sites(block)
    assert found.pop("gate_proj")
    assert found.pop("q_proj")
    assert not any(found.values())


@pytest.mark.parametrize("tokens", mostly_slow([7, 17], 17))
def test_few_tokens_have_no_launch_for_expand(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(1))
    wrapped = oracle.with_adapter(base, "all-linear", rank=4)
    oracle.save(wrapped, tmp_path / "a")
    executor = compiled.executor(base, {"a": str(tmp_path / "a")}, backend="triton")
    launched: Counter[str] = Counter()
    run = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    (sequence,) = prompts((tokens,))
    error = oracle.relative_error(executor.logits(sequence, "a"), oracle.logits(wrapped, sequence))
    assert error < 1e-5
    assert launched["shrink_kernel"] == 4
    assert launched["expand_kernel"] == (0 if tokens == 7 else 4)
