"""The adapter that a job trains, and its published versions.

Training changes tensors in place, so the tensors are shared neither with the caller nor with files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from pcg.errors import FinetuneError
from pcg.options import PLAIN_LOSS, LossForm
from pcg.peft.adapter import Adapter, check_fits, with_shared
from pcg.peft.recipe import Recipe
from pcg.peft.registry import is_saved, recipe_of_fields
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.plain import adapter_facts
from pcg.runtime.text.chat import ChatTemplate
from pcg.runtime.training.runner import TrainingRunner, training_runner
from pcg.runtime.training.warm_jobs import KeptRunners


def start_adapter(
    state: ModelState, name: str, peft: object, seed: int, saved: Adapter | None, total_steps: int
) -> Adapter:
    """Return the adapter to train: existing, new, or from a checkpoint.

    Args:
        peft: the recipe of a new adapter, as for `Executor.add_adapter`; None for the recipe that
            the program was compiled for under the name, else "lora".
    Raises:
        FinetuneError: `peft`, the existing adapter and the saved adapter differ in their recipe.
        UnsupportedError: the recipe has a feature that pcg does not support.
    """
    present = state.adapters.get(name)
    is_path = is_saved(peft)
    if present is not None and peft is not None:
        if is_path:
            raise FinetuneError(
                f"there is an adapter {name!r} already, and peft={str(peft)!r} would start from "
                "another; leave peft out, or remove the adapter first"
            )
        wanted = _sites_of_recipe(state, peft)
        check_same(name, "peft=", wanted, "the adapter that is there", sites_of(present))
    if saved is not None:
        if present is not None:
            check_same(name, "the checkpoint", sites_of(saved), "this run", sites_of(present))
        elif peft is not None and not is_path:
            wanted = _sites_of_recipe(state, peft)
            check_same(name, "the checkpoint", sites_of(saved), "peft=", wanted)
        return saved_adapter(state, saved)
    if present is None:
        if peft is None:
            compiled = state.program.recipes.get(name)
            peft = "lora" if compiled is None else recipe_of_fields(compiled)
        present = state.make_adapter(name, peft, seed=seed)
    recipe = present.recipe.for_job(total_steps)
    return state.for_training(dataclasses.replace(owned(present), recipe=recipe))


def with_template(adapter: Adapter, template: ChatTemplate | None) -> Adapter:
    """Return an adapter whose chats a template renders; the adapter itself for None."""
    if template is None:
        return adapter
    return dataclasses.replace(adapter, chat_template=template.sources["default"])


def start_facts(begun: tuple[Any, Adapter]) -> Mapping[str, str]:
    """Return descriptions of a job's initial checkpoint and adapter, which ranks compare."""
    checkpoint, adapter = begun
    step = "none" if checkpoint is None else f"step {checkpoint.state.step}"
    return {"the checkpoint to go on from": step, **adapter_facts(adapter)}


def saved_adapter(state: ModelState, saved: Adapter) -> Adapter:
    """Return an adapter to train, with the values of a checkpoint's; checks the model's shapes."""
    base = state.program.base
    shapes = base.module_shapes()
    check_fits(saved, shapes, state.program.name, base.output_module)
    return state.for_training(owned(with_shared(saved, shapes)))


def owned(adapter: Adapter) -> Adapter:
    """Return the adapter with copies of its tensors."""
    return adapter.map(torch.clone)


def overwrite(adapter: Adapter, values: Adapter) -> None:
    """Copy values into an adapter's own tensors."""
    with torch.no_grad():
        for tensor, value in zip(adapter.tensors, values.tensors, strict=True):
            tensor.copy_(value)


Sites = tuple[Mapping[str, object], Recipe]


def sites_of(adapter: Adapter) -> Sites:
    """Return the sites of an adapter's recipe, and the recipe."""
    return {path: weights.bypass for path, weights in adapter.weights.items()}, adapter.recipe


def _sites_of_recipe(state: ModelState, peft: object) -> Sites:
    recipe, model_type = state.recipe(peft), str(state.program.config["model_type"])
    return recipe.bypasses_in(state.program.base, model_type), recipe


def check_same(name: str, what: str, first: Sites, other: str, second: Sites) -> None:
    """Raise a FinetuneError with the difference if two recipes of an adapter differ."""
    difference = ""
    before, after = first[1], second[1]
    if before.bias != after.bias:
        difference = f'bias="{before.bias}" and {other} "{after.bias}"'
    saved = [sorted(each.modules_to_save or ()) for each in (before, after)]
    if saved[0] != saved[1]:
        difference = f"modules_to_save {saved[0]} and {other} {saved[1]}"
    if before.dropout != after.dropout:
        difference = f"dropout {before.dropout:g} and {other} {after.dropout:g}"
    if before.encoder != after.encoder:
        difference = f"{before.encoder or 'no encoder'} and {other} {after.encoder or 'none'}"
    if type(before) is type(after):
        for field, value in before.schedule.items():
            if after.schedule.get(field, value) != value:
                difference = f"{field}={value} and {other} {after.schedule[field]}"
    for path in [*first[0], *second[0]]:
        a, b = first[0].get(path), second[0].get(path)
        if a != b and not difference:
            difference = f"{a or 'none'} at {path or 'the model'} and {other} {b or 'none'}"
    if difference:
        raise FinetuneError(
            f"adapter {name!r}: {what} has {difference}; use the same recipe, or another name and "
            "checkpoint_dir"
        )


_OnPublish: TypeAlias = Callable[[AdapterVersion], None]


class InPlacePublisher:
    """Publishes the trained tensors themselves; steps must not overlap with requests."""

    windows = False

    def __init__(self, state: ModelState, name: str) -> None:
        self.state = state
        self._name = name
        self._before = state.adapters.get(name)
        self._adapter: Adapter | None = None

    def start(self, adapter: Adapter, form: LossForm = PLAIN_LOSS) -> TrainingRunner:
        """Serve the adapter to train, and return its runner."""
        self._adapter = self.state.put_adapter(adapter)
        try:
            return training_runner(self.state, self._adapter, form=form)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Serve the previous adapter again, as the job cannot start."""
        if self._before is None:
            self.state.remove_adapter(self._name)
        else:
            self.state.put_adapter(self._before)

    def changed(self, adapter: Adapter, settle: Callable[[], None] | None = None) -> None:
        """Handle a step, which changed the adapter's tensors in place; `settle` gathers them."""
        self.state.refresh_adapter(self._name, settle)

    def settle(self) -> None:
        """Gather the adapter's tensors over ranks."""
        self.state.settle_adapter(self._name)

    def finish(self, adapter: Adapter) -> None:
        """Serve the final adapter of the job."""
        if adapter is not self._adapter:
            self.state.put_adapter(adapter)

    def ended(self) -> None:
        """Handle the end of the job, after success or failure."""


class VersionPublisher:
    """Publishes copies of the adapter every few steps while the job trains.

    Args:
        every: steps between versions; 0 publishes only the result.
        kept: runners of other jobs, with recorded windows for reuse.
    """

    windows = True

    def __init__(
        self,
        state: ModelState,
        every: int = 0,
        on_publish: _OnPublish = lambda version: None,
        kept: KeptRunners | None = None,
    ) -> None:
        self.state = state
        self._kept = kept
        self._runner: TrainingRunner | None = None
        self._every = every
        self._on_publish = on_publish
        self._steps = 0
        self._unsettled: Callable[[], None] | None = None

    def start(self, adapter: Adapter, form: LossForm = PLAIN_LOSS) -> TrainingRunner:
        """Return a runner for the adapter, possibly a kept runner of an ended job."""
        runner = None
        if self._kept is not None:
            training = self.state.training(adapter, self.windows, form=form)
            runner = self._kept.take(training, adapter)
        self._runner = runner or training_runner(self.state, adapter, self.windows, form=form)
        return self._runner

    def undo(self) -> None:
        """Do nothing: the served adapter is unchanged."""

    def changed(self, adapter: Adapter, settle: Callable[[], None] | None = None) -> None:
        if settle is not None:
            self._steps += 1
            self._unsettled = settle
            if self._every and self._steps % self._every == 0:
                self.settle()
                self._publish(owned(adapter))

    def settle(self) -> None:
        settle, self._unsettled = self._unsettled, None
        if settle is not None:
            settle()

    def finish(self, adapter: Adapter) -> None:
        self._publish(adapter)

    def ended(self) -> None:
        runner, self._runner = self._runner, None
        # On a CPU the trained tensors themselves are served, so the runner cannot be reused.
        if self._kept is not None and runner is not None and runner.device.type == "cuda":
            self._kept.give(runner)

    def _publish(self, adapter: Adapter) -> None:
        self.state.check_copies(adapter)
        served = self.state.put_adapter(self.state.on_host(adapter))
        version = self.state.versions.of(served)
        assert version is not None
        self._on_publish(version)


Publisher = InPlacePublisher | VersionPublisher
"""Decides which versions are served while a job trains; `windows`: the job uses the KV cache."""
