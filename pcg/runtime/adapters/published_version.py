"""What an executor serves of an adapter while a job trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pcg.peft.adapter import Adapter
from pcg.runtime.training.training_copy import owned

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor


class Served(Protocol):
    """Hears of a job's adapter.

    Attributes:
        executor: that serves it.
        windows: whether the job's sequences go through the KV cache, window by window.
    """

    executor: Executor
    windows: bool

    def start(self, adapter: Adapter) -> Adapter:
        """Hear of it before the first step; the adapter that is trained."""

    def undo(self) -> None:
        """Serve what was served before: the job cannot start."""

    def changed(self, adapter: Adapter, settle: Callable[[], None] | None = None) -> None:
        """Hear of a step, which changed its tensors in place.

        Args:
            adapter: that is trained.
            settle: makes its tensors whole over ranks, before they are read.
        """

    def settle(self) -> None:
        """Make its tensors whole over ranks."""

    def finish(self, adapter: Adapter) -> None:
        """Hear of the end: this is what the job made."""


class InPlace:
    """The very tensors that are trained are served; nothing may be served during a step."""

    windows = False

    def __init__(self, executor: Executor, name: str) -> None:
        self.executor = executor
        self._name = name
        self._before = executor.adapters.get(name)
        self._adapter: Adapter | None = None

    def start(self, adapter: Adapter) -> Adapter:
        self._adapter = self.executor.put_adapter(adapter)
        return self._adapter

    def undo(self) -> None:
        if self._before is None:
            self.executor.remove_adapter(self._name)
        else:
            self.executor.put_adapter(self._before)

    def changed(self, adapter: Adapter, settle: Callable[[], None] | None = None) -> None:
        self.executor.refresh_adapter(self._name, settle)

    def settle(self) -> None:
        self.executor.settle_adapter(self._name)

    def finish(self, adapter: Adapter) -> None:
        if adapter is not self._adapter:
            self.executor.put_adapter(adapter)


class Published:
    """The version that was published last is served while the job trains another.

    Args:
        executor: that serves it.
        every: steps from one version to the next; 0 publishes the end alone.
        on_publish: is told of each version.
    """

    windows = True

    def __init__(
        self, executor: Executor, every: int = 0, on_publish: Callable[[], None] = lambda: None
    ) -> None:
        self.executor = executor
        self._every = every
        self._on_publish = on_publish
        self._steps = 0
        self._stale: Callable[[], None] | None = None

    def start(self, adapter: Adapter) -> Adapter:
        return adapter

    def undo(self) -> None:
        """Nothing was changed."""

    def changed(self, adapter: Adapter, settle: Callable[[], None] | None = None) -> None:
        if settle is not None:
            self._steps += 1
            self._stale = settle
            if self._every and self._steps % self._every == 0:
                self.settle()
                self._publish(owned(adapter))

    def settle(self) -> None:
        settle, self._stale = self._stale, None
        if settle is not None:
            settle()

    def finish(self, adapter: Adapter) -> None:
        self._publish(adapter)

    def _publish(self, adapter: Adapter) -> None:
        self.executor.put_adapter(self.executor.held(adapter))
        self._on_publish()
