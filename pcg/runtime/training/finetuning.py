"""Supervised finetuning: the objective of runs over examples (`run.py`).

A job's work is a generator of units. `Executor.finetune` runs the units in turn, and an engine runs
them between its requests.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch

from pcg.errors import FinetuneError, UnsupportedError
from pcg.files import damage_of
from pcg.options import LossForm
from pcg.peft.adapter import Adapter, check_name
from pcg.peft.registry import recipe_fields
from pcg.ranks.agreement import agreed
from pcg.ranks.group import broadcast_from_first, run_on_first
from pcg.runtime.data.dataset import Dataset
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.data.order import Batch, Batches
from pcg.runtime.data.streaming import StreamedRows
from pcg.runtime.model.base_weights import base_digest
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.callbacks import Listeners
from pcg.runtime.training.checkpoints import (
    Checkpoint,
    CheckpointStore,
    TrainerState,
    write_checkpoint,
)
from pcg.runtime.training.options import (
    FinetuneArguments,
    FinetuneOptions,
    FinetuneResult,
    JobArguments,
    LossChange,
    Numbers,
    OnStep,
)
from pcg.runtime.training.publishers import (
    InPlacePublisher,
    Publisher,
    overwrite,
    owned,
    start_adapter,
    start_facts,
    with_template,
)
from pcg.runtime.training.run import Find, Objective, Run, StepNumbers
from pcg.runtime.training.runner import evaluation_pass
from pcg.runtime.training.step import TrainingStep
from pcg.runtime.training.training_data import (
    batches_of,
    check_with_prompt,
    job_data,
    places_of,
    settled,
    total_steps,
)
from pcg.runtime.training.work_units import (
    Interrupt,
    Reading,
    Release,
    StepBeginsAgain,
    Work,
    deferred_interrupts,
    noted_interrupts,
    run_to_end,
)
from pcg.units import shown

_LOG = logging.getLogger("pcg.finetuning")
_LEFT_OUT = (
    "callbacks", "data", "eval_data", "formatting_func", "log_every", "on_step", "peft", "progress",
    "record", "report_to", "resume",
)  # fmt: skip
"""Arguments that a record's configuration omits, or contains in resolved form."""


Generate = Callable[..., Any]
"""`Executor.generate`."""


def finetune(
    state: ModelState, arguments: FinetuneArguments, generate: Generate | None = None
) -> FinetuneResult:
    """Train an adapter; see `Executor.finetune`."""
    name = arguments.adapter
    check_name(name)
    is_new = name not in state.adapters
    interrupts: list[Interrupt] = []
    publisher = InPlacePublisher(state, name)
    run = finetune_run(publisher, arguments, arguments.on_step, interrupts, generate)
    try:
        if state.world.size == 1:
            return run_to_end(run.work())
        with noted_interrupts(interrupts):
            return run_to_end(run.work())
    except UnsupportedError:  # at the first step
        if is_new:
            state.remove_adapter(name)
        raise


def finetune_run(
    publisher: Publisher,
    arguments: FinetuneArguments,
    on_step: OnStep | None = None,
    interrupts: Sequence[Interrupt] = (),
    generate: Generate | None = None,
) -> Run[FinetuneResult]:
    """Read the data of a job, find the checkpoint to resume from, and create the adapter.

    Args:
        interrupts: the interrupts of this rank; an interrupt of any rank ends the job.
        generate: continues prompts by the trained adapter; None if that is not possible.
    """
    objective = Supervised(publisher, arguments, interrupts, generate)
    options, total = objective.options, objective.total
    schedule = options.make_schedule(total)
    return Run(
        objective,
        options,
        total=total,
        rate=lambda step: options.learning_rate * schedule(step),
        trajectory=objective.trajectory,
        config=objective.config,
        listeners=Listeners(on_step, arguments.callbacks),
    )


def data_trajectory(
    options: FinetuneOptions, total: int, batches: Batches, model: ModelState
) -> dict[str, Any]:
    """Return all values that the weights of a run over batches depend on, as JSON."""
    position = batches.state_dict()
    return {
        **options.trajectory(total),
        **{key: position[key] for key in ("batch_size", "max_tokens", "seed", "shuffle")},
        "examples": position["examples"],
        "data_checksum": position["fingerprint"],
        "base_dtype": model.program.dtype,
        "base_weights_checksum": base_digest(model.weight_store),
    }


class Supervised(Objective[FinetuneResult]):
    """Finetuning on examples by cross entropy.

    Attributes:
        options: the options, with the batch that the program was compiled for.
    """

    kind = "finetune"

    def __init__(
        self,
        publisher: Publisher,
        arguments: FinetuneArguments,
        interrupts: Sequence[Interrupt],
        generate: Generate | None = None,
    ) -> None:
        """Read the data."""
        self._publisher, self._interrupts, self._generate = publisher, interrupts, generate
        self._rows: list[Mapping[str, object]] = []
        if arguments.eval_samples and (generate is None or publisher.state.world.size > 1):
            raise FinetuneError(
                f"eval_samples={arguments.eval_samples}; prompts are continued by finetuning on "
                "one rank, outside an engine, leave it out"
            )
        self._model = model = publisher.state
        self.name, self.ranks, self.device = arguments.adapter, model.world, model.device
        self.doing = f"finetuning {self.name!r}"
        self.waits_for_page = not isinstance(arguments, JobArguments)
        self.options = options = settled(arguments, model)
        self._data, self._eval = job_data(options, model)
        self.evaluates = self._eval is not None
        if self.ranks.rank == 0 and (counts := self._data.counts()):
            _LOG.info("%s: %s", self.name, counts)
        self._batches = batches_of(self._data, options)
        self.total = total_steps(self._batches, options)
        self.trajectory = data_trajectory(options, self.total, self._batches, model)
        if self._eval is not None:
            metrics = ["loss", *(f"{name}_loss" for name in self._eval.names)]
            if options.best_metric not in metrics:
                raise FinetuneError(
                    f"metric_for_best_model={options.metric_for_best_model!r}; the metrics are "
                    f"{', '.join(f'eval_{name}' for name in metrics)}"
                )
        if self._eval is not None and (options.patience or options.restores_best):
            evaluation = Batches(self._eval.examples, batch_size=1)
            self.trajectory["eval_data_checksum"] = evaluation.state_dict()["fingerprint"]
        self._best: Adapter | None = None

    # ------------------------------------------------------------------------------- begin and end

    def start(self, find: Find) -> None:
        model, options, name = self._model, self.options, self.name

        path = Path()

        def begin() -> tuple[Checkpoint | None, Adapter]:
            nonlocal path
            checkpoint: Checkpoint | None = None
            if (saved_run := find()) is not None:
                path, checkpoint = saved_run
            saved = None if checkpoint is None else checkpoint.adapter
            adapter = start_adapter(model, name, options.peft, options.seed, saved, self.total)
            return checkpoint, with_template(adapter, options.template())

        checkpoint, adapter = agreed(self.ranks, f"the start of {name!r}", begin, start_facts)
        self._runner = runner = self._publisher.start(
            adapter, LossForm(smoothing=options.label_smoothing_factor)
        )
        self._adapter = runner.adapter
        try:
            runner.use_noise(options.neftune_noise_alpha)
            sizes, virtual = model.mesh.sizes, self._adapter.prompt_tokens
            largest = self._batches.largest(virtual, sizes.dp, sizes.cp)
            runner.plan_for(*largest, for_all=model.mesh.shards_base)
            for data in filter(None, (self._data, self._eval)):
                check_with_prompt(data, virtual, model.max_positions)
            self._step = TrainingStep(
                runner,
                options.make_optimizer(),
                options.learning_rate,
                self.total,
                options.max_grad_norm,
                model.mesh,
            )
            if checkpoint is not None:
                self._resume(path, checkpoint)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        self._publisher.undo()

    def read(self, path: Path) -> Checkpoint:
        checkpoint = CheckpointStore(path.parent).load(path, self.name)
        return checkpoint.of_base(self._model.program.base.module_shapes())

    def _resume(self, path: Path, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        fix = "; use an older one, or start anew with resume=False"
        with damage_of(f"the checkpoint {path}", FinetuneError, fix):
            is_without = checkpoint.best is None and state.best_step is not None
            if self.options.restores_best and is_without:
                what = f"no best/, the adapter of step {state.best_step}"
                raise FinetuneError(f"{path} is damaged: it has {what}{fix}")
            self._batches.load_state_dict(state.position)
            self._best = checkpoint.best
            self._step.load(state.step, checkpoint.optimizer, checkpoint.beside)

    def save(
        self, store: CheckpointStore, state: TrainerState, trajectory: Mapping[str, Any]
    ) -> Path:
        tensors = self._step.state(), self._step.tensors_beside()
        checkpoint = Checkpoint(state, trajectory, self._settled(), self._best, *tensors)

        def write() -> None:
            store.save(state.step, lambda path: write_checkpoint(checkpoint, path))

        run_on_first(self.ranks, write)
        path = store.latest()
        assert path is not None
        return path

    def is_interrupted(self, is_done: bool) -> bool:
        if self.ranks.size == 1:
            return bool(self._interrupts)
        came = torch.tensor(float(len(self._interrupts)), device=self.ranks.device)
        return bool(float(self.ranks.all_reduce(came)))

    def finish(self, run: Run[FinetuneResult]) -> Work[FinetuneResult]:
        if self._best is not None:
            with deferred_interrupts():
                overwrite(self._settled(), self._best)
                self._runner.scatter()
        state, rows = run.state, self._data.examples
        if isinstance(rows, StreamedRows) and self.ranks.rank == 0:
            _LOG.info("%s: %s", self.name, rows.counts())
        first_data = yield from self._compare_first_data(state.losses)
        with deferred_interrupts():
            adapter = self._settled()
            if self._step.beside is not None:
                adapter = self._step.beside.finished(adapter)
            self._publisher.finish(adapter)
        result = FinetuneResult(
            adapter=self.name,
            losses=tuple(state.losses),
            eval_losses=tuple(state.eval_losses),
            steps=state.step,
            total_steps=self.total,
            tokens=state.tokens,
            targets=state.targets,
            seconds=run.seconds,
            stopped="early" if state.stopped else "completed",
            best_step=state.best_step,
            best_loss=state.best_loss,
            restored=self._best is not None,
            resumed_from=run.resumed_from,
            checkpoint=run.checkpoint,
            first_data=first_data,
        )
        if first_data is not None and result.is_collapsed and self.ranks.rank == 0:
            _LOG.warning(
                "%s has collapsed: the loss of the first step's data was %.4f before, and is %.4f; "
                "lower learning_rate=%g, or warm up longer",
                *(self.name, *first_data, self.options.learning_rate),
            )
        return result

    def _compare_first_data(self, losses: Sequence[float]) -> Work[tuple[float, float] | None]:
        """Return `FinetuneResult.first_data`; None if the steps' loss did not rise."""
        change = LossChange.of(losses)
        if change.last <= min(change.first, losses[0]):
            return None
        plan = [
            [index for index in indexes if self._data[index].ids]
            for indexes in self._batches.plan(0)[: self.options.gradient_accumulation_steps]
        ]
        after, _ = yield from self._mean_loss(self._data, plan)
        return losses[0], after

    def _settled(self) -> Adapter:
        """Return the current adapter, with whole tensors."""
        self._publisher.settle()
        return self._adapter

    def end(self) -> None:
        self._step.drop_gradients()
        self._batches.close()
        self._publisher.changed(self._adapter)
        self._publisher.ended()

    # ------------------------------------------------------------------------------- a step

    def position(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def gradients(self, step: int, rate: float) -> Work[None]:
        """Compute the clipped gradients of the next batches.

        Raises:
            FinetuneError: the loss or the norm is not finite; the adapter is unchanged.
            UnsupportedError: a weight of the recipe gets no gradient.
        """
        options, mesh, device = self.options, self._model.mesh, self._runner.device
        self._step.drop_gradients()
        epoch = self._batches.epoch
        # The last group of an epoch may be smaller.
        group = [*islice(self._batches, options.gradient_accumulation_steps)]
        examples = [example for batch in group for example in batch]
        targets = self._runner.count_targets(examples)
        while True:
            try:
                losses = yield from self._step.gradients(group, targets, options.seed, step)
                break
            except StepBeginsAgain:
                self._step.drop_gradients()
                yield Release()
        norm_here = self._step.clip()
        summed = mesh.data.all_reduce(torch.stack(losses).to(device))
        numbers = torch.stack([x.to(device).double() for x in (*summed, norm_here)])
        # All ranks use rank 0's numbers, so that they take the same decisions.
        reading = Reading(broadcast_from_first(mesh.model, numbers))
        yield reading
        *each, norm = reading.read()
        for loss, batch in zip(each, group, strict=True):
            if not math.isfinite(loss):
                self._refuse(f"the loss is {loss:g}", batch, self._places(batch), step, rate)
        if not math.isfinite(norm):
            places = [place for batch in group for place in self._places(batch)]
            self._refuse(f"the norm of the gradients is {norm:g}", examples, places, step, rate)
        tokens = sum(len(example.ids) for example in examples)
        self._numbers = StepNumbers(epoch, sum(each) / targets, norm, tokens, targets)

    def update(self, step: int, rate: float) -> StepNumbers:
        self._step.update(step, rate)
        self._publisher.changed(self._adapter, self._runner.settle)
        return self._numbers

    def _places(self, batch: Batch) -> list[str]:
        """Return the places of a batch's examples in the data."""
        places = places_of(self._data)
        return [places[index] for index in batch.indexes]

    def _refuse(
        self, what: str, examples: Sequence[Example], places: Sequence[str], step: int, rate: float
    ) -> NoReturn:
        """Raise a FinetuneError that names the examples at fault."""
        culprits = [
            place
            for example, place in zip(examples, places, strict=True)
            if not math.isfinite(self._runner.evaluate([example])[0])
        ]
        if 0 < len(culprits) < len(places):
            where = f"it comes from {_listed(culprits)}, in a batch of {len(places)}"
            fix = "look at that data, or leave it out"
        else:
            where = f"the batch was {_listed(places)}"
            fix = (
                f"lower learning_rate={self.options.learning_rate:g}, warm up longer, or lower "
                f"max_grad_norm={self.options.max_grad_norm}"
            )
        raise FinetuneError(
            f"{what} in step {step + 1} at a learning rate of {rate:.3g}; {where}. The adapter is "
            f"as after step {step}; {fix}"
        )

    # ------------------------------------------------------------------------------- evaluation

    def evaluate(self, step: int) -> Work[Numbers]:
        assert self._eval is not None
        bounds = self.options.batch_bounds
        data, begin, total, targets = self._eval, 0, 0.0, 0.0
        numbers: dict[str, float] = {}
        for name, count in zip(data.names or ("",), data.parts or (len(data),), strict=True):
            batches = Batches(data.examples[begin : begin + count], **bounds, shuffle=False)
            plan = [[begin + index for index in indexes] for indexes in batches.plan(0)]
            loss, weight = yield from self._mean_loss(data, plan)
            if name:
                numbers[f"{name}_loss"] = loss
            begin, total, targets = begin + count, total + loss * weight, targets + weight
        if self.options.eval_samples:
            self._continue_prompts(step)
        return {"loss": total / targets if data.names else loss, **numbers}

    def _continue_prompts(self, step: int) -> None:
        """Continue prompts of the evaluation data, for the log and the record."""
        assert self._eval is not None
        assert self._generate is not None
        options, prompts = self.options, list[list[int]]()
        for example in self._eval.examples[: options.eval_samples]:
            begin = next(i for i, label in enumerate(example.labels) if i and label != IGNORED)
            prompts.append(list(example.ids[:begin]))
        tokenizer, most = self._model.tokenizer, options.eval_sample_tokens
        completions = self._generate(prompts, adapter=self.name, max_new_tokens=most)
        for ids, completion in zip(prompts, completions, strict=True):
            prompt: object = ids if tokenizer is None else tokenizer.decode(ids)
            text: object = completion.token_ids if tokenizer is None else completion.text
            self._rows.append({"prompt": prompt, "completion": text})
            _LOG.info("%s after step %d: %s → %s", self.name, step, shown(prompt), shown(text))

    def samples(self) -> Sequence[Mapping[str, object]]:
        rows, self._rows = self._rows, []
        return rows

    def keep_best(self) -> None:
        self._best = owned(self._settled())

    def _mean_loss(self, data: Dataset, plan: Sequence[Sequence[int]]) -> Work[tuple[float, float]]:
        """Return the mean loss of targets of some batches, without dropout, and their number."""
        replicas, sums = self._model.mesh.dp, torch.zeros(2, dtype=torch.float64)
        sums = sums.to(self._runner.device)
        for indexes in plan[replicas.rank :: replicas.size]:
            examples = [data.examples[i] for i in indexes]
            passed = yield from evaluation_pass(self._runner, examples)
            sums += torch.stack([passed.loss_sum.to(sums), sums.new_tensor(passed.targets)])
        if replicas.rank >= len(plan) % replicas.size > 0:
            self._runner.pass_by(trains=False)
        reading = Reading(self._model.mesh.data.all_reduce(sums))
        yield reading
        loss, count = reading.read()
        return float(broadcast_from_first(self.ranks, sums.new_tensor(loss / count))), count

    # ------------------------------------------------------------------------------- the record

    def config(self) -> Mapping[str, Any]:
        """Return the configuration of the job, with automatic options resolved."""
        options, program = self.options, self._model.program
        optimizer = options.make_optimizer()
        names = [field.name for field in dataclasses.fields(FinetuneOptions)]
        return {
            "adapter": options.adapter,
            "model": program.name,
            "dtype": program.dtype,
            "device": str(self._model.device),
            "ranks": self.ranks.size,
            "data": _source(options.data),
            "eval_data": None if options.eval_data is None else _source(options.eval_data),
            "examples": len(self._data),
            "total_steps": self.total,
            "data_checksum": self.trajectory["data_checksum"],
            **{name: getattr(options, name) for name in names if name not in _LEFT_OUT},
            **options.batch_bounds,
            **optimizer.options,
            "optimizer": optimizer.name,
            "peft": recipe_fields(self._adapter.recipe),
        }


def _source(data: object) -> object:
    """Return the names of files, or the kind of data in memory."""
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, list | tuple) and data and all(isinstance(path, Path) for path in data):
        return [str(path) for path in data]
    return type(data).__name__


def _listed(places: Sequence[str], most: int = 8) -> str:
    more = f" and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(places[:most]) + more
