"""The logits of every token of whole sequences, each with its own adapter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcg.errors import GenerationError
from pcg.parallel.ranks.agreement import check_same
from pcg.runtime.model.batch import whole_sequences
from pcg.runtime.model.state import ModelState, NamedAdapter
from pcg.runtime.requests.compared import sequence_facts


def whole_logits(
    state: ModelState,
    sequences: Sequence[Sequence[int]],
    adapter: NamedAdapter | Sequence[NamedAdapter],
) -> list[Tensor]:
    """Compute the logits [S_i, V] of each sequence; see `Executor.logits`."""
    adapters = state.adapters_of(len(sequences), adapter)
    check_same(state.ranks, "logits", sequence_facts(sequences, adapters))
    tables = state.serving.tables
    order = tables.order(adapters)
    for i, sequence in enumerate(sequences):
        if not sequence:
            raise GenerationError(f"sequence {i} has no tokens; give at least one")
    chosen = [adapters[i] for i in order]
    virtual = [0 if one is None else one.prompt_tokens for one in chosen]
    batch = whole_sequences([sequences[i] for i in order], state.device, virtual)
    sizes = [span.length for span in batch.spans]
    bound = tables.bind(chosen, sizes)
    parts = state.serving.runner.logits(batch, bound).split(sizes)
    own = [part[count:] for part, count in zip(parts, virtual, strict=True)]
    by_index = dict(zip(order, own, strict=True))
    return [by_index[i] for i in range(len(sequences))]
