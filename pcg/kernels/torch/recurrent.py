"""Short convolutions and linear recurrences over ragged token-flat batches.

A convolution lays the tokens of each sequence behind the last W - 1 inputs before them, and shifts
the whole or has a library convolve it as one sequence; outputs at the earlier inputs are dropped.
A recurrence runs a single token by its definition, on CPUs by a native kernel, and more tokens in
chunks: with γ the sums of decays within a chunk, and L = exp(γ_i - γ_j) for j <= i,

    T = (I + strictLower(β k kᵀ ⊙ L))⁻¹    U = T (β v)    W = T (β k ⊙ exp(γ))    (with beta)
    v' = U - W S                                           (v' = v without beta)
    o = (q ⊙ exp(γ)) S + (q kᵀ ⊙ L) v'
    S' = exp(γ_C) S + (k ⊙ exp(γ_C - γ))ᵀ v'

Backward runs the chunks again under autograd, from the state at the start of the window.

Shapes: n sequences of m tokens, H heads of G groups, K channels of keys, V of values.
Source: Mamba-2 (arXiv:2405.21060), gated delta networks (arXiv:2412.06464).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pcg.ir.operators.recurrent import CHANNEL_CHUNK, CHUNK
from pcg.kernels.batch import ProgramBatch, SequenceStates, once
from pcg.kernels.devices import uploaded, uploaded_list
from pcg.kernels.torch import host_kernels

# ---------------------------------------------------------------------------------- convolutions


class _Rows(NamedTuple):
    """Rows of sequences' tokens, each sequence behind its W - 1 earlier inputs.

    Attributes:
        size: number of rows.
        starts: the first row of each sequence.
        tokens: the row of each token, [T].
        before, after: the rows of each sequence's W - 1 earlier inputs, and of its last W - 1
            inputs, [n (W - 1)].
    """

    size: int
    starts: Sequence[int]
    tokens: Tensor
    before: Tensor
    after: Tensor


def short_convolution(
    batch: ProgramBatch,
    number: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    library: str | None = None,
) -> Tensor:
    """Compute the operator of that name: x is [T, C], weight [C, W], bias [C].

    `library` is that of several tokens.
    """
    slots = _slots(batch, number)
    if slots is not None:
        of_tokens = host_kernels.convolved(slots, x, weight, bias)
        if of_tokens is not None:
            return of_tokens
    size = weight.shape[1] - 1
    rows, spans = _rows(batch, size), len(batch.spans)
    library = _library_of_rows(batch, library, (rows.size + size) * x.shape[1])
    dtype = x.dtype if library else torch.promote_types(x.dtype, torch.float32)
    behind = x.new_empty((rows.size, x.shape[1]), dtype=dtype)
    behind[rows.tokens] = x.to(dtype)
    before = x.new_zeros((spans, size, x.shape[1]))
    if batch.states is not None:
        batch.states.read(batch.layer, number, before)
    behind[rows.before] = before.flatten(0, 1).to(dtype)
    if batch.states is not None:
        after = behind[rows.after].to(x.dtype)
        batch.states.write(batch.layer, number, after.unflatten(0, (spans, size)))
        for span, tokens, slot in batch.states.snapshots:
            first = rows.starts[span] + tokens
            state = behind[first : first + size].to(x.dtype)
            batch.states.keep(batch.layer, number, slot, state.unsqueeze(0))
    out = _convolved(behind, weight, bias, library)[rows.tokens - size]
    return out.to(x.dtype)


def short_convolution_backward(
    batch: ProgramBatch, number: int, dy: Tensor, weight: Tensor, *, library: str | None = None
) -> Tensor:
    """Return dx of a short convolution, [T, C]: dy convolved with the taps in reverse order."""
    size = weight.shape[1] - 1
    rows, spans = _rows(batch, size), len(batch.spans)
    library = _library_of_rows(batch, library, (rows.size + size) * dy.shape[1])
    dtype = dy.dtype if library else torch.promote_types(dy.dtype, torch.float32)
    dout = dy.new_zeros((rows.size + size, dy.shape[1]), dtype=dtype)
    dout[rows.tokens] = dy.to(dtype)
    behind = _convolved(dout, weight.flip(1), None, library)
    if batch.states is not None:
        after = dy.new_zeros((spans, size, dy.shape[1]), dtype=dtype)
        batch.states.read_gradients(batch.layer, number, after)
        behind[rows.after] += after.flatten(0, 1)
        before = behind[rows.before].unflatten(0, (spans, size))
        batch.states.write_gradients(batch.layer, number, before)
    return behind[rows.tokens].to(dy.dtype)


def _library_of_rows(batch: ProgramBatch, library: str | None, elements: int) -> str | None:
    """Return the library for batches of several tokens of a sequence; its offsets have 32 bits."""
    return library if library and batch.longer_spans and elements < 2**32 else None


def _convolved(rows: Tensor, weight: Tensor, bias: Tensor | None, library: str | None) -> Tensor:
    """Convolve rows [R, C] without those before the first: [R - W + 1, C]."""
    size = weight.shape[1] - 1
    if library is not None:
        channels = rows.t().unsqueeze(0)  # [1, C, R]
        convolved: Tensor = import_module(library).causal_conv1d_fn(channels, weight, bias)
        return convolved[0].t()[size:]
    ends = len(rows) - size
    taps = weight.to(rows.dtype).t()
    out = rows[:ends] * taps[0]
    for tap in range(1, size + 1):
        out.addcmul_(rows[tap : tap + ends], taps[tap])
    return out if bias is None else out.add_(bias)


def _rows(batch: ProgramBatch, size: int) -> _Rows:
    def make() -> _Rows:
        lengths = np.array([span.length for span in batch.spans])
        ends = (lengths + size).cumsum()
        starts = ends - lengths - size
        within = np.arange(size)
        places = np.arange(lengths.sum()) + (np.arange(len(lengths)) + 1).repeat(lengths) * size
        before, after = ((firsts[:, None] + within).ravel() for firsts in (starts, ends - size))
        device = batch.input_ids.device
        tables = (uploaded(torch.from_numpy(x), device) for x in (places, before, after))
        return _Rows(int(ends[-1]), starts.tolist(), *tables)

    return once(batch.known, ("rows behind histories", size), make)


# ----------------------------------------------------------------------------------- recurrences


_Index: TypeAlias = slice | Tensor


class _Group(NamedTuple):
    """Sequences with equally many tokens in the batch.

    Attributes:
        length: tokens of each sequence.
        sequences: indices of the spans.
        tokens: indices of their tokens, sequence by sequence.
    """

    length: int
    sequences: _Index
    tokens: _Index


def recurrence(
    batch: ProgramBatch,
    number: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    *,
    library: str | None = None,
) -> Tensor:
    """Compute the operator of that name, [T, H, V]; `library` is that of several tokens."""
    inputs = (q, k, v, decay, *(() if beta is None else (beta,)))
    slots = _slots(batch, number)
    if slots is not None:
        of_tokens = host_kernels.recurred(slots, inputs)
        if of_tokens is not None:
            return of_tokens
    states = _states(batch, number, k, v)
    out = torch.empty_like(v)
    for group in _groups(batch):
        parts = [_part(x, group) for x in inputs]
        o, after = _scan(parts, states[group.sequences], library)
        out[group.tokens] = o.flatten(0, 1).to(out.dtype)
        states[group.sequences] = after
    if batch.states is not None:
        for index, kept in _snapshots(batch.states).items():
            state = states[index : index + 1]
            place = end = batch.spans[index].start
            for tokens, slot in (*kept, (batch.spans[index].length, None)):
                place, end = end, batch.spans[index].start + tokens
                if place < end:
                    group = _Group(end - place, slice(index, index + 1), slice(place, end))
                    parts = [_part(x, group) for x in inputs]
                    o, state = _scan(parts, state, library)
                    out[place:end] = o[0].to(out.dtype)
                if slot is not None:
                    batch.states.keep(batch.layer, number, slot, state)
            states[index] = state[0]
        batch.states.write(batch.layer, number, states)
    return out


def _slots(batch: ProgramBatch, number: int) -> host_kernels.Slots | None:
    """Return the states that a step of single tokens changes in place; None for other steps."""
    slots = None if batch.states is None else batch.states.slots_of(batch.layer, number)
    return None if slots is None or batch.longer_spans else slots


def _snapshots(states: SequenceStates) -> dict[int, list[tuple[int, int]]]:
    """Return tokens and slots of the snapshots of each span that has any."""
    by_span: dict[int, list[tuple[int, int]]] = {}
    for span, tokens, slot in states.snapshots:
        by_span.setdefault(span, []).append((tokens, slot))
    return by_span


def recurrence_backward(
    batch: ProgramBatch, number: int, do: Tensor, *inputs: Tensor, library: str | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of a recurrence's inputs, from do and the inputs."""
    states = _states(batch, number, *inputs[1:3])
    dstates = torch.zeros_like(states)
    if batch.states is not None:
        batch.states.read_gradients(batch.layer, number, dstates)
    gradients = tuple(torch.empty_like(x) for x in inputs)
    for group in _groups(batch):
        parts = [_part(x, group).requires_grad_() for x in inputs]
        before = states[group.sequences].detach().requires_grad_()
        with torch.enable_grad():
            o, after = _scan(parts, before, library)
        sums = (_part(do, group), dstates[group.sequences])
        *of_parts, dbefore = torch.autograd.grad([o, after], [*parts, before], sums)
        for gradient, part in zip(gradients, of_parts, strict=True):
            gradient[group.tokens] = part.flatten(0, 1).to(gradient.dtype)
        dstates[group.sequences] = dbefore
    if batch.states is not None:
        batch.states.write_gradients(batch.layer, number, dstates)
    return gradients


def _states(batch: ProgramBatch, number: int, k: Tensor, v: Tensor) -> Tensor:
    """Return the states before the batch's tokens, [n, H, K, V]."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    shape = (len(batch.spans), v.shape[1], k.shape[2], v.shape[2])
    states = v.new_zeros(shape, dtype=dtype)
    if batch.states is not None:
        batch.states.read(batch.layer, number, states)
    return states


def _part(x: Tensor, group: _Group) -> Tensor:
    """Return the tokens of a group, [n, m, …], in fp32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    part: Tensor = x[group.tokens].to(dtype).unflatten(0, (-1, group.length))
    return part.detach()


def _groups(batch: ProgramBatch) -> Sequence[_Group]:
    """Return the sequences by their numbers of tokens, but those with snapshots."""

    def make() -> list[_Group]:
        by_length: dict[int, list[int]] = {}
        apart = {} if batch.states is None else _snapshots(batch.states)
        for index, span in enumerate(batch.spans):
            if index not in apart:
                by_length.setdefault(span.length, []).append(index)
        if len(by_length) == 1 and not apart:
            return [_Group(next(iter(by_length)), slice(None), slice(None))]
        device = batch.input_ids.device
        groups = []
        for length, spans in by_length.items():
            starts = np.array([batch.spans[index].start for index in spans])
            tokens = torch.from_numpy((starts[:, None] + np.arange(length)).ravel())
            places = uploaded_list(spans, torch.int64, device)
            groups.append(_Group(length, places, uploaded(tokens, device)))
        return groups

    return once(batch.known, "groups of recurrences", make)


def _scan(inputs: Sequence[Tensor], state: Tensor, library: str | None) -> tuple[Tensor, Tensor]:
    """Return o [n, m, H, V] and the states after, of inputs [n, m, …] and states [n, H, K, V].

    A library multiplies in bfloat16.
    """
    q, k, v, decay, *betas = inputs
    shared = v.shape[2] // k.shape[2]
    if shared > 1:
        q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
    if library is not None and v.shape[1] > 1:
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
        options = {"scale": 1.0, "initial_state": state, "output_final_state": True}
        o, after = _kernel(decay.dim() == 4, bool(betas))(q, k, v, decay, *betas, **options)
        return o.to(decay.dtype), after
    rest = [x.transpose(1, 2) for x in (q, k, v, decay, *betas)]
    size = CHUNK if decay.dim() == 3 else CHANNEL_CHUNK
    outs = []
    for part in _cut(rest, size if v.shape[1] > 1 else 1):
        o, state = (_chunk if v.shape[1] > 1 else _token)(state, *part)
        outs.append(o)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.transpose(1, 2), state


@functools.cache
def _kernel(by_channel: bool, has_beta: bool) -> Any:
    """Return flash-linear-attention's function of a recurrence (0.5: fla/ops/*/chunk.py)."""
    if by_channel:
        return import_module("fla.ops.kda").chunk_kda
    if has_beta:
        return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return import_module("fla.ops.simple_gla").chunk_simple_gla


def _cut(inputs: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    for start in range(0, inputs[0].shape[2], size):
        yield [x[:, :, start : start + size] for x in inputs]


def _token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run a single token of each sequence: [n, H, 1, …]."""
    kept = state * decay.exp().reshape(*decay.shape[:2], -1, 1)
    if beta is not None:
        v = beta[..., None] * (v - k @ kept)
    state = kept + k.transpose(-1, -2) * v
    return q @ state, state


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run a chunk of tokens of each sequence: [n, H, C, …]."""
    is_by_channel = decay.dim() == 4
    sums = decay.cumsum(dim=2)
    size = q.shape[2]
    later = torch.ones((size, size), dtype=torch.bool, device=q.device).triu(1)
    pairs = sums.unsqueeze(3) - sums.unsqueeze(2)
    later = later[..., None] if is_by_channel else later
    pairs = pairs.masked_fill(later, float("-inf")).exp()
    if not is_by_channel:
        sums = sums.unsqueeze(-1)

    def scores(x: Tensor) -> Tensor:
        if is_by_channel:
            found: Tensor = torch.einsum("nhik,nhjk,nhijk->nhij", x, k, pairs)
            return found
        return (x @ k.transpose(-1, -2)) * pairs

    if beta is not None:
        beta = beta.unsqueeze(-1)
        system = beta * scores(k)  # the solver takes its diagonal as ones, and reads below it
        right = torch.cat([beta * v, beta * k * sums.exp()], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        of_v, of_k = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        v = of_v - of_k @ state
    out = (q * sums.exp()) @ state + scores(q) @ v
    last = sums[:, :, -1:]
    added = (k * (last - sums).exp()).transpose(-1, -2) @ v
    return out, last.exp().transpose(-1, -2) * state + added
