"""GRPO by a call or a configuration file: reward functions, the run, and the saved adapter."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

from pcg.errors import FinetuneError, GraderError, PcgError
from pcg.files import is_directory, json_value, read_text, shown_path
from pcg.graders.reader import grader_from
from pcg.graders.rewards import GraderReward
from pcg.keywords import takes
from pcg.options import CompileOptions
from pcg.runtime.data.formats import FormattingFunc
from pcg.runtime.data.sources import choose_splits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import RunOptions
from pcg.runtime.training.training_data import with_own_template
from pcg.runtime.training.work_units import run_to_end
from pcg.train.config_file import (
    CHECKPOINTS,
    RECORD,
    ConfigFile,
    DataPath,
    ModelOptions,
    OutputOptions,
    open_model,
)
from pcg.train.grpo.checkpoints import ResumableOptions, grpo_trajectory
from pcg.train.grpo.loop import GrpoResult, OnStep, Task, grpo_run
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.rollouts import Prompt, RewardFunction, Rewards, read_prompts
from pcg.units import shown


@dataclass(frozen=True)
class GrpoArguments:
    """Arguments of `train_grpo`.

    Attributes:
        data: rows, or a source of rows as of `Executor.finetune`: prompts, or mappings with
            "prompt" and columns for rewards. A prompt is a text, a list of messages, or tokens.
        rewards: functions `reward(prompts, completions, completion_ids, **columns)` that return a
            number or None for each completion.
        options: the options; `GrpoOptions()` by default. `ResumableOptions` of
            `pcg.train.grpo.checkpoints` also save checkpoints.
        adapter: the adapter's name. An existing adapter is trained further, and its initial version
            is the reference of the KL divergence; for a new adapter the base is the reference.
        peft: the recipe of a new adapter, as for `add_adapter`.
        reward_weights: the weight of each function; 1 by default.
        on_step: called after each update; see `pcg.train.grpo.loop.Task`.
        formatting_func: function from a row to its prompt, or to a mapping with "prompt".
        callbacks: objects with methods of `pcg.TrainingCallback`, which may end the run; they
            receive `options`.
    """

    data: Any
    rewards: RewardFunction | Sequence[RewardFunction]
    options: GrpoOptions | None = None
    adapter: str = field(default="policy", kw_only=True)
    peft: object = field(default=None, kw_only=True)
    reward_weights: Sequence[float] | None = field(default=None, kw_only=True)
    on_step: OnStep | None = field(default=None, kw_only=True)
    formatting_func: FormattingFunc | None = field(default=None, kw_only=True)
    callbacks: Sequence[Any] = field(default=(), kw_only=True)


@takes(GrpoArguments, FinetuneError)
def train_grpo(executor: Executor, arguments: GrpoArguments) -> GrpoResult:
    """Train an adapter by GRPO, and serve the result; `save_adapter` saves it.

    If an engine of the executor runs on a thread, rollouts and updates share its steps with other
    requests; else an engine runs during the call.

    Raises:
        AdapterConflictError: a job or trainer already trains an adapter of that name.
        DataError: a row is not a prompt.
        FinetuneError: bad options, a failed reward function, a non-finite loss, or a checkpoint
            that cannot be saved or belongs to another run.
        FinetuneInterrupted: Ctrl-C; with checkpoints, the same call continues from the latest.
    """
    return _train(executor, arguments)


def _train(
    executor: Executor,
    arguments: GrpoArguments,
    record: tuple[Path, Mapping[str, Any]] | None = None,
) -> GrpoResult:
    """Train as `train_grpo` does, with a record.

    Args:
        record: the folder and the configuration of the record; None for no record.
    """
    options = GrpoOptions() if arguments.options is None else arguments.options
    if not isinstance(options, GrpoOptions):
        raise FinetuneError(f"options={shown(options)}; use GrpoOptions(…)")
    rewards, adapter = Rewards(arguments.rewards, arguments.reward_weights), arguments.adapter
    options = with_own_template(options, executor.state, adapter, arguments.peft)
    splits = choose_splits(arguments.data, options.eval_data)
    reading = executor.tokenizer, options, arguments.formatting_func
    prompts, tests = read_prompts(splits.train[0], *reading), list[Prompt]()
    if splits.evaluation is not None:
        tests = read_prompts(splits.evaluation, *reading)
    reference = executor.adapters.get(adapter)
    callbacks = arguments.callbacks
    task = Task(prompts, rewards, reference, arguments.on_step, tests, callbacks=callbacks)
    folder, config = (None, None) if record is None else record
    run_options, trajectory = RunOptions(progress=False, record=folder), dict[str, Any]()
    if isinstance(options, ResumableOptions) and options.checkpoint_dir is not None:
        whole = options.updates_per_generation
        run_options = replace(
            run_options,
            checkpoint_dir=options.checkpoint_dir,
            save_every=-(-options.save_every // whole) * whole,
            keep_last=options.keep_last,
            resume=options.resume,
        )
        trajectory = grpo_trajectory(executor, prompts, options)
    with _engine(executor) as running:
        trainer = running.trainer(
            adapter,
            peft=arguments.peft,
            seed=options.seed,
            batch_size=options.batch_size,
            temperature=options.temperature,
            dropout=False,
            max_tokens=options.max_tokens_per_pass,
            chat_template=options.template(),
        )
        with trainer:
            trainer.created.wait()
            parts = running, trainer, task, options, run_options
            return run_to_end(grpo_run(*parts, trajectory=trajectory, config=config).work())


@contextmanager
def _engine(executor: Executor) -> Iterator[AsyncEngine]:
    """Yield the engine that runs on a thread, or start an engine for the block."""
    running = cast("AsyncEngine | None", executor.state.engine_thread)
    if running is not None:
        yield running
        return
    with executor.engine().start() as started:
        yield started


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The task: prompts, and the functions that score completions.

    Attributes:
        data: a file of rows, a hub id, or a list of these to concatenate; each row is an object
            with a "prompt" and columns for rewards.
        rewards: a reward function, or a list: module:function, or file.py:function with a path
            relative to the configuration's folder, which run in this process; grader:FILE.json, a
            grader of docs/serving.md in a file; or model:FOLDER, a sequence classifier with one
            label.
        reward_weights: the weight of each function; 1 by default.
        eval_data: files of prompts for evaluations.
    """

    title: ClassVar[str] = "Task"

    data: tuple[DataPath, ...]
    eval_data: Mapping[str, tuple[DataPath, ...]] | tuple[DataPath, ...] | None = None
    rewards: tuple[str, ...]
    reward_weights: tuple[float, ...] | None = None


GRPO_KEYS = (ModelOptions, OutputOptions, TaskOptions, ResumableOptions, CompileOptions)
"""The dataclasses with a configuration's keys as fields."""


def train_grpo_file(config: ConfigFile, on_step: OnStep | None = None) -> GrpoResult:
    """Train an adapter by a configuration, and save the adapter and a record in the output.

    Raises:
        PcgError: the configuration, the data, a reward function or the model is unusable, before
            the first step; or an error of `train_grpo`.
        FinetuneInterrupted: Ctrl-C; the same call continues from the latest checkpoint.
    """
    files, task = OutputOptions.of(config), config.make(TaskOptions)
    options = config.make(ResumableOptions, checkpoint_dir=files.output / CHECKPOINTS)
    files.check(resumes=options.resume is True)
    record = (files.output / RECORD, {**config.values, **dataclasses.asdict(options)})
    rewards = [reward_function(name, config.path.parent) for name in task.rewards]
    executor = open_model(config)
    peft = files.configuration(executor)
    if files.start_from is not None:  # its initial version is also the reference
        executor.add_adapter(files.adapter, peft)
        peft = None
    arguments = GrpoArguments(
        task.data,
        rewards,
        options,
        adapter=files.adapter,
        peft=peft,
        reward_weights=task.reward_weights,
        on_step=on_step,
    )
    result = _train(executor, arguments, record)
    files.save(executor, options.checkpoint_dir)
    return result


_GRADER, _MODEL = "grader:", "model:"


def reward_function(name: str, folder: Path) -> RewardFunction:
    """Return the reward function of a name; see `TaskOptions.rewards`.

    Raises:
        FinetuneError: the function is missing, or its module cannot be imported.
        GraderError: the grader is invalid.
    """
    if name.startswith(_GRADER):
        path = folder / name.removeprefix(_GRADER)
        grader = json_value(read_text(path, GraderError), shown_path(path), GraderError)
        return GraderReward(grader_from(grader, shown_path(path)))
    if name.startswith(_MODEL):
        from pcg.trace.reward_model import RewardModel  # imports transformers

        path = folder / name.removeprefix(_MODEL)
        return RewardModel(path if is_directory(path) else name.removeprefix(_MODEL))
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise FinetuneError(
            f"rewards: {shown(name)}; use module:function, or file.py:function for a file in the "
            "configuration's folder"
        )
    try:
        module = (
            _from_file(folder / place) if place.endswith(".py") else importlib.import_module(place)
        )
    except PcgError:
        raise
    except Exception as error:
        raise FinetuneError(
            f"rewards: {place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function_found = getattr(module, function, None)
    if not callable(function_found):
        raise FinetuneError(f"rewards: {place} has no function {function!r}")
    return function_found  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise FinetuneError(f"rewards: there is no file {shown_path(path)}")
    name = f"pcg_rewards_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in the module look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
