"""Appends of keys and values before attention: where they stand, and where they do not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from pcg.compiler import compile_program
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.passes.fusion.defer_sums import SplitCacheAppend
from tests.support.families import BY_NAME
from tests.support.kernel_graphs import groups


@cache
def block(name: str, **changes: Any) -> Graph:
    """The layer of a program that serves."""
    config = BY_NAME[name].config(1, **changes)
    return compile_program(config, None).serving.model.blocks[0]


def split(graph: Graph) -> Graph:
    found = SplitCacheAppend().run(graph)
    verify(found)
    return found


def kernel_of_keys(graph: Graph) -> list[str]:
    """Operators of the parts of the kernel that appends keys."""
    (found,) = [g for g in groups(graph) if any(node.op == "append" for node in g.nodes)]
    return [" ".join(node.op for node in part.nodes) for part in found.parts]


@pytest.mark.parametrize(
    ("name", "changes", "kernel"),
    [
        ("llama3", {}, ["rope", "rope append", "append"]),
        ("qwen3", {"head_dim": 16}, ["rms_norm rope", "rms_norm rope append", "append"]),
        ("cohere", {"dtype": "bfloat16"}, ["cast rope cast", "cast rope cast append", "append"]),
        ("gpt_neox", {}, ["rope", "rope append", "append"]),
    ],
)
def test_attention_reads_what_one_kernel_appended(
    name: str, changes: dict[str, Any], kernel: list[str]
) -> None:
    graph = block(name, **changes)
    found = split(graph)
    attention = next(node for node in found.nodes if node.op == "attention")
    assert attention.inputs[1:3] == ("keys", "values")
    old = next(node for node in graph.nodes if node.op == "attention")
    appended = [found.producers[value].inputs[0] for value in attention.inputs[1:3]]
    assert tuple(appended) == old.inputs[1:3]
    assert kernel_of_keys(found) == kernel


def test_other_attention_appends_for_itself() -> None:
    # Nothing makes keys but a product; attention has no kernel for such heads.
    assert split(block("gpt2")) == block("gpt2")
    graph = block("llama3")
    assert SplitCacheAppend(sizes=(24, 32)).run(graph) == graph
    assert SplitCacheAppend(dtypes=("bf16",)).run(graph) == graph


def test_keys_that_a_prompt_replaces_are_appended_by_attention() -> None:
    recipe = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}
    program = compile_program(BY_NAME["llama3"].config(2), {"a": recipe})
    for graph in program.serving.model.blocks:
        assert any(node.op == "virtual_tokens" for node in graph.nodes)
        assert split(graph) == graph


def test_names_that_are_taken() -> None:
    graph = block("llama3")
    renamed = graph.renamed(
        {graph.inputs[0].name: "keys", "reshape_2": "values.1", "rope": "values"}
    )
    attention = next(node for node in split(renamed).nodes if node.op == "attention")
    assert attention.inputs[1:3] == ("keys_1", "values_2")


def test_what_is_kept_of_keys_is_made_beside_them() -> None:
    """A plan that keeps keys: the kernel stores them twice where there is a cache."""
    graph = block("llama3")
    keys = next(node for node in graph.nodes if node.op == "attention").inputs[1]
    found = split(graph.replace(outputs=(*graph.outputs, keys)))
    assert [group.outputs for group in groups(found) if keys in group.made] == [
        ("rope", keys, "keys", "values")
    ]
