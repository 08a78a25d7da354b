"""Publishers: which version of an adapter is served while a job trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.recorded.kept_runners import KeptRunners
from pcg.runtime.training.runner import TrainingRunner, training_runner
from pcg.runtime.training.training_copy import owned

_OnPublish: TypeAlias = Callable[[AdapterVersion], None]


class Publisher(ABC):
    """Is told of each change of a job's adapter, and decides what the model serves.

    `windows` is True if the job's sequences go through the KV cache, window by window.
    """

    state: ModelState
    windows: bool

    def start(self, adapter: Adapter) -> Adapter:
        """Return the adapter to train, before the first step."""
        return adapter

    def runner(self, adapter: Adapter) -> TrainingRunner:
        """Return what trains the adapter; it may have the adapter's weights in other tensors."""
        return training_runner(self.state, adapter, self.windows)

    def undo(self) -> None:  # noqa: B027  nothing to undo where what is served did not change
        """Serve what was served before: the job cannot start."""

    @abstractmethod
    def changed(self, adapter: Adapter, settle: Callable[[], None] | None = None) -> None:
        """Note a step, which changed the adapter's tensors in place; `settle` gathers them."""

    @abstractmethod
    def settle(self) -> None:
        """Gather the adapter's tensors over ranks."""

    def ended(self) -> None:  # noqa: B027  nothing to do where a runner is nobody else's
        """Note that the job is over, however it ended."""

    @abstractmethod
    def finish(self, adapter: Adapter) -> None:
        """Serve the adapter that the job ends with."""


class InPlacePublisher(Publisher):
    """Serves the very tensors that are trained; nothing may be served during a step."""

    windows = False

    def __init__(self, state: ModelState, name: str) -> None:
        self.state = state
        self._name = name
        self._before = state.adapters.get(name)
        self._adapter: Adapter | None = None

    def start(self, adapter: Adapter) -> Adapter:
        self._adapter = self.state.put_adapter(adapter)
        return self._adapter

    def undo(self) -> None:
        if self._before is None:
            self.state.remove_adapter(self._name)
        else:
            self.state.put_adapter(self._before)

    def changed(self, adapter: Adapter, settle: Callable[[], None] | None = None) -> None:
        self.state.refresh_adapter(self._name, settle)

    def settle(self) -> None:
        self.state.settle_adapter(self._name)

    def finish(self, adapter: Adapter) -> None:
        if adapter is not self._adapter:
            self.state.put_adapter(adapter)


class VersionPublisher(Publisher):
    """Serves a copy of the adapter, replaced every few steps, while the job trains on.

    Args:
        every: steps from one version to the next; 0 publishes only the result.
        on_publish: called with each version, once it is served.
        kept: runners of other jobs, whose recorded windows it may use.
    """

    windows = True

    def __init__(
        self,
        state: ModelState,
        every: int = 0,
        on_publish: _OnPublish = lambda version: None,
        kept: KeptRunners[TrainingRunner] | None = None,
    ) -> None:
        self.state = state
        self._kept = kept
        self._runner: TrainingRunner | None = None
        self._every = every
        self._on_publish = on_publish
        self._steps = 0
        self._unsettled: Callable[[], None] | None = None

    def runner(self, adapter: Adapter) -> TrainingRunner:
        found = None
        if self._kept is not None:
            found = self._kept.take(self.state.training(adapter, self.windows), adapter)
        self._runner = super().runner(adapter) if found is None else found
        return self._runner

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
        # On a CPU what is served are the very tensors that were trained.
        if self._kept is not None and runner is not None and runner.device.type == "cuda":
            self._kept.give(runner)

    def _publish(self, adapter: Adapter) -> None:
        self.state.check_copies(adapter)
        served = self.state.put_adapter(self.state.on_host(adapter))
        version = self.state.versions.of(served)
        assert version is not None
        self._on_publish(version)
