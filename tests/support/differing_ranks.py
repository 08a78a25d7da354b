"""Ways in which two ranks may differ, and what each of them is told."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pcg.compiler as compiler
from pcg.errors import ParallelError, PcgError
from pcg.ir.program.program import Program
from pcg.peft.lora import LoraConfig
from pcg.ranks.group import Ranks
from pcg.ranks.join import join_group
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.random_weights import RandomWeights
from pcg.runtime.model.weights import Checkpoint, StateDictCheckpoint
from pcg.source import resolve
from tests.support import tiny_llama
from tests.support.threads import tp_mesh

ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17, 18, 19], [20, 21, 22, 23]]
JOB: dict[str, Any] = {"batch_size": 2, "max_steps": 1, "progress": False}
LORA = LoraConfig(r=2, target_modules=("q_proj", "down_proj"))


class World:
    """Files that ranks read, and what one rank has made of them.

    Attributes:
        ranks: the group.
        rank: the number of this rank.
        folder: the folder of the files, which `write` has written.
    """

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks = ranks
        self.rank = ranks.rank
        self.folder = folder
        self.program = self.compiled()
        self.executor = self.opened("model")
        self.executor.add_adapter("a", LORA)
        self.executor.add_adapter("b", LORA, seed=1)

    def of(self, first: Any, other: Any) -> Any:
        """The first rank has one, the others the other."""
        return other if self.rank else first

    def compiled(self, **options: Any) -> Program:
        given = {"tp": self.ranks.size, "dtype": "float32", "costs": "A10G", **options}
        return compiler.compile_program(self.folder / "model", peft=None, **given)

    def opened(self, model: str, tokenizer: str = "model", **options: Any) -> Executor:
        source = resolve(self.folder / model, weights=True)
        program = self.compiled(**options) if options else self.program
        weights = Checkpoint.open(source, program.base_prefix, program.renamings)
        source = dataclasses.replace(source, directory=self.folder / tokenizer)
        mesh = tp_mesh(self.ranks)
        return compiler.make_executor(program, weights, None, source, "cpu", mesh)

    def finetune(self, rows: Any = ROWS, adapter: str = "new", **options: Any) -> None:
        data = [Example(ids, ids) for ids in rows] if isinstance(rows, list) else rows
        given = {"peft": LORA, **JOB, **options}
        self.executor.finetune(data, adapter, **given)

    def generate(self, prompts: Any = ROWS, adapter: Any = None, **sampling: Any) -> None:
        self.executor.generate(prompts, adapter, **{"max_new_tokens": 2, **sampling})


def write(folder: Path) -> None:
    """Write two models of one configuration, with adapters and data of each."""
    tiny_llama.save(folder / "model")
    tiny_llama.save(folder / "other", seed=1)
    shutil.copytree(folder / "model", folder / "copy")
    tokenizer = json.loads((folder / "other" / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 511, "content": "<x>"})
    (folder / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    executor = compiler.compile(folder / "model", device="cpu")
    for seed, name in enumerate(("one", "two")):
        executor.add_adapter(name, LORA, seed=seed)
        executor.save_adapter(name, folder / name)
    for name, text in (("one", "a b c"), ("two", "d e f")):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")


def _changed_module(world: World) -> None:
    state = {n: t.clone() for n, t in tiny_state(world.folder).items()}
    if world.rank:
        state["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    weights = StateDictCheckpoint(state, world.program.base_prefix)
    compiler.make_executor(world.program, weights, None, None, "cpu", tp_mesh(world.ranks))


def tiny_state(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the model as a module has them."""
    source = resolve(folder / "model", weights=True)
    checkpoint = Checkpoint.open(source, "model")
    return {name: checkpoint._read(name, None) for name in checkpoint.index}


def _random(world: World) -> None:
    weights = RandomWeights(seed=world.rank)
    compiler.make_executor(world.program, weights, None, None, "cpu", tp_mesh(world.ranks))


def _with_options(**changes: Any) -> Callable[[World], None]:
    def run(world: World) -> None:
        options = dataclasses.replace(world.program.options, **(changes if world.rank else {}))
        program = dataclasses.replace(world.program, options=options)
        weights = RandomWeights()
        compiler.make_executor(program, weights, None, None, "cpu", tp_mesh(world.ranks))

    return run


def _refresh(world: World) -> None:
    tensor = world.executor.adapters["b"].tensors[0]
    tensor.add_(float(world.rank))
    try:
        world.executor.refresh_adapter("b")
    finally:
        tensor.sub_(float(world.rank))


def _order(world: World) -> None:
    engine = world.executor.engine(kv_cache_bytes=2**20)
    for index in world.of((0, 1), (1, 0)):
        engine.submit(world.executor.request(ROWS[index], max_new_tokens=1))


def _count(world: World) -> None:
    engine = world.executor.engine(kv_cache_bytes=2**20)
    for index in range(world.of(2, 1)):
        engine.submit(world.executor.request(ROWS[index], max_new_tokens=1))
    engine.step()


def _other_call(world: World) -> None:
    if world.rank:
        world.executor.logits(ROWS)
    else:
        world.executor.add_adapter("c", LORA)


def _resume(world: World) -> None:
    own = world.folder / f"checkpoints-{world.rank}"
    if world.rank:
        own = world.folder / "none"
    world.finetune(adapter="trained", checkpoint_dir=world.folder / "checkpoints-0", max_steps=1)
    world.executor.remove_adapter("trained")
    world.finetune(adapter="trained", checkpoint_dir=own, max_steps=1)


NOT_ON_THREADS = ("versions of libraries",)
"""Ways that are of a whole process."""


def _version(world: World) -> None:
    from pcg.ranks import agreement

    version = agreement.version
    if world.rank:
        agreement.version = lambda name: "0.9"
    try:
        _with_options()(world)
    finally:
        agreement.version = version


WAYS: dict[str, tuple[Callable[[World], None], str]] = {
    # what is compiled and loaded
    "weights of a module": (
        _changed_module,
        "the base's weights, and some differ from rank 0: rank 1 in model.layers.1.mlp.up_proj."
        "weight. Give all ranks the same weights",
    ),
    "weights in files": (
        lambda w: w.opened(w.of("model", "other")),
        "the base's weights, and some differ from rank 0: rank 1 in lm_head.weight, ",
    ),
    "random weights": (_random, "rank 1 in random weights (seed 1, deviation 0.02, not seed 0"),
    "tokenizer": (
        lambda w: w.opened("model", w.of("model", "other")),
        "rank 1 in the tokenizer. Give all ranks the same tokenizer.json",
    ),
    "no tokenizer": (
        lambda w: w.opened("model", w.of("model", "one")),
        "rank 1 in the tokenizer (none), special tokens (none)",
    ),
    "dtype": (
        lambda w: w.opened("model", dtype=w.of("float32", "bfloat16")),
        "dtype ('bfloat16', not 'float32')",
    ),
    "plan": (
        lambda w: w.opened("model", tp_plan=w.of(None, {"mlp.up_proj": "colwise"})),
        "rank 1 in tp_plan ([('mlp.up_proj', 'colwise')], not []), the serving program",
    ),
    "costs": (lambda w: w.opened("model", costs=w.of("A10G", "H100")), "costs (H100, not A10G)"),
    "backend": (_with_options(backend="triton"), "rank 1 in backend ('triton', not 'torch')"),
    "packed weights": (_with_options(packed_weights=False), "packed_weights (False, not True)"),
    "versions of libraries": (_version, "torch (0.9, not "),
    # adapters
    "adapter file": (
        lambda w: w.executor.add_adapter("c", w.folder / w.of("one", "two")),
        "add_adapter('c'), and some differ from rank 0: rank 1 in weights of model.layers.0.",
    ),
    "seed of an adapter": (
        lambda w: w.executor.add_adapter("c", LORA, seed=w.rank),
        "rank 1 in weights of model.layers.0.",
    ),
    "rank of an adapter": (
        lambda w: w.executor.add_adapter("c", dataclasses.replace(LORA, r=w.of(2, 3))),
        "rank 1 in the recipe, weights of model.layers.0.",
    ),
    "adapter that is not there": (
        lambda w: w.executor.add_adapter("c", w.folder / w.of("one", "three")),
        "three is not there; give the directory of a saved adapter",
    ),
    "adapter changed in place": (_refresh, "refresh_adapter('b'), and some differ from rank 0"),
    "number of adapters": (_other_call, "rank 0 add_adapter('c'), rank 1 logits."),
    "adapter removed": (
        lambda w: w.executor.remove_adapter(w.of("a", "b")),
        "rank 0 remove_adapter('a'), rank 1 remove_adapter('b')",
    ),
    # requests
    "prompts": (
        lambda w: w.generate(w.of(ROWS, [[9, *ROWS[0][1:]], *ROWS[1:]])),
        "agree on generate, and some differ from rank 0: rank 1 in the prompts. Give all ranks",
    ),
    "lengths of prompts": (
        lambda w: w.generate(w.of(ROWS[:2], [ROWS[0], ROWS[2]])),
        "rank 1 in the lengths of prompts ([6, 5], not [6, 4]), the prompts",
    ),
    "number of prompts": (
        lambda w: w.generate(ROWS[: w.of(3, 2)]),
        "rank 1 in the number of prompts (2, not 3)",
    ),
    "adapter of a request": (
        lambda w: w.generate(adapter=w.of("a", "b")),
        "rank 1 in the adapters ('b', not 'a')",
    ),
    "sampling": (
        lambda w: w.generate(temperature=w.of(0.5, 1.0), top_k=w.of(3, 4)),
        "rank 1 in temperature (1.0, not 0.5), top_k (4, not 3)",
    ),
    "seed of sampling": (lambda w: w.generate(temperature=1.0, seed=w.rank), "rank 1 in seed ("),
    "tokens of an answer": (
        lambda w: w.generate(max_new_tokens=w.of(2, 3)),
        "rank 1 in max_new_tokens (3, not 2)",
    ),
    "logits": (
        lambda w: w.executor.logits(w.of(ROWS, ROWS[1:])),
        "agree on logits, and some differ from rank 0: rank 1 in the number of prompts (3, not 4)",
    ),
    "limits of an engine": (
        lambda w: w.executor.engine(Limits(tokens=w.of(40, 50)), kv_cache_bytes=2**20),
        "agree on engine, and some differ from rank 0: rank 1 in limits",
    ),
    "memory of an engine": (
        lambda w: w.executor.engine(kv_cache_bytes=w.of(2**20, 2**21)),
        "rank 1 in kv_cache_bytes (2097152, not 1048576)",
    ),
    "order of requests": (_order, "agree on submit, and some differ from rank 0: rank 1 in the l"),
    "number of requests": (_count, "now call: rank 0 submit, rank 1 step."),
    # training
    "training data": (
        lambda w: w.finetune(w.of(ROWS, [ROWS[0], [*ROWS[1][:-1], 9], *ROWS[2:]])),
        "agree on finetune('new'), and some differ from rank 0: rank 1 in the training data (4 ",
    ),
    "training files": (
        lambda w: w.finetune(w.folder / w.of("one.jsonl", "two.jsonl")),
        "rank 1 in the training data (1 example, digest",
    ),
    "training file that is not there": (
        lambda w: w.finetune(w.folder / w.of("one.jsonl", "three.jsonl")),
        "three.jsonl",
    ),
    "evaluation data": (
        lambda w: w.finetune(eval_data=[Example(ROWS[0], ROWS[w.rank][:4] + ROWS[0][4:])]),
        "rank 1 in the evaluation data (1 example, digest",
    ),
    "learning rate": (
        lambda w: w.finetune(learning_rate=w.of(1e-3, 2e-3)),
        "rank 1 in learning_rate (0.002, not 0.001). Give all ranks the same arguments",
    ),
    "steps": (lambda w: w.finetune(max_steps=w.of(1, 2)), "rank 1 in max_steps (2, not 1)"),
    "batch": (lambda w: w.finetune(batch_size=w.of(2, 1)), "rank 1 in batch_size (1, not 2)"),
    "seed of a job": (lambda w: w.finetune(seed=w.rank), "rank 1 in seed (1, not 0)"),
    "optimizer": (
        lambda w: w.finetune(optimizer=w.of("adamw", "adam")),
        "rank 1 in optimizer ('adam', not 'adamw')",
    ),
    "start of a job": (
        lambda w: w.finetune(peft=w.folder / w.of("one", "two")),
        "the start of 'new', and some differ from rank 0: rank 1 in weights of model.layers.0.",
    ),
    "name of a job": (
        lambda w: w.finetune(adapter=w.of("new", "newer")),
        "rank 0 finetune('new'), rank 1 finetune('newer')",
    ),
    "checkpoint": (_resume, "rank 1 in the checkpoint to go on from (none, not step 1)"),
}


def told(world: World, name: str) -> tuple[str, float]:
    """Return what a rank is told of a way to differ, and after how many seconds."""
    began = time.monotonic()
    try:
        WAYS[name][0](world)
    except PcgError as error:
        kind = "" if isinstance(error, ParallelError) else f"{type(error).__name__}: "
        return f"{kind}{error}", time.monotonic() - began
    return "nothing", time.monotonic() - began


def run(folder: str) -> None:
    """Differ in every way over the ranks of one group, and write what this one was told."""
    ranks = join_group(2, torch.device("cpu"))
    world = World(ranks, Path(folder))
    found = {name: told(world, name) for name in WAYS}
    found["agreed"] = (str(float(world.executor.logits(ROWS[0], "a").double().sum())), 0.0)
    (Path(folder) / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
