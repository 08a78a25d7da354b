"""Callbacks of a training run, called as those of `transformers.Trainer`.

    on_train_begin   before the first step
    on_log           after a step, or each `log_every` steps; `logs`: loss, learning_rate, …
    on_step_end      after each step's update
    on_evaluate      after an evaluation; `metrics`: eval_loss, …
    on_save          after a checkpoint
    on_train_end     after the last step, with the adapter that is served

A method receives the options of the run, its `CallbackState` and its `CallbackControl`, and ends
the run after the current step by `control.should_training_stop = True`. The last step is evaluated
and saved. Over ranks, each rank calls its callbacks, and the run ends if one of them asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pcg.errors import FinetuneError
from pcg.keywords import name_here
from pcg.runtime.training.options import Numbers, StepRecord
from pcg.units import shown

EVENTS = ("train_begin", "log", "step_end", "evaluate", "save", "train_end")


@dataclass
class CallbackState:
    """The state of a run, by the names of `transformers.TrainerState`.

    Attributes:
        global_step: number of completed steps.
        max_steps: number of planned steps.
        epoch: epoch of the data, from 0.
        log_history: the logs and the metrics so far, each with its step.
        best_metric: the lowest evaluation loss; None without evaluations.
        is_world_process_zero: True on the rank that writes files.
    """

    global_step: int
    max_steps: int
    epoch: float = 0.0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    is_world_process_zero: bool = True


@dataclass
class CallbackControl:
    """Requests of a callback to its run.

    Attributes:
        should_training_stop: True to end the run after the current step.
    """

    should_training_stop: bool = False

    def __setattr__(self, name: str, value: object) -> None:
        if name != "should_training_stop":
            raise FinetuneError(
                f"a callback sets control.{name}, which has no effect; give the options save_every "
                "and eval_every, and end the run by control.should_training_stop"
            )
        object.__setattr__(self, name, value)


class TrainingCallback:
    """A callback without effect, to inherit from; see the module."""

    def on_train_begin(self, args: Any, state: CallbackState, control: CallbackControl) -> None: ...

    def on_log(
        self, args: Any, state: CallbackState, control: CallbackControl, logs: Numbers
    ) -> None: ...

    def on_step_end(self, args: Any, state: CallbackState, control: CallbackControl) -> None: ...

    def on_evaluate(
        self, args: Any, state: CallbackState, control: CallbackControl, metrics: Numbers
    ) -> None: ...

    def on_save(self, args: Any, state: CallbackState, control: CallbackControl) -> None: ...

    def on_train_end(self, args: Any, state: CallbackState, control: CallbackControl) -> None: ...


def check_callbacks(callbacks: object) -> None:
    """Refuse what has none of the methods. FinetuneError: names the object."""
    if not isinstance(callbacks, list | tuple):
        raise FinetuneError(f"callbacks={shown(callbacks)}; use a list of objects")
    for each in callbacks:
        if isinstance(each, type) or not any(hasattr(each, f"on_{event}") for event in EVENTS):
            raise FinetuneError(
                f"callbacks has {shown(each)}; give objects with some of the methods "
                f"{', '.join(f'on_{event}' for event in EVENTS)}, such as pcg.TrainingCallback"
            )


@dataclass(frozen=True)
class Listeners:
    """The functions and objects that a run calls.

    Attributes:
        on_step: function to call after each step, after evaluation and saving.
        callbacks: objects with methods of `TrainingCallback`.
        options: the options that callbacks receive; None for those of the run.
    """

    on_step: Callable[[StepRecord], object] | None = None
    callbacks: Sequence[Any] = ()
    options: Any = None


class Callbacks:
    """The callbacks of a run with their state."""

    def __init__(
        self, callbacks: Sequence[Any], options: Any, *, step: int, total: int, is_first: bool
    ) -> None:
        check_callbacks(callbacks)
        self._callbacks, self._options = callbacks, options
        self._state = CallbackState(step, total, is_world_process_zero=is_first)
        self._control = CallbackControl()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def asks_to_stop(self) -> bool:
        return self._control.should_training_stop

    def tell(self, event: str, step: int, best: float | None = None, **facts: Numbers) -> None:
        """Call the method of an event of each callback."""
        if not self._callbacks:
            return
        state = self._state
        state.global_step, state.best_metric = step, best
        for numbers in facts.values():
            state.epoch = numbers.get("epoch", state.epoch)
            state.log_history.append({**numbers, "step": step})
        for callback in self._callbacks:
            method = getattr(callback, f"on_{event}", None)
            if method is None:
                continue
            try:
                method(self._options, state, self._control, **facts)
            except AttributeError as error:
                arguments: Sequence[Any] = (self._options, state, self._control)
                owner: Any = next((each for each in arguments if each is error.obj), None)
                if owner is None:
                    raise
                names = [each.name for each in fields(owner)]
                ours, sentence = name_here(str(error.name), names)
                fix = f"the name here is {ours!r}" if ours else sentence or "do without it"
                raise FinetuneError(
                    f"{type(callback).__name__}.on_{event} reads {error.name!r} of transformers, "
                    f"which a {type(owner).__name__} has not; {fix}"
                ) from error
