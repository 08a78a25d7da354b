"""Parts of the tokens on each rank between products: plans, numbers, bytes and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pcg
from pcg.errors import ParallelError
from pcg.ir.analysis.verifier import verify
from pcg.ir.layouts import partitioned
from pcg.ir.parser import parse_graph
from pcg.ir.printer import print_graph
from pcg.ranks.step_parts import gathered_rows, placed_rows, rows_of_rank
from pcg.runtime.data.example import Example
from pcg.runtime.training.windows import LossChunks
from tests.support.families import BY_NAME
from tests.support.parallelized import (
    attached,
    base_over_ranks,
    costs,
    search_layer,
    transitions,
)
from tests.support.parameters import mostly_slow
from tests.support.ranked import (
    JOB,
    check_memory,
    make_executor,
    make_program,
    predicted_memory,
)
from tests.support.sharded import check_candidates, errors
from tests.support.threads import ThreadRanks, run_ranks

ODD = (6, 5)
"""Lengths of sequences, of 11 tokens together."""


# -------------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("name", "words"),
    mostly_slow(
        [("llama2", 2), ("gpt2", 2), ("opt", 2), ("falcon-7b", 1)], ("opt", 2), ("falcon-7b", 1)
    ),
)
def test_sums_become_parts_and_products_gather_them(name: str, words: int, degree: int) -> None:
    base = attached(name).base
    found = base_over_ranks(base, degree, sequence_parallel=True)
    for graph in (*found.typed.graphs, *found.base.graphs):
        verify(graph)
        assert parse_graph(print_graph(graph)) == graph
    for block in found.typed.blocks:
        assert set(transitions(block)) <= {"take"}
        ops = [node.op for node in block.nodes]
        assert (ops.count("gather"), ops.count("scatter")) == (words, words)
    assert [n.op for n in found.typed.prologue.nodes].count("scatter") == 1
    assert [n.op for n in found.typed.epilogue.nodes].count("gather") == 1


# ------------------------------------------------------------------------------- rows of the ranks


@given(tokens=st.integers(1, 20), degree=st.integers(2, 5))
def test_parts_are_the_whole(tokens: int, degree: int) -> None:
    x = torch.randn(tokens, 3)
    parts = [rows_of_rank(x, rank, degree) for rank in range(degree)]
    assert {len(part) for part in parts} == {-(-tokens // degree)}
    assert torch.equal(gathered_rows(parts, tokens), x)
    summands = [placed_rows(part, rank, tokens) for rank, part in enumerate(parts)]
    assert torch.equal(torch.stack(summands).sum(0), x)


@given(
    targets=st.lists(st.sampled_from([-100, 1, 2]), min_size=1, max_size=30),
    size=st.integers(1, 9),
    degree=st.integers(2, 4),
)
def test_every_target_is_in_one_chunk(targets: list[int], size: int, degree: int) -> None:
    wanted = torch.tensor(targets)
    hidden = torch.arange(1.0, len(targets) + 1).unsqueeze(-1)

    def on_rank(ranks: ThreadRanks) -> list[torch.Tensor]:
        own = rows_of_rank(hidden, ranks.rank, degree)
        back = torch.zeros_like(own)
        rows = []
        chunks = LossChunks(wanted, wanted.device, ranks, is_sequence_parallel=True)
        while chunks.left:
            chunk = chunks.take(size)
            assert len(chunk.rows) <= max(size, degree)
            part = chunk.of_own(own)
            joined = torch.cat(ranks.all_gather(part))
            real = chunk.targets >= 0
            assert torch.equal(joined[real], hidden[chunk.rows[real]])
            assert torch.equal(chunk.targets[real], wanted[chunk.rows[real]])
            chunk.put_own(part, back)
            rows.append(chunk.rows[real])
        empty = torch.zeros(0, dtype=torch.long)
        return [torch.cat([empty, *rows]).sort().values, back]

    found = run_ranks(degree, on_rank)
    expected = torch.nonzero(wanted >= 0).squeeze(-1)
    assert all(torch.equal(rows, expected) for rows, _ in found)
    gradient = gathered_rows([back for _, back in found], len(targets))
    assert torch.equal(gradient, hidden * (wanted >= 0).unsqueeze(-1))


# ----------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("degree", [2, 4])
def test_fewer_tokens_than_ranks(degree: int) -> None:
    """A prompt of one token, and steps of one: some ranks have none."""
    name = "llama3"
    program = make_program(name, degree, sequence_parallel=True)
    options: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    one = make_executor(make_program(name, 1), name)

    def act(ranks: ThreadRanks) -> Any:
        executor = make_executor(program, name, ranks)
        return executor.generate([[5]], "a", **options), executor.logits([[5]], "a")[0]

    expected = one.generate([[5]], "a", **options)
    for completions, logits in run_ranks(degree, act):
        assert completions[0].token_ids == expected[0].token_ids
        torch.testing.assert_close(logits, one.logits([[5]], "a")[0], rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------- bytes and memory


@pytest.mark.parametrize("lengths", [(7, 5), ODD], ids=["even", "odd"])
@pytest.mark.parametrize(
    ("name", "site", "degree"),
    [
        ("llama3", "q_proj", 2),
        *(
            pytest.param(name, site, degree, marks=pytest.mark.slow)
            for name, sites in {
                "llama3": ("q_proj", "o_proj", "gate_proj", "down_proj"),
                "opt": ("q_proj", "out_proj", "fc1", "fc2"),
                "gpt2": ("c_attn", "c_proj", "c_fc"),
            }.items()
            for site in sites
            for degree in (2, 4)
        ),
    ],
)
def test_every_candidate_is_right_and_sends_what_it_says(
    name: str, site: str, degree: int, lengths: tuple[int, ...]
) -> None:
    state = attached(name, "float64")
    assert state.training is not None
    pair = state.training.blocks[0], state.base.blocks[0]
    device = costs(degree, sum(lengths))
    search = search_layer(*pair, degree, device, sequence_parallel=True)
    check_candidates(search, search.find(), site, lengths)


def test_a_part_of_a_copy_is_taken_again_where_the_copy_is_gathered_again() -> None:
    """Of a copy that nothing else has to have: backward gathers it for the part of its columns."""
    state = attached("opt", "float64")
    assert state.training is not None
    pair = state.training.blocks[0], state.base.blocks[0]
    search = search_layer(*pair, 2, costs(2, sum(ODD)), sequence_parallel=True)
    plan = search.plan()
    (site,) = (site for site in search.sites if site.name.endswith("fc1"))
    a, b = site.weights
    sent: dict[str, int] = {}
    forced = search.force(plan, site, {a: partitioned(-1), b: partitioned(-2)})
    assert max(errors(search.graph, 2, forced, sent, lengths=ODD).values()) < 1e-12
    said = search.costs.of(forced)
    assert sum(sent.values()) == said.forward_bytes + said.backward_bytes


@pytest.mark.parametrize("name", mostly_slow(["llama3", "gpt2", "opt"], "opt"))
@pytest.mark.parametrize(
    ("degree", "seq"), [(2, 16), pytest.param(2, 13, marks=pytest.mark.slow), (4, 13)]
)
def test_memory_of_a_rank_is_what_is_predicted_and_less(
    name: str, degree: int, seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.measured_memory.SEQ", seq)
    monkeypatch.setattr("tests.support.ranked.SEQ", seq)
    check_memory(name, degree, sequence_parallel=True)
    predicted, plain = (
        predicted_memory(make_program(name, degree, sequence_parallel=parts), name, "a")
        for parts in (True, False)
    )
    assert predicted["activations"] < plain["activations"]
    assert {**predicted, "activations": 0} == {**plain, "activations": 0}


# ------------------------------------------------------------------------------------ the contract


def test_one_rank_has_nothing_to_share() -> None:
    message = "sequence_parallel=True shares norms and residuals over ranks, and tp=1 .* use tp=2"
    for act in (pcg.explain, pcg.compile):
        with pytest.raises(ParallelError, match=message):
            act(BY_NAME["llama3"].config(2), sequence_parallel=True)


@pytest.mark.slow
def test_an_adapter_at_other_sites_is_served_and_trained_so() -> None:
    """The program is specialised anew, with parts of the tokens as before."""
    name = "llama3"
    program = make_program(name, 2, peft=None, sequence_parallel=True)

    def act(ranks: ThreadRanks) -> bool:
        executor = make_executor(program, name, ranks)
        executor.finetune([Example([3] * 7, [3] * 7)], "m", peft="lora", **_short())
        return "reduce_scatter" in executor.training_runner("m").training.source

    assert run_ranks(2, act) == [True, True]


def _short() -> Mapping[str, Any]:
    return {key: value for key, value in JOB.items() if key != "eval_data"}
