"""Calibration: measures the time of steps on this machine; later steps correct the estimate.

Four steps (short, long, with a context, with logits of all tokens) give the coefficients of a
forward:

    t(n tokens, k keys, r rows of logits) = a₀ + a₁ n + a₂ k + a₃ r

On a GPU, steps of 64 and 512 tokens give two lines t(n), for few and for many tokens, which meet at
the knee. Estimates: a layer's forward takes its share of the model; its backward twice that, as
backward has twice the products; a token's loss twice the time of a row of logits among many; the
loss's constant the time of a single row, which reads the head's weights; and a key that a sequence
reads once as long as a key that a token attends to.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from pcg.kernels.batch import Span
from pcg.ranks.group import broadcast_from_first
from pcg.runtime.admission.latency import Knee, Latencies, Latency
from pcg.runtime.engine.device.clock import Clock
from pcg.runtime.engine.device.served_batch import cut, hidden_requests
from pcg.runtime.memory.kv_cache import KvCache, stage_kv_types
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.memory.recurrent_states import recurrent_types
from pcg.runtime.model.batch import ANY_TOKEN, Batch
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.model.state import ModelState
from pcg.runtime.model.step_graphs import StepGraphs
from pcg.runtime.requests.step import Load, keys_of

_SHORT, _LONG, _FEW, MANY = 16, 256, 64, 512
"""Numbers of tokens of the measured steps; the last two are below and above a knee."""
_STEEPER = 1.5
"""The minimum ratio of times per token beyond and before a knee."""
_ROWS = 64
"""The number of rows of logits in the step with many rows."""
_ROUNDS = 3
_BACKWARD = 2.0
"""Time of a backward, relative to the forward."""
_SAVED = 0.05
"""Overhead of a window in a serving step, relative to its tokens' time and a step's constant."""


def calibrated(state: ModelState, clock: Clock, graphs: StepGraphs | None = None) -> Latencies:
    """Measure the latencies of a model's base, without adapters, by a clock.

    Args:
        graphs: recorded steps; measured if they are warmed up, else steps run eagerly.
    """
    runner, tables, device = state.serving.runner, state.serving.tables, state.device
    long = min(_LONG, state.max_positions or _LONG)
    many = min(MANY, state.max_positions or MANY) if device.type == "cuda" else 0
    pages = pages_for(max(long, many))
    if graphs is not None and not (graphs.is_warm and graphs.cache.pool.free >= pages):
        graphs = None
    types = stage_kv_types(runner.model, state.stages, state.mesh.stage)
    if graphs is None:
        states = recurrent_types(runner.model)
        cache = KvCache(types, pages, device, states=states, slots=1)
    else:
        cache = graphs.cache
    table = cache.pool.open("calibration")
    cache.pool.take_slot(table)
    cache.pool.extend(table, pages)

    def median_s(run: Callable[[], object]) -> float:
        took = []
        for _ in range(_ROUNDS + 1):
            started = clock.now_s()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took.append(clock.now_s() - started)
        return statistics.median(took[1:])

    def eager_s(tokens: int, context: int, rows: int) -> float:
        ids = torch.full((tokens,), ANY_TOKEN, device=device)

        def run() -> None:
            batch = Batch(ids, [Span(0, tokens, context, table)], cache)
            bound = tables.bind([None], [tokens])
            parts = cut(batch, [None], tables, cache, runner, state.mesh.cp)
            with torch.inference_mode():
                hidden = run_single(hidden_requests(parts, runner))
            if rows:
                last = torch.arange(tokens - rows, tokens, device=device)
                runner.logits_of(hidden, batch, bound, last, tables.bind([None], [rows]))

        return median_s(run)

    def seconds(tokens: int, context: int, rows: int) -> float:
        if graphs is None:
            return eager_s(tokens, context, rows)
        run = partial(graphs.run, [ANY_TOKEN] * tokens, [(tokens, context)], [table], [None], [0])
        recorded_s = median_s(run)
        if rows == 1:
            return recorded_s
        # Correct for other numbers of rows by the difference of two eager steps.
        return recorded_s + eager_s(tokens, context, rows) - eager_s(tokens, context, 1)

    latencies = fitted_latencies(seconds, len(runner.model.layers), long, many)
    cache.pool.close(table)
    if device.type == "cpu":  # many small parts of a loss read the head as often as few large ones
        latencies.loss = Latency(0.0, latencies.loss.coefficients_s[1], 0.0)
    # Ranks must plan the same steps, but their fits may round differently.
    of_first = []
    for latency in (latencies.forward, latencies.backward, latencies.loss, latencies.layer):
        begin = torch.tensor(
            [*latency.coefficients_s, *latency.knee, latency.read_s], dtype=torch.float64
        )
        of_first.append(Latency(*broadcast_from_first(runner.alike, begin).tolist()))
    return Latencies(*of_first)


def fitted_latencies(
    seconds: Callable[[int, int, int], float], layers: int, long: int = _LONG, many: int = 0
) -> Latencies:
    """Fit latencies to the times of a few steps.

    Args:
        seconds: returns the time of a step, given a sequence's new tokens, earlier tokens and rows
            of logits.
        many: tokens of a step beyond the knee; 0 without a knee.
    """
    short = min(_SHORT, long)
    steps = [(short, 0, 1), (short, long - short, 1), (long, 0, 1), (short, 0, short)]
    measured = [
        (Load.of(n, behind) + Load(sampled=r), seconds(n, behind, r)) for n, behind, r in steps
    ]
    constant_s, token_s, key_s, row_s = _fitted(measured)
    knee = Knee()
    if many > long:
        times = {n: seconds(n, 0, 1) - key_s * keys_of(n, 0) for n in (short, _FEW, long, many)}
        knee = _knee(times)
    if knee.tokens:
        token_s = (times[_FEW] - times[short]) / (_FEW - short)
        constant_s = times[short] - token_s * short - row_s
    head_s = max(measured[0][1] - seconds(short, 0, 0), row_s)
    rows = min(_ROWS, long)
    of_rows_s = max(seconds(long, 0, rows) - seconds(long, 0, 0), rows * row_s)
    window = _SAVED * token_s, _SAVED * constant_s
    forward = Latency(constant_s, token_s, key_s, row_s, *window, *knee, read_s=key_s)
    share = _BACKWARD / layers
    beyond = {"beyond_s": share * knee.token_s, "knee": knee.tokens}
    backward = Latency(constant_s / layers, token_s * share, key_s * share, **beyond)
    loss = Latency(head_s, _BACKWARD * of_rows_s / rows, 0.0)
    if knee.tokens:
        # Few rows are bound by reading the head; at the knee, products take as long as reading.
        beyond = {"beyond_s": _BACKWARD * head_s / knee.tokens, "knee": knee.tokens}
        loss = Latency(_BACKWARD * head_s, _BACKWARD * row_s, 0.0, **beyond)
    layer = Latency(constant_s, token_s, key_s, beyond_s=knee.token_s, knee=knee.tokens)
    return Latencies(forward, backward, loss, layer.scaled(1 / layers))


def _knee(times: Mapping[int, float]) -> Knee:
    """Return the knee where the lines of few and of many tokens meet, from two times of each.

    The knee is empty if the lines have nearly the same slope.
    """
    (n0, t0), (n1, t1), (n2, t2), (n3, t3) = sorted(times.items())
    few_s, many_s = (t1 - t0) / (n1 - n0), (t3 - t2) / (n3 - n2)
    if few_s <= 0 or many_s < _STEEPER * few_s:
        return Knee()
    # t1 + few_s (n - n1) = t2 - many_s (n2 - n)
    tokens = (t1 - t2 + many_s * n2 - few_s * n1) / (many_s - few_s)
    return Knee(many_s - few_s, round(min(max(tokens, n1), n2)))


def _fitted(measured: Sequence[tuple[Load, float]]) -> tuple[float, float, float, float]:
    """Fit the coefficients by least squares, bounded from below against noise."""
    rows = torch.tensor([[1.0, x.tokens, x.keys, x.sampled] for x, _ in measured]).double()
    took = torch.tensor([seconds for _, seconds in measured]).double()
    least = torch.tensor([0.05 * took.min(), 0.05 * took.min() / _SHORT, 0.0, 0.0]).double()
    fitted = torch.linalg.lstsq(rows, took.unsqueeze(-1)).solution.squeeze(-1)
    constant_s, token_s, key_s, row_s = torch.maximum(fitted, least).tolist()
    # A key costs at least a millionth of a token, so that long contexts are never free.
    return constant_s, token_s, max(key_s, token_s * 1e-6), max(row_s, token_s * 1e-2)
