"""GRPO by a configuration file: its keys, its reward functions, and what becomes of its adapter."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from pcg.errors import DataError, FinetuneError, GraderError, PcgError
from pcg.files import json_value, read_text, shown_path
from pcg.graders.reader import grader_from
from pcg.graders.rewards import GraderReward
from pcg.options import CompileOptions
from pcg.records.record import RunRecord
from pcg.runtime.data.sources import read_rows
from pcg.train.config_file import ConfigFile
from pcg.train.grpo.checkpoints import GrpoCheckpoints, ResumableOptions
from pcg.train.grpo.loop import OnStep
from pcg.train.grpo.prompts import read_prompts
from pcg.train.grpo.result import GrpoResult, Sample
from pcg.train.grpo.rewards import RewardFunction
from pcg.train.grpo.train import train_grpo
from pcg.train.model import ModelOptions, open_model
from pcg.train.outputs import CHECKPOINTS, RECORD, OutputOptions
from pcg.units import shown


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The task: prompts, and the functions that score completions.

    Attributes:
        data: a file of JSON lines, each an object with a "prompt" and columns that rewards get;
            several, one after the other, as a list.
        rewards: a reward function as module:function, or file.py:function with the file's path from
            the configuration's folder, which run in this process; or grader:FILE.json, a grader
            of docs/graders.md in a file. Several as a list.
        reward_weights: the weight of each, 1 by default.
    """

    title: ClassVar[str] = "Task"

    data: tuple[Path, ...]
    rewards: tuple[str, ...]
    reward_weights: tuple[float, ...] | None = None


GRPO_KEYS = (ModelOptions, OutputOptions, TaskOptions, ResumableOptions, CompileOptions)
"""The dataclasses whose fields are the keys of a configuration."""


def train_grpo_file(config: ConfigFile, on_step: OnStep | None = None) -> GrpoResult:
    """Train an adapter as a configuration says, and save it in its output, with a record.

    Raises:
        PcgError: what is wrong with the configuration, the data, a reward function or the model,
            before a step; or what `train_grpo` raises.
        FinetuneInterrupted: Ctrl-C; the same call goes on from the latest checkpoint.
    """
    files, task = config.make(OutputOptions), config.make(TaskOptions)
    checkpoints = files.output / CHECKPOINTS
    options = config.make(ResumableOptions, checkpoint_dir=checkpoints)
    files.check(resumes=options.resume is True)
    rows = [row for path in task.data for row in _rows(path)]
    rewards = [reward_function(name, config.path.parent) for name in task.rewards]
    executor = open_model(config)
    peft = files.configuration(executor)
    if files.start_from is not None:  # whose version now is the reference, too
        executor.add_adapter(files.adapter, peft)
        peft = None
    kept = {**config.values, **dataclasses.asdict(options)}
    place, done = files.output / RECORD, 0
    if options.checkpoint_dir is not None:
        prompts = read_prompts(rows, executor.tokenizer)
        done = GrpoCheckpoints(executor, prompts, options).step
    with RunRecord(place, kept, name=files.adapter, kind="grpo", done=done) as record:

        def tell(step: int, numbers: Mapping[str, float], samples: Sequence[Sample]) -> None:
            record.log(step, **numbers)
            if samples:
                record.samples(step, [one.row for one in samples])
            if on_step is not None:
                on_step(step, numbers, samples)

        result = train_grpo(
            executor,
            rows,
            rewards,
            options,
            adapter=files.adapter,
            peft=peft,
            reward_weights=task.reward_weights,
            on_step=tell,
        )
        executor.save_adapter(files.adapter, files.output)
    if options.checkpoint_dir == checkpoints:
        shutil.rmtree(checkpoints, ignore_errors=True)
    return result


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    found = []
    for row in read_rows((path,)):
        if not isinstance(row.value, dict) or "prompt" not in row.value:
            raise DataError(f"{row.where} is {shown(row.value)}; use an object with a 'prompt'")
        found.append(row.value)
    return found


_GRADER = "grader:"


def reward_function(name: str, folder: Path) -> RewardFunction:
    """Return the function of `module:function` or `file.py:function`, or that of a grader.

    Args:
        folder: where a file's relative path begins.
    Raises:
        FinetuneError: there is none, or its module fails.
        GraderError: the grader cannot be.
    """
    if name.startswith(_GRADER):
        path = folder / name.removeprefix(_GRADER)
        grader = json_value(read_text(path, GraderError), shown_path(path), GraderError)
        return GraderReward(grader_from(grader, shown_path(path)))
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
    found = getattr(module, function, None)
    if not callable(found):
        raise FinetuneError(f"rewards: {place} has no function {function!r}")
    return found  # type: ignore[no-any-return]


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
    sys.modules[name] = module  # as dataclasses in it look for their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
