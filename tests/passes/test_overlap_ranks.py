"""What runs while ranks exchange something, as training and serving programs do it."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pcg.ir.program.program import Program
from pcg.peft.lora import LoraConfig
from tests.support.ranked import EXAMPLES, SEQUENCES, fill, make_executor, make_program
from tests.support.threads import ThreadRanks, run_ranks

NAME = "llama3"


class Watch(TorchDispatchMode):
    """A rank whose collectives and products are written down, in the order in which they happen.

    Attributes:
        events: `begin KIND`, `wait KIND`, or the name of what else is done.
    """

    def __init__(self, ranks: ThreadRanks) -> None:
        super().__init__()
        self.events: list[str] = []
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def begin(self, collective: str, x: Any) -> Any:
        self.events.append(f"begin {collective}")
        wait = self._ranks.begin(collective, x)

        def waiting() -> Any:
            self.events.append(f"wait {collective}")
            return wait()

        return waiting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.events.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def exchanged(self) -> list[str]:
        """What began and was waited for, which has to be the same on all ranks."""
        return [event for event in self.events if " " in event]

    def beside(self) -> list[tuple[str, list[str]]]:
        """Each collective that began, with what was done until it was waited for."""
        found = []
        for place, event in enumerate(self.events):
            if event.startswith("begin"):
                kind = event.removeprefix("begin ")
                end = self.events.index(f"wait {kind}", place)
                found.append((kind, self.events[place + 1 : end]))
        return found


@cache
def program_of_two(sequence_parallel: bool) -> Program:
    recipe = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    return make_program(NAME, 2, peft={"a": recipe}, sequence_parallel=sequence_parallel)


def watched(sequence_parallel: bool, serves: bool) -> Watch:
    """What the first of two ranks does in a step of training, or to get logits."""
    program = program_of_two(sequence_parallel)

    def on_rank(ranks: ThreadRanks) -> Watch:
        watch = Watch(ranks)
        executor = make_executor(program, NAME, watch)  # type: ignore[arg-type]
        fill(executor.adapters["a"].tensors)
        runner = executor.training_runner("a")
        with watch:
            if serves:
                executor.logits(SEQUENCES, ["a"] * len(SEQUENCES))
            else:
                runner.forward_backward(EXAMPLES[:1], 1)
        return watch

    first, second = run_ranks(2, on_rank)
    assert first.exchanged() == second.exchanged()
    return first


def test_gradients_of_weights_run_beside_the_sum_of_an_inputs() -> None:
    """Each of two layers has two such sums: before its MLP, and before its attention."""
    beside = watched(sequence_parallel=False, serves=False).beside()
    assert [kind for kind, _ in beside] == ["all_reduce"] * 4
    for _, done in beside:
        assert done.count("mm") >= 2


def test_parts_of_tokens_are_gathered_again_beside_products() -> None:
    beside = watched(sequence_parallel=True, serves=False).beside()
    assert {kind for kind, _ in beside} == {"all_gather", "reduce_scatter"}
    for _, done in beside:
        assert "mm" in done


def test_serving_has_angles_made_beside_the_embeddings_sum() -> None:
    """And nothing else: each of its layers' collectives is what all behind it waits for."""
    ((kind, done),) = watched(sequence_parallel=False, serves=True).beside()
    assert kind == "all_reduce"
    assert {"cos", "sin"} <= set(done)
