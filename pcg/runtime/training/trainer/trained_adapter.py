"""The adapter of a trainer, with its optimizer and accumulated gradients.

The gradients of a call are computed separately, and added to the accumulated gradients at the end
of the call, so that a failed or cancelled call leaves the accumulated gradients unchanged.

A scored pass is a training pass with a loss that is a function of the tokens' log-probabilities.
With the log-probabilities l [T] of the targets and a loss C(l),

    dC/dx = Σ_t (dC/dl_t) dl_t/dx,    and the program's loss of a token is -l_t,

so that the backward of the program's loss runs with the weight -dC/dl_t of each token. If C is
linear, the weights are known in advance. Otherwise they are known after all l. The gradient of a
token's hidden state depends on no other token, so it is computed with the weight 1 and then
multiplied by the weight. Only if weights after the layers are trained, with gradients that are sums
over tokens, the loss is computed twice: forward, then forward and backward. In each case the loss
is computed in chunks of tokens, and no logits are kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.errors import FinetuneError, UnsupportedError
from pcg.ir.program.program import routed_layers
from pcg.options import LossForm
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.data.example import IGNORED, ModelSizes
from pcg.runtime.memory.host_memory import TRAINER_SLACK
from pcg.runtime.model.base_weights import base_digest
from pcg.runtime.model.batch import mixed_seed
from pcg.runtime.model.state import ModelState, ServingProgram
from pcg.runtime.training.bound_training import BoundTraining
from pcg.runtime.training.checkpoints import Checkpoint, TrainerState
from pcg.runtime.training.losses import Loss, Options
from pcg.runtime.training.publishers import (
    check_same,
    owned,
    saved_adapter,
    sites_of,
    start_adapter,
    with_template,
)
from pcg.runtime.training.runner import TrainingPass, run_pass, training_runner
from pcg.runtime.training.step import TrainingStep
from pcg.runtime.training.trainer.datum import (
    CheckedDatum,
    Scored,
    ScoredBatch,
    Snapshot,
    Stepped,
    TrainerArguments,
    columns_of,
    cut,
)
from pcg.runtime.training.training_data import sizes_of
from pcg.runtime.training.windows import HasTokens, PassLoss, WindowLoss
from pcg.runtime.training.work_units import (
    Pages,
    Reading,
    Release,
    StepBeginsAgain,
    Work,
    deferred_interrupts,
)


class ScoredPass(TrainingPass):
    """A training pass over some data.

    Attributes:
        logprobs: the log-probability of each token's target, [T] without virtual tokens, on the
            device, or [T, K] for K targets each; 0 without a target. Set with the loss.
    """

    def __init__(
        self,
        runner: BoundTraining,
        batch: ScoredBatch,
        pages: Pages,
        *,
        trains: bool,
        dropout_seed: int | None,
    ) -> None:
        """Create a pass; `trains` is True to compute gradients, too."""
        normaliser = 1.0 if trains else None
        super().__init__(runner, batch.data, normaliser, dropout_seed, pages.cache, pages.tables)
        self._batch = batch
        self._lengths = [len(datum.ids) for datum in batch.data]
        self._further = self._further_targets(batch)
        self.targets += sum(int((targets >= 0).sum()) for targets in self._further)
        self.logprobs = torch.zeros(0)
        self._slopes: Tensor | None = None
        is_linear = batch.loss.is_linear
        self._scales = trains and not is_linear and not runner.trained_in_loss()
        if trains and is_linear:
            self._slopes = self._with_virtual(batch.columns.weights).view(self.tokens, -1)

    def targets_of(self, example: HasTokens) -> list[int]:
        assert isinstance(example, CheckedDatum)
        return [*[IGNORED] * self._runner.adapter.prompt_tokens, *example.targets]

    def weight_of(self, example: HasTokens) -> float:
        return 1.0

    def routes_of(self, example: HasTokens) -> Tensor | None:
        assert isinstance(example, CheckedDatum)
        if example.routes is None:
            return None
        virtual = self._runner.adapter.prompt_tokens
        behind = len(example.ids) - len(example.routes)
        return F.pad(example.routes, (0, 0, 0, 0, virtual, behind), value=-1)

    def _further_targets(self, batch: ScoredBatch) -> list[Tensor]:
        """Return the second, third, … target of each token: [T] each, with virtual tokens."""
        virtual = [IGNORED] * self._runner.adapter.prompt_tokens
        columns = []
        for k in range(1, batch.columns.width):
            rows = (datum.further_targets(k) for datum in batch.data)
            columns.append(torch.tensor([t for row in rows for t in (*virtual, *row)]))
        return columns

    def window_losses(self) -> list[WindowLoss]:
        first = self._losses_of(0, None)
        further = (self._losses_of(k, first) for k in range(1, len(self._further) + 1))
        return [*first, *chain.from_iterable(further)]

    def _losses_of(self, k: int, first: list[WindowLoss] | None) -> list[WindowLoss]:
        """Return the windows with the k-th target of each token, the last window first.

        Args:
            first: for k > 0, the windows with the first targets.
        """
        losses, begin = [], 0
        for index, window in enumerate(self._windows):
            targets = self._further[k - 1][begin : window.end] if k else window.targets
            weight = 1.0 if self._scales else None
            loss = WindowLoss(window.batch, targets, window.carried, window.shared, weight)
            loss.losses = torch.zeros(
                window.end - begin,
                dtype=torch.promote_types(window.carried[0].dtype, torch.float32),
                device=self._runner.device,
            )
            if self._slopes is not None:
                loss.weight, loss.slopes = 1.0, self._slopes[begin : window.end, k]
            loss.first = None if first is None else first[-1 - index]
            losses.append(loss)
            begin = window.end
        return losses[::-1]

    def end_loss(self, computed: PassLoss) -> None:
        count = len(self._windows)
        kept = [loss.losses for loss in computed.windows if loss.losses is not None]
        losses = [
            torch.cat(kept[begin : begin + count][::-1]) for begin in range(0, len(kept), count)
        ]
        # Subtract from 0, so that no log-probability is -0.0.
        negated = 0.0 - (torch.stack(losses, 1) if len(losses) > 1 else losses[0])
        logprobs = self._without_virtual(negated)
        batch = self._batch
        total, by_logprobs = batch.loss.evaluate(logprobs, batch.columns, batch.options)
        if self._scales:
            self._scale(computed.windows, self._with_virtual(-by_logprobs))
        elif self.trains and self._slopes is None:
            self._slopes = self._with_virtual(-by_logprobs).view(self.tokens, -1)
            self.logprobs = logprobs
            self._loss = PassLoss(self._runner, self.window_losses())
            return
        if batch.loss.is_linear or self._scales or not self.trains:
            self.logprobs = logprobs
        super().end_loss(computed)
        self.loss_sum = total

    def _scale(self, windows: Sequence[WindowLoss], slopes: Tensor) -> None:
        """Multiply the gradients of hidden states, computed with the weight 1, by the weights."""
        end = self.tokens
        for window in windows:  # the last window first
            begin = end - len(window.targets)
            weights = slopes[begin:end, None]
            for gradient in window.gradients:
                gradient.mul_(weights.to(torch.promote_types(gradient.dtype, torch.float32)))
            end = begin

    def of_data(self, numbers: Tensor) -> list[Tensor]:
        """Split flat log-probabilities in host memory by datum, in the shapes of the targets."""
        rows = numbers.view(self.logprobs.shape).split(self._lengths)
        pairs = zip(self._batch.data, rows, strict=True)
        return [datum.shaped(row).clone() for datum, row in pairs]

    def _with_virtual(self, x: Tensor) -> Tensor:
        """Insert zeros for the adapter's virtual tokens before each sequence."""
        virtual = self._virtual
        if not virtual:
            return x
        zeros = x.new_zeros(virtual, *x.shape[1:])
        return torch.cat([part for row in x.split(self._lengths) for part in (zeros, row)])

    def _without_virtual(self, x: Tensor) -> Tensor:
        virtual = self._virtual
        if not virtual:
            return x
        parts = x.split([virtual + length for length in self._lengths])
        return torch.cat([part[virtual:] for part in parts])


_RATE = 1e-3
"""A placeholder learning rate: each step sets its own."""


class TrainedAdapter:
    """An adapter that is trained by commands."""

    def __init__(
        self,
        state: ModelState,
        arguments: TrainerArguments,
        windows: bool,
        note_step: Callable[[Stepped], None] = lambda stepped: None,
        note_version: Callable[[AdapterVersion], None] = lambda version: None,
    ) -> None:
        """Create the adapter, its training program, and the optimizer.

        Args:
            windows: True to run sequences through the KV cache by windows, as in an engine.
        """
        self._state = state
        self._arguments = arguments
        self._windows = windows
        self._note_step = note_step
        self._note_version = note_version
        self._kind = arguments.make_optimizer()
        self._start(None)

    def _start(self, saved: Adapter | None) -> None:
        """Start from the existing, a new, or a saved adapter."""
        state, arguments = self._state, self._arguments
        name, total = arguments.name, arguments.total_steps
        if saved is None:
            adapter = start_adapter(state, name, arguments.peft, arguments.seed, None, total or 1)
        else:
            adapter = saved_adapter(state, saved)
        adapter = with_template(adapter, arguments.chat_template)
        if adapter.recipe.trains_beside and total is None:
            raise FinetuneError(
                f"{adapter.recipe.method} schedules its ranks over all updates; give total_steps="
            )
        form = LossForm(temperature=float(arguments.temperature))
        self._runner = training_runner(state, adapter, self._windows, TRAINER_SLACK, form)
        self._adapter = self._runner.adapter
        self._step = TrainingStep(self._runner, self._kind, _RATE, total or 1)
        self._pending: dict[str, Tensor] = {}
        self._history = TrainerState()
        self._tokens = self._passes = self._targets = 0
        self._loss = 0.0

    @property
    def name(self) -> str:
        return self._arguments.name

    @property
    def steps(self) -> int:
        return self._history.step

    @property
    def sizes(self) -> ModelSizes:
        layers, chosen, experts = routed_layers(self._runner.training.model)
        return sizes_of(self._state, (len(layers), chosen, experts))

    @property
    def virtual_tokens(self) -> int:
        return self._adapter.prompt_tokens

    # ----------------------------------------------------------------------------------- losses

    def batches(
        self, data: Sequence[CheckedDatum], loss: Loss, options: Options
    ) -> list[ScoredBatch]:
        """Cut data into batches, in order."""
        bounds = self._arguments.batch_size, self._arguments.max_tokens
        lots = cut(data, loss.together, *bounds)
        device = self._runner.device
        return [ScoredBatch(lot, loss, options, columns_of(lot, device)) for lot in lots]

    def forward(self, batches: Sequence[ScoredBatch]) -> Work[Scored]:
        """Compute the loss of batches, without gradients and without dropout."""
        while True:
            try:
                passes = yield from self._through(batches, trains=False)
                return (yield from self._scored(batches, passes))
            except StepBeginsAgain:
                yield Release()

    def forward_backward(self, batches: Sequence[ScoredBatch]) -> Work[Scored]:
        """Add the gradients of batches to the accumulated gradients.

        Raises:
            FinetuneError: a loss or a gradient is not finite; accumulated gradients are unchanged.
            UnsupportedError: a weight of the recipe gets no gradient.
        """
        try:
            while True:
                try:
                    passes = yield from self._through(batches, trains=True)
                    break
                except StepBeginsAgain:
                    self._step.drop_gradients()
                    yield Release()
            scored = yield from self._scored(batches, passes, self._norm())
            with deferred_interrupts():
                self._keep_gradients()
                self._passes += len(batches)
                self._tokens += scored.tokens
                self._targets += scored.targets
                self._loss += scored.loss
            return scored
        finally:
            self._step.drop_gradients()

    def _through(self, batches: Sequence[ScoredBatch], *, trains: bool) -> Work[list[ScoredPass]]:
        drops, passes = trains and self._arguments.dropout, []
        for index, batch in enumerate(batches):
            seed = mixed_seed(self._arguments.seed, self.steps, self._passes + index)
            begin = partial(
                ScoredPass, self._runner, batch, trains=trains, dropout_seed=seed if drops else None
            )
            lengths = [len(datum.ids) for datum in batch.data]
            passes.append((yield from run_pass(self._runner, lengths, begin)))
        return passes

    def _scored(
        self,
        batches: Sequence[ScoredBatch],
        passes: Sequence[ScoredPass],
        norm: Tensor | None = None,
    ) -> Work[Scored]:
        """Return the results, after their copy to the host.

        Args:
            norm: the norm of the gradients, which must be finite, too.
        Raises:
            FinetuneError: a number is not finite.
        """
        data = [datum for batch in batches for datum in batch.data]
        flat = torch.cat([each.logprobs.flatten() for each in passes])
        sums = [each.loss_sum.to(flat.device).double() for each in passes]
        norms = [] if norm is None else [norm.to(flat.device).double()]
        reading = Reading(torch.cat([flat.double(), torch.stack([*sums, *norms])]))
        yield reading
        numbers = torch.tensor(reading.read(), dtype=torch.float64)
        counts = [each.logprobs.numel() for each in passes]
        parts = zip(passes, numbers[: len(flat)].to(flat.dtype).split(counts), strict=True)
        logprobs = [values for each, part in parts for values in each.of_data(part)]
        for index, values in enumerate(logprobs):
            if not values.isfinite().all():
                raise FinetuneError(
                    f"trainer {self.name!r}: log-probabilities of data[{index}] are not finite; "
                    f"check it, or load an earlier state: the adapter had {self.steps} updates"
                )
        loss = float(numbers[len(flat) :][: len(sums)].sum())
        if not math.isfinite(loss):
            raise FinetuneError(
                f"trainer {self.name!r}: the loss {batches[0].loss.name!r} is {loss:g}; look at "
                "the logprobs and advantages of the data"
            )
        if norm is not None and not numbers[-1].isfinite():
            raise FinetuneError(
                f"trainer {self.name!r}: the norm of this call's gradients is "
                f"{float(numbers[-1]):g}, and they are dropped; look at its weights, advantages "
                "and logprobs"
            )
        tokens = sum(len(datum.ids) for datum in data)
        return Scored(loss, tuple(logprobs), tokens, sum(datum.predicted for datum in data))

    # ----------------------------------------------------------------------------------- gradients

    def _norm(self) -> Tensor:
        """Return the norm of a call's gradients. UnsupportedError: a weight gets no gradient."""
        gradients = []
        for path, tensor in self._step.parameters.items():
            if tensor.grad is None:
                raise UnsupportedError(
                    f"{path} gets no gradient, so it cannot be trained; leave it out of the recipe"
                )
            gradients.append(tensor.grad)
        return torch.nn.utils.get_total_norm(gradients)

    def _keep_gradients(self) -> None:
        # On a GPU, gradients may lie in fixed memory of recorded windows: copy them.
        is_fixed = self._runner.device.type == "cuda"
        for path, tensor in self._step.parameters.items():
            assert tensor.grad is not None
            if path in self._pending:
                self._pending[path].add_(tensor.grad)
            else:
                self._pending[path] = tensor.grad.clone() if is_fixed else tensor.grad

    def optim_step(
        self, rate: float, fields: dict[str, Any], grad_clip_norm: float | None
    ) -> Work[Stepped]:
        """Update the adapter by the accumulated gradients, and drop the gradients.

        Args:
            fields: overrides of betas, eps and weight_decay for this update.
        Raises:
            FinetuneError: no gradients, or a norm that is not finite; gradients are kept.
        """
        if not self._pending:
            raise FinetuneError(
                f"trainer {self.name!r} has no gradients to update by; call forward_backward first"
            )
        self._set(fields)
        try:
            norm = self._whole_gradients()
            reading = Reading(norm[None].double())
            yield reading
            (norm_read,) = reading.read()
            if not math.isfinite(norm_read):
                raise FinetuneError(
                    f"trainer {self.name!r}: the norm of the gradients is {norm_read:g}; load an "
                    "earlier state"
                )
            with deferred_interrupts():
                self._step.scale(norm, grad_clip_norm)
                return self._update(rate, norm_read)
        finally:
            self._step.drop_gradients()

    def _set(self, fields: dict[str, Any]) -> None:
        kind = self._kind
        for name, value in fields.items():
            if name not in kind.fields:
                raise FinetuneError(
                    f"{name}={value!r}, which optimizer {kind.name!r} does not take; leave it out"
                )
        for group in self._step.optimizer.param_groups:
            for name in kind.fields:
                if name != "weight_decay" or not group["is_bias"]:
                    group[name] = fields.get(name, kind.options[name])

    def _whole_gradients(self) -> Tensor:
        """Set the accumulated gradients as `grad` of the parameters; return their norm."""
        for path, tensor in self._step.parameters.items():
            tensor.grad = self._pending[path]
        if self._step.beside is not None:  # which changes the gradients in place
            for tensor in self._step.parameters.values():
                assert tensor.grad is not None
                tensor.grad = tensor.grad.clone()
        return self._step.clip()

    def _update(self, rate: float, norm: float) -> Stepped:
        history = self._history
        self._step.update(history.step, rate)
        self._pending = {}
        history.step += 1
        history.losses.append(self._loss)
        history.tokens += self._tokens
        history.targets += self._targets
        stepped = Stepped(history.step, norm, self._tokens, self._loss)
        self._tokens = self._passes = self._targets = 0
        self._loss = 0.0
        self._note_step(stepped)
        return stepped

    # ----------------------------------------------------------------------------------- versions

    def copied(self) -> Work[Adapter]:
        """Return a copy of the current adapter, in host memory."""
        yield from ()
        self._runner.settle()
        adapter = self._adapter
        if self._step.beside is not None:
            adapter = self._step.beside.finished(adapter)
        copy = self._state.on_host(owned(adapter))
        self._state.check_copies(copy)
        return copy

    def program_for(self, adapter: Adapter) -> ServingProgram:
        """Return a program that serves an adapter, compiling a missing program."""
        return self._state.program_for(adapter)

    def publish(self, adapter: Adapter, program: ServingProgram) -> Work[Snapshot]:
        """Serve an adapter as the next version of its name."""
        yield from ()
        served = self._state.put_adapter(adapter, program)
        version = self._state.versions.of(served)
        assert version is not None
        self._note_version(version)
        return Snapshot(version, served)

    # ----------------------------------------------------------------------------------- states

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal in a state to load, as JSON."""
        temperature = self._arguments.temperature
        return {
            **({} if temperature == 1 else {"temperature": temperature}),
            "optimizer": self._kind.name,
            "base_dtype": self._state.program.dtype,
            "base_weights_checksum": base_digest(self._state.weight_store),
        }

    def checkpoint(self, facts: dict[str, Any]) -> Work[Checkpoint]:
        """Return copies of the adapter, the optimizer's state and the history.

        Accumulated gradients are kept, but not part of the checkpoint.
        """
        yield from ()
        self._runner.settle()
        history = dataclasses.replace(self._history, losses=list(self._history.losses))
        copies = [
            {name: value.detach().cpu().clone() for name, value in tensors.items()}
            for tensors in (self._step.state(), self._step.tensors_beside())
        ]
        adapter = self._state.on_host(owned(self._adapter))
        return Checkpoint(history, facts, adapter, None, copies[0], copies[1])

    def load(self, checkpoint: Checkpoint, *, optimizer: bool) -> None:
        """Load a checkpoint and drop accumulated gradients.

        Args:
            optimizer: True to load the optimizer's state and the number of updates, too.
        Raises:
            FinetuneError: another recipe, or another optimizer's state; nothing changes.
        """
        before = dict(vars(self))
        checkpoint = checkpoint.of_base(self._state.program.base.module_shapes())
        saved = sites_of(checkpoint.adapter)
        check_same(self.name, "the state", saved, "the trainer", sites_of(self._adapter))
        try:
            self._start(checkpoint.adapter)
            if not optimizer:
                return
            self._history = checkpoint.state
            self._step.load(self.steps, checkpoint.optimizer, checkpoint.beside)
        except BaseException:
            vars(self).update(before)
            raise
