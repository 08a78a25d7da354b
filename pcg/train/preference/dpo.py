"""Direct preference optimization (Rafailov et al., 2023), by a call, a file or a server.

    result = dpo(executor, DpoArguments("pairs.jsonl", adapter="polite", beta=0.1))

If the executor's engine runs on a thread, the training shares the engine's steps.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from pcg.errors import EngineError, FinetuneError, FinetuneInterrupted, as_pcg_error
from pcg.kernels.devices import device_thread
from pcg.options import CompileOptions
from pcg.runtime.data.sources import DataLimits
from pcg.runtime.data.tokenizing import Cancelling, load_apart
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import StepRecord
from pcg.train.config_file import (
    CHECKPOINTS,
    RECORD,
    ConfigFile,
    DataPath,
    ModelOptions,
    OutputOptions,
    open_model,
)
from pcg.train.preference.options import (
    DpoArguments,
    DpoOptions,
    PreferenceArguments,
    PreferenceOptions,
)
from pcg.train.preference.run import PreferenceResult, PreferenceRun, Preferences


@dataclass(frozen=True, kw_only=True)
class FileOptions(PreferenceOptions):
    """Options of training on preferences by a file.

    Attributes:
        data: a file of rows, a hub id, or a list of these; a row has two outputs for dpo, and a
            completion with a label for kto.
        eval_data: files for evaluating the loss and the rewards.
        reference_adapter: a saved adapter as the reference, instead of `reference`.
    """

    title: ClassVar[str] = "Data"

    data: tuple[DataPath, ...]
    eval_data: Mapping[str, tuple[DataPath, ...]] | tuple[DataPath, ...] | None = field(
        default=None, repr=False, compare=False
    )
    reference_adapter: Path | None = None


@dataclass(frozen=True, kw_only=True)
class DpoFileOptions(DpoOptions, FileOptions):
    """Options of direct preference optimization by a file."""

    title: ClassVar[str] = "Data"


DPO_KEYS = (ModelOptions, OutputOptions, DpoFileOptions, CompileOptions)
"""The dataclasses with a configuration's keys as fields."""


def dpo(executor: Executor, arguments: DpoArguments) -> PreferenceResult:
    """Train an adapter on preferences, and serve the adapter.

    Raises:
        DataError: unusable data; names file and line.
        FinetuneError: bad options, non-finite numbers, or a checkpoint that cannot be saved or
            belongs to another run.
        FinetuneInterrupted: Ctrl-C; the checkpoint has the state of the last complete step.
        UnsupportedError: the recipe has a feature that pcg does not train; or several ranks.
    """
    return PreferenceRun(executor, arguments).run()


def train_dpo(config: ConfigFile) -> PreferenceResult:
    """Train an adapter on preferences by a configuration, and save the adapter in the output.

    Raises:
        PcgError: the configuration, the model or the data is unusable; before the first step.
        FinetuneInterrupted: Ctrl-C; the same call continues from the checkpoint.
    """
    return train_file(
        config, DpoFileOptions, lambda executor, values: dpo(executor, DpoArguments(**values))
    )


def train_file(
    config: ConfigFile,
    kind: type[FileOptions],
    train: Callable[[Executor, dict[str, Any]], PreferenceResult],
) -> PreferenceResult:
    """Train by a configuration with options of a kind, and save the adapter in the output.

    Args:
        train: trains, given the values of the arguments.
    """
    files = OutputOptions.of(config)
    folders = {"checkpoint_dir": files.output / CHECKPOINTS, "record": files.output / RECORD}
    options = config.make(kind, **folders)
    files.check(resumes=options.resume is True)
    executor = open_model(config)
    values = {**folders, **config.given(kind, "reference_adapter")}
    if options.reference_adapter is not None:
        if options.reference is not None:
            raise FinetuneError("reference and reference_adapter are both given; use one of them")
        values["reference"] = f"{files.adapter}-reference"
        executor.add_adapter(values["reference"], options.reference_adapter)
    peft = files.configuration(executor)
    result = train(executor, {**values, "adapter": files.adapter, "peft": peft})
    files.save(executor, values["checkpoint_dir"])
    return result


class PreferenceJob:
    """A preference job on its own thread.

    Args:
        end: called on the job's thread with the result or None, the error or None, and True if the
            outcome is final; False if the same job can be resumed.
    """

    def __init__(
        self,
        executor: Executor,
        end: Callable[[PreferenceResult | None, Exception | None, bool], None],
        arguments: PreferenceArguments,
        objective: type[Preferences],
    ) -> None:
        self._executor = executor
        self._end = end
        self._arguments, self._objective = arguments, objective
        self._cancelling = Cancelling(arguments.adapter)
        self._lock = Lock()
        self._run: PreferenceRun | None = None
        self._is_stopped = False

    def begin(self) -> None:
        """Start the job's thread."""
        name = f"pcg preferences of {self._arguments.adapter}"
        device_thread(self._executor.device, self._work, name).start()

    def interrupt(self) -> None:
        """End after the current step, with a checkpoint."""
        with self._lock:
            self._is_stopped = True
            if self._run is not None:
                self._run.stop()

    def cancel(self) -> None:
        """End now, without waiting for the end."""
        self._cancelling.cancel()
        with self._lock:
            if self._run is not None:  # `cancel` waits for the current unit
                name = f"pcg end of {self._arguments.adapter}"
                device_thread(self._executor.device, self._run.cancel, name).start()

    def _work(self) -> None:
        try:
            result = self._train()
        except Exception as error:
            goes_on = isinstance(error, FinetuneInterrupted | EngineError)
            is_final = not goes_on and not self._cancelling.is_cancelled
            known = as_pcg_error(error, "the job", FinetuneError)
            self._end(None, known, is_final)
        else:
            self._end(result, None, True)

    def _train(self) -> PreferenceResult:
        tokenizer = pickle.dumps(self._executor.tokenizer)
        load = functools.partial(load_apart, tokenizer, self._cancelling)
        arguments = self._executor, self._arguments, load, DataLimits()
        run = PreferenceRun(*arguments, objective=self._objective)
        with self._lock:
            self._run = run
            if self._is_stopped:
                run.stop()
        if self._cancelling.is_cancelled:
            run.cancel()
        return run.run()


def step_numbers(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step that only preference jobs have."""
    evaluation = record.evaluation or {}
    of_evaluation = {f"valid_{name}": x for name, x in evaluation.items() if name != "loss"}
    return {**record.metrics, **of_evaluation}
