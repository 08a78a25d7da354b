"""Training passes and the runner of an adapter: forward and backward of sequences in windows.

Token-level finetuning (FlexLLM v2 §6.1, algorithm 2). The concatenated tokens of all sequences run
forward in windows of any size; later windows read the keys and values of earlier windows from the
KV cache:

    forward    for windows j from the first:  for layers l from the first:  save for backward
    loss       for windows j from the last:   loss and gradient of the hidden states; drop logits
    backward   for layers l from the last:    for windows j from the last:
                   add dK, dV of all tokens that j attended to, to the layer's sums; the sums of
                   j's own tokens are then final, as all later windows have added their parts

Over pipeline stages, the backward of windows runs stage by stage (`windows.py`).

Other work may run between any two (layer, window) pairs, forward and backward, and within the loss:
between any tokens or, on CPUs, rows of the head (`pcg/runtime/model/merged_execution.py`). Without
a cache, all sequences form a single window, and attention saves keys and values itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.ir.program.program import Training, routed_layers
from pcg.kernels.batch import KvGradients, Routes
from pcg.kernels.devices import on_device, uploaded, uploaded_list
from pcg.kernels.torch.products import ProductRequest
from pcg.options import PLAIN_LOSS, LossForm
from pcg.peft.adapter import Adapter
from pcg.ranks.stages import StageLink
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.memory.host_memory import SLACK, FreedMemory, return_freed_memory
from pcg.runtime.memory.kv_cache import KvCache, without_rows
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.memory.recurrent_states import Boundary, WindowStates
from pcg.runtime.model.batch import ANY_TOKEN, Batch
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.step import Load
from pcg.runtime.training.bound_training import BoundTraining
from pcg.runtime.training.recorded.window_graphs import PassSizes
from pcg.runtime.training.windows import (
    BackwardOrder,
    HasTokens,
    PassLoss,
    PassSequence,
    PassSequences,
    Window,
    WindowLoss,
)
from pcg.runtime.training.work_units import (
    Forward,
    Pages,
    Part,
    Phase,
    Release,
    Stage,
    StepBeginsAgain,
    WindowedPass,
    Work,
    run_to_end,
)


class TrainingPass(WindowedPass):
    """The forward, loss and backward of a mini-batch or a part of it.

    Attributes:
        targets: number of target tokens on this rank.
        loss_sum: the sum of the losses of this rank's target tokens, fp64, on the device; set when
            the loss is complete.
        trains: True if gradients are computed.
        is_done: True once the gradients are complete.
    """

    def __init__(
        self,
        runner: BoundTraining,
        examples: Sequence[HasTokens],
        normaliser: float | None = None,
        dropout_seed: int | None = None,
        cache: KvCache | None = None,
        tables: Sequence[PageTable] = (),
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Create a pass over whole sequences.

        Args:
            normaliser: the number of target tokens by which the loss is divided; None to evaluate
                without gradients.
            dropout_seed: the seed of dropout; None for no dropout.
            cache: the KV cache; None to run all sequences as a single window.
            numbers: the index of each sequence in its mini-batch; by default the sequences are the
                whole mini-batch.
        Raises:
            MemoryBudgetError: training on the sequences needs more than the memory budget.
        """
        self._runner = runner
        self.trains = normaliser is not None
        self._weight = None if normaliser is None else 1.0 / normaliser
        self._dropout_seed = dropout_seed
        self._cache = cache
        self._virtual = runner.adapter.prompt_tokens
        sequences = [
            PassSequence(
                [*[ANY_TOKEN] * self._virtual, *example.ids],
                self.targets_of(example),
                tables[i] if cache is not None else None,
                i if numbers is None else numbers[i],
                self.routes_of(example),
            )
            for i, example in enumerate(examples)
        ]
        self._sequences = PassSequences(sequences, self._virtual, runner.cp, runner.device)
        self.tokens = self._sequences.tokens
        if self.trains:
            runner.plan_for(len(examples), self._sequences.most_tokens)
        self._restored = frozenset(runner.training.restored)
        self._graphs = None
        if cache is not None:
            self._graphs = runner.window_graphs(cache)
        if self._graphs is not None:
            pages = max(len(table.pages) for table in tables)
            self._graphs.begin_pass(PassSizes(self.tokens, len(examples), pages))
        self.targets = self._sequences.targets
        weights = [self.weight_of(example) for example in examples]
        # By the sequences' numbers; None to sum losses without weights.
        self._weights: Mapping[int, float] | None = None
        if any(weight != 1.0 for weight in weights):
            by_number = zip(sequences, weights, strict=True)
            self._weights = {sequence.number: weight for sequence, weight in by_number}
        self.forwarded = 0
        self.is_done = False
        self._windows: list[Window] = []
        self._boundary: Boundary | None = None
        self._begun = self._next = 0
        self._open: Window | None = None
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self._loss: PassLoss | None = None
        self._loss_left = self.targets
        self._count = len(runner.training.layers)
        self._link, self._own = runner.link, runner.stage
        self.layers = runner.layers_back if self.trains else 0
        self._order: BackwardOrder | None = None
        self._sums: dict[int, KvGradients] = {}  # by layer, during the layer's backward

    @property
    def loss(self) -> float:
        """`loss_sum` as a number; the host waits for the device."""
        return float(self.loss_sum)

    def targets_of(self, example: HasTokens) -> list[int]:
        """Return the target of each token of a sequence, virtual tokens first."""
        assert isinstance(example, Example)
        return self._runner.targets_of(example)

    def weight_of(self, example: HasTokens) -> float:
        """Return the factor of the losses of a sequence."""
        assert isinstance(example, Example)
        return example.weight

    def routes_of(self, example: HasTokens) -> Tensor | None:
        """Return the experts of each token of a sequence, virtual tokens first; None for none."""
        return None

    @property
    def stage(self) -> Stage | None:
        if self._begun:
            return Stage(Phase.FORWARD, self._count - self._next)
        if self.remaining:
            return None
        if self._order is None:
            return Stage(Phase.LOSS, 0)
        return Stage(Phase.BACKWARD, self._order.left)

    @property
    def row(self) -> int:
        return self._sequences.row

    def window_load(self, tokens: int) -> Load:
        end = min(self.forwarded + tokens, self.tokens)
        pieces = self._sequences.pieces(self.forwarded, end)
        return sum((Load.of(stop - start, start) for _, start, stop in pieces), Load())

    @property
    def load(self) -> Load:
        if self._begun:
            return self.window_load(self._begun)
        if self._order is None:
            return Load(max(self._loss_left, 1))
        # The largest load among the stages that run simultaneously.
        batches = [self._windows[place].batch for place in self._order.under_way]
        spans = max(batches, key=lambda batch: batch.tokens).spans
        chunks = (Load.of(span.length, span.context) for span in spans)
        return sum(chunks, Load(ends=int(self._order.ends_window)))

    def run_part(self, tokens: int) -> None:
        with torch.no_grad():
            if not self._begun and self._order is None:
                self._run_loss(tokens)
            else:
                run_single(self.part_requests())

    def part_requests(self) -> ProductRequest[None]:
        """Run the next layer, requesting the base's products from the caller."""
        return self._layer_forward() if self._begun else self.backward_requests()

    # --------------------------------------------------------------------------------- forward

    @torch.no_grad()
    def forward(self, tokens: int) -> None:
        run_single(self.forward_requests(tokens))

    def forward_requests(self, tokens: int) -> ProductRequest[None]:
        """Run tokens forward, requesting the base's products from the caller.

        Over pipeline stages, the tokens form several windows, and each stage runs another window.
        """
        windows = 1 if self._link is None or self._cache is None else self._link.parts_of(tokens)
        end = min(self.forwarded + tokens, self.tokens)
        for left in range(windows, 0, -1):
            window = self.begin(-(-(end - self.forwarded) // left))
            for layer in self._own.layers:
                yield from self.layer_requests(layer, window)
            self._send(window)
            self.end(window)

    def begin_window(self, tokens: int) -> None:
        self._begun, self._next = tokens, 0

    def _layer_forward(self) -> ProductRequest[None]:
        """Run the current window through its next layer, if this stage has the layer."""
        layer, layers = self._next, self._own.layers
        if layer == layers.start == 0:
            self._open = self.begin(self._begun)
        if layer in layers:
            assert self._open is not None
            yield from self.layer_requests(layer, self._open)
            if layer == layers[-1]:
                self._send(self._open)
        self._next += 1
        if self._next == layers.start:
            self._open = self.begin(self._begun)
        if self._next == self._count:
            assert self._open is not None
            self.end(self._open)
            self._open, self._begun = None, 0

    @property
    def remaining(self) -> int:
        return self.tokens - self.forwarded

    def fitting(self, tokens: int) -> int:
        if self._graphs is None or not tokens:
            return tokens
        return self._graphs.sizes.fitting(tokens, self.remaining)

    @property
    def context(self) -> int:
        return self._sequences.context(self.forwarded)

    @torch.no_grad()
    def begin(self, tokens: int) -> Window:
        """Create a window of the next tokens, and run its prologue."""
        if not self.forwarded:
            self._runner.begin_pass(self.trains)
        end = min(self.forwarded + tokens, self.tokens)
        spans, ids, targets = self._sequences.window(self.forwarded, end)
        device = self._runner.device
        input_ids = uploaded_list(ids, torch.int64, device)
        batch = Batch(input_ids, spans, self._cache, keeps=True)
        batch.ranks, batch.parts = self._runner.ranks, self._sequences.parts
        batch.dropout_seed = self._dropout_seed
        if (routes := self._sequences.routes(self.forwarded, end)) is not None:
            layers, _, _ = routed_layers(self._runner.training.model)
            batch.routes = Routes(layers, uploaded(routes, device))
        if self._cache is not None:
            boundary = self._boundary
            continues = end < self.tokens and self._sequences.context(end)
            self._boundary = Boundary() if continues else None
            batch.states = WindowStates(boundary, self._boundary, self.trains)
        window = Window(batch, torch.tensor(targets), end)
        if self._graphs is not None:
            before = len(self._windows) if self.trains else 0
            window.slot = self._graphs.slot(before, batch, self.trains)
        if window.slot is not None:
            window.shared = window.slot.shared
        else:
            window.carried, window.shared = self._runner.prologue(batch)
        if self._runner.noise and self._dropout_seed is not None and self._own.is_first:
            counts = [self._sequences.length_of(span.number) for span in spans]
            self._runner.add_noise(batch, window.carried[0], counts)
        return window

    @property
    def has_unrecorded(self) -> bool:
        return self._graphs is not None and self._graphs.has_unrecorded(self.trains)

    def record_next(self) -> None:
        if self._graphs is not None:
            self._graphs.record_next(self.trains)

    @property
    def is_replayed(self) -> bool:
        """True if recorded layers ran the latest window."""
        return bool(self._windows) and self._windows[-1].slot is not None

    def layer_requests(self, layer: int, window: Window) -> ProductRequest[None]:
        if window.slot is not None:
            window.slot.forward(layer)
            return
        window.carried, saved = yield from self._runner.layer(
            layer, window.batch, window.carried, window.shared
        )
        if self.trains:
            window.saved[layer] = list(saved)
            if layer in self._restored:
                self._put_inputs(layer, window, (None,) * len(window.carried))

    def end(self, window: Window) -> None:
        if window.slot is not None:
            window.carried = window.slot.outputs
            if not self.trains:  # the next window overwrites the slot's outputs
                window.carried = [x.clone() for x in window.carried]
                window.shared = [None if x is None else x.clone() for x in window.shared]
        self._windows.append(window)
        self.forwarded = window.end

    def _send(self, window: Window) -> None:
        if self._link is not None and not self._own.is_last:
            self._link.send(window.carried, window.shared)
            window.carried = ()

    # --------------------------------------------------------------------------------- loss

    def _run_loss(self, tokens: int) -> None:
        """Compute the loss of some tokens on the last stage, the last window first."""
        self._loss_left = 0
        if self._own.is_last:
            if self._loss is None:
                self._loss = PassLoss(self._runner, self.window_losses())
                if self.trains:
                    self._runner.hold_gradients()
            self._loss.run(tokens)
            self._loss_left = self._loss.left
        # Without a cache the loss is not cut into parts, and other stages run other passes.
        if self._link is not None and self._cache is not None:
            self._loss_left = self._link.told(self._loss_left)
        if self._loss_left:
            return
        if self._loss is None:
            self._begin_backward()
        else:
            self.end_loss(self._loss)
            self._loss_left = 0 if self._loss is None else self._loss.left

    def window_losses(self) -> list[WindowLoss]:
        """Return the windows for the loss, the last window first."""
        losses = [
            WindowLoss(window.batch, window.targets, window.carried, window.shared, self._weight)
            for window in reversed(self._windows)
        ]
        for loss in losses if self._weights is not None else ():
            weights = self._weights_of(loss.batch)
            loss.losses = torch.zeros_like(weights)
            loss.slopes = None if self._weight is None else weights * self._weight
        return losses

    def _weights_of(self, batch: Batch) -> Tensor:
        """Return the weight of each token of a batch, [T], fp64."""
        assert self._weights is not None
        by_token = [self._weights[span.number] for span in batch.spans for _ in range(span.length)]
        return uploaded_list(by_token, torch.float64, self._runner.device)

    def end_loss(self, computed: PassLoss) -> None:
        """Store the losses and gradients of all windows, and start the backward."""
        self.loss_sum = computed.total
        if self._weights is not None:
            sums = [
                (loss.losses * self._weights_of(loss.batch)).sum()
                for loss in computed.windows
                if loss.losses is not None
            ]
            self.loss_sum = torch.stack(sums).sum()
        losses = [loss for loss in computed.windows if loss.first is None]
        for window, loss in zip(reversed(self._windows), losses, strict=True):
            window.gradients, window.carried = loss.gradients, ()
        self._loss = None
        self._begin_backward()

    def _begin_backward(self) -> None:
        """Start the backward, after the last stage has computed the loss."""
        if not self.trains:
            self._windows.clear()
            self.is_done = True
            return
        for window in () if self._restored else self._windows:
            window.shared = ()
        stages, first = self._runner.stages, self._runner.training.first_back
        self._order = BackwardOrder(stages, self._own, first, len(self._windows))
        if self._order.is_over:
            self._end_backward()

    # --------------------------------------------------------------------------------- backward

    def backward_requests(self) -> ProductRequest[None]:
        """Run this stage's next turn of the backward, requesting the base's products."""
        order = self._order
        assert order is not None
        turn, arriving = order.turn, order.arriving
        if turn is not None:
            window = self._windows[turn.window]
            yield from self._layer_back(turn.layer, window)
            if order.is_sent:
                assert self._link is not None
                self._link.send_back(window.gradients)
                window.gradients = []
            if not turn.window:
                self._sums.pop(turn.layer, None)
        if arriving is not None:
            assert self._link is not None
            window = self._windows[arriving]
            window.gradients = self._link.receive_back(window.batch.tokens)
        order.number += 1
        if order.is_over:
            self._end_backward()

    def _layer_back(self, layer: int, window: Window) -> ProductRequest[None]:
        if self._cache is not None and layer not in self._sums:
            runner, graphs = self._runner, self._graphs
            keys, values = (without_rows(each, runner.device) for each in runner.kv_types[layer])
            self._sums[layer] = (
                KvGradients(keys, values, self.tokens) if graphs is None else graphs.no_sums(layer)
            )
        window.batch.gradients = self._sums.get(layer)
        if layer in self._restored and window.saved[layer][self._input_places(layer)[0]] is None:
            self._restore(layer, window)
        gradients, window.gradients = window.gradients, []
        if window.slot is not None:
            window.gradients = window.slot.back(layer, gradients)
            return
        window.gradients = yield from self._runner.layer_backward(
            layer, window.batch, window.saved.pop(layer), gradients
        )

    def _end_backward(self) -> None:
        if self._own.is_first:
            for window in self._windows:
                self._runner.prologue_backward(window.batch, window.gradients)
        self._windows.clear()
        self._runner.encode_prompts_backward()
        self.is_done = True

    def _restore(self, layer: int, window: Window) -> None:
        """Recompute a layer's input from the input of the nearest earlier layer that saved it."""
        first = layer
        while first in self._restored:
            first -= 1
        carried: Sequence[Tensor] = [
            window.saved[first][index] for index in self._input_places(first)
        ]
        for i in range(first, layer):
            carried, _ = run_single(self._runner.layer(i, window.batch, carried, window.shared))
            self._put_inputs(i + 1, window, carried)

    def _put_inputs(self, layer: int, window: Window, carried: Sequence[Tensor | None]) -> None:
        """Insert a layer's inputs among the layer's saved tensors."""
        for index, value in zip(self._input_places(layer), carried, strict=True):
            window.saved[layer][index] = value

    def _input_places(self, layer: int) -> list[int]:
        training = self._runner.training
        graph = training.model.blocks[training.model.layers[layer]]
        saved = training.plans[training.layers[layer]].saved
        return [saved.index(value.name) for value in graph.inputs[: len(graph.outputs)]]


def check_stages(state: ModelState, training: Training, adapter: Adapter) -> None:
    """Refuse an adapter that the state's pipeline stages cannot train.

    Raises:
        UnsupportedError: names the part that the stages cannot train.
    """
    if state.stages.count == 1:
        return
    over = f"over {state.mesh.sizes}"
    if adapter.recipe.encoder is not None:
        raise UnsupportedError(
            f"{adapter.recipe.method} {over}: its encoder trains what all stages read; leave the "
            "encoder out, or use pp=1"
        )
    if training.restored or state.program.options.budget.size_bytes is not None:
        raise UnsupportedError(
            f"memory_budget={state.program.options.budget.written!r} {over}: it is planned for all "
            "layers of one rank; use a share such as 0.5, or pp=1"
        )
    readers: dict[str, set[int]] = {}
    for stage in (state.stages[i] for i in range(state.stages.count)):
        for parameter, layer in stage.own(training.model).parameters():
            path = parameter.source.format(layer=layer)
            if parameter.role == "adapter" and path not in adapter.shared:
                readers.setdefault(path, set()).add(stage.index)
    for path, stages in readers.items():
        if len(stages) > 1 and adapter.parameter(path) is not None:
            raise UnsupportedError(
                f"{path} {over}: layers of several stages share it, and each would train its own; "
                "leave it out of the recipe, or use pp=1"
            )


Pass = TypeVar("Pass", bound=TrainingPass)


class TrainingRunner(BoundTraining):
    """Computes losses and gradients of an adapter; over ranks, each rank trains its shards."""

    def forward_backward(
        self, examples: Sequence[Example], normaliser: float, dropout_seed: int | None = None
    ) -> float:
        """Add the gradients of sum(loss) / normaliser to each `grad`; return sum(loss).

        Args:
            examples: whole sequences with unshifted labels; the adapter's virtual tokens are
                prepended.
            normaliser: the number of target tokens by which the loss is divided.
            dropout_seed: the seed of dropout; None for no dropout.
        """
        with on_device(self.device):
            loss = run_to_end(pass_through(self, examples, normaliser, dropout_seed)).loss_sum
            return float(self.mesh.pp.broadcast(loss.to(self.device)))

    def evaluate(self, examples: Sequence[Example]) -> tuple[float, int]:
        """Return the sum of the target tokens' losses over all ranks, and their number."""
        with on_device(self.device):
            passed = run_to_end(pass_through(self, examples))
        sums = torch.tensor([passed.loss, passed.targets], dtype=torch.float64, device=self.device)
        loss, targets = self.mesh.pp.broadcast(self.cp.all_reduce(sums)).tolist()
        return loss, int(targets)

    def count_targets(self, examples: Sequence[Example]) -> int:
        """Count target tokens; after a prompt the first token is a target, too, as in peft."""
        firsts = sum(example.labels[0] != IGNORED for example in examples)
        of_prompt = firsts if self.adapter.recipe.learns_first_token else 0
        return sum(example.targets for example in examples) + of_prompt

    @property
    def trained_everywhere(self) -> Mapping[str, Tensor]:
        """The trained tensors of all pipeline stages by name, whole."""
        return {
            f"{path}.{kind}": parameter.weight
            for path, weights in self.adapter.weights.items()
            for kind, parameter in weights.parameters.items()
        }

    def sum_gradients(self) -> None:
        """Sum the gradients of replicated shards over the ranks, at the end of a step."""
        if self._encoder is None:
            self.shards.sum_gradients()

    def gradient_norm(self) -> Tensor:
        if self._encoder is None:
            return self.shards.norm()
        gradients = [tensor.grad for tensor in self.parameters.values() if tensor.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def publish(self) -> None:
        """Encode the virtual tokens again, after an update of the encoder."""
        if self._encoder is not None:
            self._encoder.publish()
            self.shards.scatter()

    def scatter(self) -> None:
        """Copy the whole adapter's tensors into this rank's shards."""
        self.shards.scatter()

    def settle(self) -> None:
        """Gather the shards of all ranks into the adapter."""
        if self._encoder is None:
            self.shards.gather()


def training_runner(
    state: ModelState,
    adapter: Adapter,
    windows: bool = False,
    slack: float = SLACK,
    form: LossForm = PLAIN_LOSS,
) -> TrainingRunner:
    """Return a runner that trains an adapter, which need not be served.

    With `windows`, sequences run through the KV cache window by window, instead of whole. On the
    CPU, freed memory returns to the system, so that memory use is as planned: with a memory budget
    of 1 when freed memory exceeds `slack`; with a smaller budget immediately, for the whole
    process. A step that would save more than a memory budget in bytes is planned again.

    Args:
        slack: limit of freed memory that is not returned; see `FreedMemory`.
        form: the form of the loss.
    Raises:
        UnsupportedError: the adapter was saved without its encoder, or pipeline stages or ranks
            that share tokens cannot train the adapter.
    """
    budget = state.program.options.budget
    freed = None
    if state.device.type == "cpu" and budget.share == 1.0:
        freed = FreedMemory(slack)
    elif state.device.type == "cpu":
        return_freed_memory()
    if windows:
        state.mesh.check_no_parts("a job of an engine")
    training = state.training(adapter, windows, form=form)
    check_stages(state, training, adapter)
    weights = state.weight_store.bind(state.stage.own(training.model))
    is_promise = budget.size_bytes is not None
    training_for = None
    if is_promise:
        training_for = partial(state.training, adapter, windows, form=form)
    link = StageLink.of(training.model, state.stages, state.mesh, state.device)
    parts = (training, weights, adapter, state.mesh, link, training_for, freed, windows)
    return TrainingRunner(*parts)


def pass_through(
    runner: BoundTraining,
    examples: Sequence[Example],
    normaliser: float | None = None,
    dropout_seed: int | None = None,
    numbers: Sequence[int] | None = None,
) -> Work[TrainingPass]:
    """Yield the units of a `TrainingPass` over whole sequences; return the completed pass."""

    def begin(pages: Pages) -> TrainingPass:
        place = (pages.cache, pages.tables, numbers)
        return TrainingPass(runner, examples, normaliser, dropout_seed, *place)

    return run_pass(runner, [len(example.ids) for example in examples], begin)


def evaluation_pass(runner: BoundTraining, examples: Sequence[Example]) -> Work[TrainingPass]:
    """Yield the units of a restartable pass without gradients; return the completed pass."""
    while True:
        try:
            return (yield from pass_through(runner, examples))
        except StepBeginsAgain:
            yield Release()


def run_pass(
    runner: BoundTraining, lengths: Sequence[int], begin: Callable[[Pages], Pass]
) -> Work[Pass]:
    """Yield the units of a pass; return the completed pass."""
    pages = Pages([runner.adapter.prompt_tokens + length for length in lengths])
    yield pages
    passed = begin(pages)
    while not passed.is_done:
        is_part = passed.stage is not None
        yield Part(passed) if is_part else Forward(passed)
    yield Release()
    return passed
