"""Finetuning jobs of small random layers, whose parts run in an engine's orders, recorded or not.

Layers have no attention, so that a job takes milliseconds; all else is what an engine runs: passes,
windows, losses and updates, with graphs where there is a recorder. Numbers are fp64, so that a
replay that reads what another one wrote is not taken for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pcg.ir.types import TOKENS, tensor
from pcg.kernels.torch.products import ProductRequest
from pcg.ranks.mesh import SINGLE_MESH
from pcg.ranks.stages import Stages
from pcg.runtime.data.example import Example
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.step_graphs import Recorder
from pcg.runtime.training import bound_training
from pcg.runtime.training import optimizer as optimizers
from pcg.runtime.training.optimizer import make_optimizer, set_rate
from pcg.runtime.training.recorded import window_sizes
from pcg.runtime.training.recorded.window_graphs import PassSizes
from pcg.runtime.training.runner import TrainingPass, TrainingRunner
from pcg.runtime.training.torch_optimizers import Optimizer
from pcg.runtime.training.work_units import Phase

_WIDTH, _VOCABULARY, _PAGES = 6, 11, 64
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """A job, or several of one shape that take the same windows over.

    Attributes:
        widths: the inner width of each layer.
        steps: of each job the lengths of each step's sequences.
        evaluations: lengths of sequences that are evaluated before each step; none for none.
        warm: tokens of the windows that are recorded before the first step; 0 for none.
        windows: the most tokens of windows, which are chosen among these.
        optimizer: the optimizer's name.
        seed: of the choices: windows, parts, and their order.
    """

    widths: Sequence[int]
    steps: Sequence[Sequence[Sequence[int]]]
    evaluations: Sequence[int]
    warm: int
    windows: Sequence[int]
    optimizer: str
    seed: int

    def adapters(self, recorder: Recorder | None) -> list[Tensor]:
        """Train, and return the tensors of each job's adapter and the losses of evaluations."""
        types = [(tensor("f32", TOKENS, 1, 1),) * 2] * len(self.widths)
        cache = KvCache(types, _PAGES, _CPU, in_pages=True)
        runner, found = _Runner(self.widths), list[Tensor]()
        with ExitStack() as stack:
            for place, name, value in (
                (bound_training, "recorder_for", lambda device: recorder),
                (window_sizes, "_TRIES", 2),
                (optimizers, "_is_plain", lambda tensors: True),  # in fp64, too
            ):
                stack.enter_context(patch.object(place, name, value))
            if self.warm and recorder is not None:
                graphs = runner.window_graphs(cache)
                assert graphs is not None
                lengths = max((s for job in self.steps for s in job), key=sum)
                sizes = PassSizes(sum(lengths), len(lengths), pages_for(max(lengths)))
                graphs.warm_up(sizes, self.warm)
            for number, steps in enumerate(self.steps):
                runner.begin(number)
                found += self._trained(runner, cache, steps, Random(self.seed + number))
        return found

    def _trained(
        self, runner: _Runner, cache: KvCache, steps: Sequence[Sequence[int]], random: Random
    ) -> list[Tensor]:
        optimizer = make_optimizer(runner.parameters, Optimizer.of(self.optimizer, {}), 0.01)
        updates, losses, weights = None, list[Tensor](), list(runner.parameters.values())

        def clip() -> Tensor:
            norm = torch.nn.utils.get_total_norm([x.grad for x in weights if x.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(weights, 1.0, norm)
            return norm

        for lengths in steps:
            if self.evaluations:
                losses.append(self._passed(runner, cache, self.evaluations, None, random))
            for weight in weights:
                weight.grad = None
            losses.append(self._passed(runner, cache, lengths, sum(lengths), random))
            updates = updates or runner.update_graphs(optimizer, clip)
            is_recorded = updates is not None and updates.serves
            losses.append((updates.clip() if updates and is_recorded else clip()).clone())
            if updates and is_recorded:
                updates.step(0.01)
            else:
                set_rate(optimizer, 0.01)
                optimizer.step()
        return [*(x.clone() for x in weights), *losses]

    def _passed(
        self,
        runner: _Runner,
        cache: KvCache,
        lengths: Sequence[int],
        normaliser: float | None,
        random: Random,
    ) -> Tensor:
        """Run a pass; returns the sum of its losses."""
        ids = Random(sum(lengths))
        examples = [
            Example(s, s) for s in ([ids.randrange(_VOCABULARY) for _ in range(n)] for n in lengths)
        ]
        tables = [cache.pool.open("job") for _ in lengths]
        for table, length in zip(tables, lengths, strict=True):
            cache.pool.extend(table, pages_for(length))
        whole = TrainingPass(runner, examples, normaliser, None, cache, tables)
        while not whole.is_done:
            stage = whole.stage
            if stage is None:
                tokens = whole.fitting(random.choice(self.windows))
                (whole.begin_window if random.random() < 0.5 else whole.forward)(tokens)
            elif stage.phase is Phase.LOSS:
                whole.run_part(random.randint(1, 80))
            else:
                whole.run_part(whole.load.tokens)
            for _ in range(random.choice((1, 1, 0, 9))):
                whole.record_next()
        for table in tables:
            cache.pool.close(table)
        return whole.loss_sum.clone()


class _Runner(TrainingRunner):
    """Trains layers x + tanh(x·W + x·A·B)·V of an adapter A, B, and a scale of the last states."""

    device = _CPU

    def __init__(self, widths: Sequence[int]) -> None:
        count = len(widths)
        nothing: Any = SimpleNamespace(nodes=())
        layers = {"blocks": (nothing,), "layers": (0,) * count}
        model = SimpleNamespace(prologue=nothing, epilogue=nothing, **layers)
        self.training: Any = SimpleNamespace(
            layers=(0,) * count, model=model, restored=(), first_back=0, prologue=None
        )
        adapter: Any = SimpleNamespace(
            prompt_tokens=0, recipe=SimpleNamespace(learns_first_token=0)
        )
        weights: Any = SimpleNamespace(gathered=None)
        inputs: Any = SimpleNamespace(of=lambda graph, shared: [x for x in shared if x is not None])
        self.adapter, self.weights, self._inputs = adapter, weights, inputs
        self.mesh, self.ranks, self.cp, self.link = (
            SINGLE_MESH,
            SINGLE_MESH.tp,
            SINGLE_MESH.cp,
            None,
        )
        self.stages = Stages((0, count))
        self.stage = self.stages[0]
        self.loss_chunk, self.head_rows = 100, 0
        self._freed = self._training_for = self._encoder = None
        self._graphs = self._graphs_of = None
        self._is_sequence_parallel = self._drops_in_loss = False
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self._embedding, self._head = drawn(_VOCABULARY, _WIDTH), drawn(_WIDTH, _VOCABULARY)
        self._layers: Any = [
            SimpleNamespace(
                w=drawn(_WIDTH, width),
                a=drawn(_WIDTH, 2),
                b=drawn(2, width),
                v=drawn(width, _WIDTH),
            )
            for width in widths
        ]
        self._scale = torch.ones(_WIDTH, dtype=torch.float64)
        trained = {f"{i}.{n}": vars(one)[n] for i, one in enumerate(self._layers) for n in "ab"}
        self.parameters = {**trained, "scale": self._scale}

    def begin(self, number: int) -> None:
        """Begin a job where the adapter lies."""
        generator = torch.Generator().manual_seed(number)
        for weight in self.parameters.values():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
            weight.grad = None

    def prologue(self, batch: Batch) -> tuple[Sequence[Any], Sequence[Tensor | None]]:
        return (self._embedding[batch.input_ids],), (None, (batch.positions * 0.1).cos()[:, None])

    def layer(
        self, layer: int, batch: Batch, carried: Sequence[Tensor], shared: Sequence[Tensor | None]
    ) -> ProductRequest[Any]:
        (x,), one, phase = carried, self._layers[layer], shared[1]
        s = x @ one.a
        inner = (x @ one.w + s @ one.b).tanh() * phase
        return (x + inner @ one.v,), (x, s, inner, phase)
        yield

    def layer_backward(
        self, layer: int, batch: Batch, saved: list[Any], gradients: list[Tensor]
    ) -> ProductRequest[list[Tensor]]:
        (x, s, inner, phase), one = saved, self._layers[layer]
        (dy,) = gradients
        saved.clear()
        gradients.clear()
        d = (dy @ one.v.T) * (phase - inner * inner / phase)
        ds = d @ one.b.T
        _add(one.b, s.T @ d)
        _add(one.a, x.T @ ds)
        return [dy + d @ one.w.T + ds @ one.a.T] if layer else []
        yield

    def _loss(self, part: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        states, phase = part
        chances = ((states * self._scale + phase) @ self._head).log_softmax(-1)
        kept = (targets >= 0)[:, None]
        wanted = torch.zeros_like(chances).scatter_(1, targets.clamp(min=0)[:, None], 1.0) * kept
        return -(chances * wanted).sum(-1), (chances.exp() - wanted) * kept

    def loss_alone(self, batch: Batch, part: Sequence[Tensor], targets: Tensor) -> Any:
        return self._loss(part, targets)[0]
        yield

    def loss_of(self, batch: Batch, part: Sequence[Tensor], targets: Tensor, slopes: Tensor) -> Any:
        losses, slope = self._loss(part, targets)
        d = (slope * slopes[:, None]) @ self._head.T
        _add(self._scale, (d * part[0]).sum(0))
        return losses, [d * self._scale]
        yield

    def trained_in(self, layer: int) -> list[Tensor]:
        return [self._layers[layer].a, self._layers[layer].b]

    def trained_in_loss(self) -> list[Tensor]:
        return [self._scale]


def _add(weight: Tensor, gradient: Tensor) -> None:
    """Add to a weight's gradient, where it lies if there is one."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient
