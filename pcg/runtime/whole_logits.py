"""Logits of whole sequences, without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcg.errors import GenerationError
from pcg.ranks.agreement import check_same
from pcg.runtime.model.batch import whole_sequences
from pcg.runtime.model.state import ModelState, NamedAdapter
from pcg.runtime.requests.compared import sequence_facts


def whole_logits(
    state: ModelState,
    sequences: Sequence[Sequence[int]],
    adapter: NamedAdapter | Sequence[NamedAdapter],
) -> list[Tensor]:
    """Compute the logits of all tokens of some sequences; see `Executor.logits`.

    Ranks that share the tokens compute those of their own, and gather all.
    """
    adapters = state.adapters_of(len(sequences), adapter)
    check_same(state.world, "logits", sequence_facts(sequences, adapters))
    tables = state.serving.tables
    order = tables.order(adapters)
    for i, sequence in enumerate(sequences):
        if not sequence:
            raise GenerationError(f"sequence {i} has no tokens; give at least one")
    wanted, chosen = [sequences[i] for i in order], [adapters[i] for i in order]
    virtual = [0 if one is None else one.prompt_tokens for one in chosen]
    batch = whole_sequences(wanted, state.device, virtual, cp=state.mesh.cp)
    sizes = [span.length for span in batch.spans]
    bound = tables.bind([chosen[span.number] for span in batch.spans], sizes)
    logits = state.serving.runner.logits(batch, bound)
    if batch.parts is not None:
        (logits,) = batch.parts.gathered(logits)
    lengths = [count + len(one) for one, count in zip(wanted, virtual, strict=True)]
    own = [part[count:] for part, count in zip(logits.split(lengths), virtual, strict=True)]
    by_index = dict(zip(order, own, strict=True))
    return [by_index[i] for i in range(len(sequences))]
