"""Random programs of requests, adapters and jobs on one engine, checked against peft alone.

A program is made from a seed. Requests come between steps with features of all kinds, some are
cancelled, adapters are replaced under those that run, and jobs publish versions of what is served.
Each completion is compared with transformers' model and the version of the adapter that answered,
as peft reads what pcg saved of that version when it was made.
"""

from __future__ import annotations

import copy
import functools
import random
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import transformers

from pcg.errors import GenerationError, PcgError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.requests.request import Chunk, Request
from tests.support import compiled, oracle, toy_tokenizers
from tests.support.expected_tokens import check_completion
from tests.support.families import Family
from tests.support.peft_cases import wrap

VOCABULARY = 512
POSITIONS = 64
"""Of the families' small configurations."""
STEPS = 4_000
TEXTS = ("a", "e", "th", " ", "the", "\n")


def methods(family: Family, base: Any) -> dict[str, peft.PeftConfig]:
    """Return adapters of several methods for a family's model."""
    lora: dict[str, Any] = {
        "target_modules": "all-linear",
        "exclude_modules": list(family.excluded) or None,
        "task_type": "CAUSAL_LM",
    }
    usual = {**lora, "target_modules": list(family.usual_targets), "exclude_modules": None}
    return {
        "lora": peft.LoraConfig(r=4, lora_alpha=8, **lora),
        "dora": peft.LoraConfig(r=3, lora_alpha=5, use_dora=True, **usual),
        "usual": peft.LoraConfig(r=8, use_rslora=True, **usual),
        "prompt": peft.PromptTuningConfig(  # peft looks for these in LLaMA's words alone
            num_virtual_tokens=3,
            token_dim=base.get_input_embeddings().embedding_dim,
            num_layers=2,
            num_attention_heads=1,
            task_type="CAUSAL_LM",
        ),
        "ia3": peft.IA3Config(
            target_modules=list(family.usual_targets), feedforward_modules=[], task_type="CAUSAL_LM"
        ),
    }


@dataclass
class Served:
    """A family's model with adapters, as peft and as pcg have them.

    Attributes:
        versions: directories of what pcg saved, by the version of the adapter.
        made: peft's models of these, once they are needed.
        diverged: versions whose weights a job made so large that logits are no numbers.
        peers: adapters as peft saved them, with which others are replaced.
    """

    base: Any
    executor: Executor
    directory: Path
    peers: list[Path]
    versions: dict[int, Path] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    diverged: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, family: Family, directory: Path, backend: str = "torch") -> Served:
        base = oracle.random_model(family.config(2, vocab_size=VOCABULARY))
        oracle.save_model(base, directory / "model")
        toy_tokenizers.save_chatml(directory / "model")
        executor = compiled.executor(directory / "model", dtype="float32", backend=backend)
        peers = []
        for seed, (name, config) in enumerate(methods(family, base).items()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = wrap(base, config, seed=seed)
                model.save_pretrained(directory / name, save_embedding_layers=False)
            executor.add_adapter(name, str(directory / name))
            peers.append(directory / name)
        served = cls(base, executor, directory, peers)
        served.note_versions()
        return served

    def note_versions(self) -> None:
        """Save every adapter that is served now and was not saved yet."""
        for name, adapter in self.executor.adapters.items():
            if adapter.version not in self.versions and name != "bad":
                path = self.directory / f"version {adapter.version}"
                self.executor.save_adapter(name, path)
                self.versions[adapter.version] = path
                if any(tensor.abs().max() > 1e6 for tensor in adapter.tensors):
                    self.diverged.add(adapter.version)

    def model(self, request: Request) -> Any:
        """Return the model that a request ran on."""
        if request.adapter is None:
            return self.base
        version = request.adapter.version
        if version not in self.made:
            self.made[version] = oracle.load_saved(self.base, self.versions[version])
        return self.made[version]

    @functools.cached_property
    def eos(self) -> list[int]:
        """The tokens that end an output: the configuration's, and the tokenizer's."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.directory / "model")
        return [self.base.config.eos_token_id, tokenizer.eos_token_id]


class RequestProgram:
    """A random program on one engine."""

    def __init__(
        self, served: Served, seed: int, asked: int = 16, jobs: bool = True, is_ahead: bool = False
    ) -> None:
        self.served, self.random = served, random.Random(seed)
        self.left, self.jobs = asked, jobs
        self.requests: dict[int, Request] = {}
        self.cancelled: set[int] = set()
        self.checked: list[str] = []
        self.began: list[str] = []
        drawn, executor = self.random, served.executor
        limits = drawn.choice(
            [None, Limits(tokens=24), Limits(running=3), Limits(tokens=40, running=6)]
        )
        page = bytes_of_page(kv_types(executor.serving.runner.model))
        self.engine: Engine = executor.engine(
            limits,
            kv_cache_bytes=drawn.choice([14, 20, 32, 96]) * page,
            prefix_caching=drawn.random() < 0.8,
        )
        self.engine.device.is_ahead = is_ahead
        self.prompts: list[list[int]] = []

    # ------------------------------------------------------------------------------- requests

    def prompt(self) -> list[int]:
        """Return a prompt that often begins as another one did."""
        drawn = self.random
        length = drawn.choice([1, 2, 5, 15, 16, 17, 30, 33, 44])
        begins = drawn.choice(self.prompts) if self.prompts and drawn.random() < 0.5 else []
        kept = begins[: drawn.randint(0, len(begins))]
        prompt = (kept + [drawn.randrange(3, 500) for _ in range(length)])[:44]
        self.prompts.append(prompt)
        return prompt

    def fields(self) -> dict[str, Any]:
        """Return the keywords of a request, all of which are valid together."""
        drawn = self.random
        fields: dict[str, Any] = {"tenant": drawn.choice(["", "a", "b"])}
        if drawn.random() < 0.12:
            pooling = {"pooling": drawn.choice(["last", "mean"]), "normalize": drawn.random() < 0.5}
            return fields | pooling
        fields |= {"max_new_tokens": drawn.choice([0, 1, 2, 5, 9, 14]), "seed": drawn.randrange(99)}
        fields["ignore_eos"] = drawn.random() < 0.7
        if drawn.random() < 0.55:
            fields["temperature"] = drawn.choice([0.3, 1.0, 1.7])
        some: Mapping[str, list[Any]] = {
            "top_k": [1, 5, 40],
            "top_p": [0.2, 0.9],
            "min_p": [0.05, 0.5],
            "repetition_penalty": [0.7, 1.3],
            "presence_penalty": [-1.0, 1.5],
            "frequency_penalty": [0.5, -2.0],
            "logit_bias": [{5: 4.0, 6: -100.0}, {7: 100.0}],
            "bad_words": [[[7]], [[5, 6], [8]], [[drawn.randrange(500)] for _ in range(40)]],
            "allowed_token_ids": [list(range(5, 60)), [9, 10]],
            "min_tokens": [1, 4],
            "stop": [drawn.choice(TEXTS), list(TEXTS)],
            "stop_token_ids": [list(range(20, 60)), [3]],
            "include_stop_str_in_output": [True],
            "skip_special_tokens": [False],
            "truncate_prompt_tokens": [1, 16, 20],
            "logprobs": [0, 3],
            "prompt_logprobs": [0, 2],
            "echo": [True],
            "cache_salt": ["x"],
            "priority": [-1, 3],
            "guided_regex": ["[a-z ]{3,8}"],
            "timeout_s": [0.02, 30.0],
        }
        for name in drawn.sample(list(some), drawn.choice([0, 1, 2, 4, 7])):
            fields[name] = drawn.choice(some[name])
        fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_new_tokens"])
        if "guided_regex" in fields:
            for name in ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias"):
                fields.pop(name, None)
        if fields["max_new_tokens"] and drawn.random() < 0.3:
            fields["n"] = drawn.choice([2, 3])
            if drawn.random() < 0.4:
                fields["best_of"] = fields["n"] + 1
        return fields

    def submit(self) -> None:
        drawn, executor = self.random, self.served.executor
        adapter = drawn.choice([None, *executor.adapters])
        request = executor.request(self.prompt(), adapter, **self.fields())
        number = self.engine.submitted
        try:
            self.engine.submit(request)
        except GenerationError as error:
            if "places" not in str(error) and "pages" not in str(error):
                raise
            return  # what this engine never has the memory for
        self.requests[number] = request
        self.left -= 1

    # ------------------------------------------------------------------------------- others

    def change(self) -> None:
        """Do something else than to submit: cancel, replace, train, break."""
        drawn, executor = self.random, self.served.executor
        kind = drawn.choice(["cancel", "replace", "train", "diverge", "poison", "remove"])
        trained = {job.name for job in self.engine.jobs}
        names = [name for name in executor.adapters if name not in (*trained, "bad")]
        if kind == "cancel" and self.requests:
            number = drawn.choice(list(self.requests))
            self.cancelled.add(number)
            self.engine.cancel(self.requests[number].named(number))
        elif kind == "replace" and names:
            executor.add_adapter(
                drawn.choice(names), str(drawn.choice(self.served.peers)), replace=True
            )
        elif kind == "remove" and len(names) > 3:
            executor.remove_adapter(drawn.choice(names))
        elif kind in ("train", "diverge") and self.jobs and not trained:
            rows = [[*self.prompt()[:20], 4, 5] for _ in range(3)]
            options = {"max_steps": 3, "batch_size": 2, "publish_every": 1}
            options["learning_rate"] = 1e30 if kind == "diverge" else 0.02
            name = drawn.choice(names or ["fresh"])
            self.engine.finetune([Example(r, r) for r in rows], name, **options)
            self.began.append(kind)
        elif kind == "poison" and "bad" not in executor.adapters:
            recipe = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"}
            adapter = executor.add_adapter("bad", recipe)
            for tensor in adapter.tensors:
                tensor.fill_(drawn.choice([float("nan"), float("inf"), 3e38]))
            executor.refresh_adapter("bad")
        self.served.note_versions()

    def run(self) -> None:
        """Run the program, and check all that comes."""
        for _ in range(STEPS):
            if self.left and self.random.random() < 0.5:
                self.submit()
            if self.left and self.random.random() < 0.15:
                self.change()
            chunks = self.engine.step()
            self.served.note_versions()
            for chunk in chunks:
                self.take(chunk)
            self.engine.check_integrity()
            if not self.left and self.engine.is_idle:
                break
        else:
            raise AssertionError("the program goes on for ever")
        engine = self.engine
        assert engine.pool.free + engine.scheduler.adapters.idle_pages == engine.pool.size

    def take(self, chunk: Chunk) -> None:
        """Check a chunk that ends a continuation."""
        found = chunk.completion
        if found is None:
            return
        request = self.requests[chunk.index]
        self.checked.append(found.finish_reason)
        if request.adapter is not None and request.adapter.name == "bad":
            assert isinstance(chunk.error, PcgError) or not found.token_ids
            return
        if request.adapter is not None and request.adapter.version in self.served.diverged:
            # What a step at a learning rate of 1e30 left: its requests fail, or have any tokens.
            assert found.embedding is None or found.embedding.isfinite().all()
            return
        if chunk.error is not None:
            raise chunk.error
        params = request.params
        if found.finish_reason == "cancelled":
            assert chunk.index in self.cancelled
        if params.best_of is not None and params.best_of > params.n:
            params = copy.copy(params)
            object.__setattr__(params, "seed", None)
            request = copy.copy(request)
            object.__setattr__(request, "params", params)
        model = self.served.model(request)
        if request.pooling is not None and found.embedding is None:
            assert found.finish_reason in ("cancelled", "timed_out")
            return
        if params.of_prompt is not None and found.finish_reason in ("cancelled", "timed_out"):
            return
        check_completion(model, request, found, self.served.eos, found.index)
        if params.guided_regex and found.finish_reason == "stop" and not params.stop:
            text = self.served.executor.tokenizer.decode(found.token_ids)  # type: ignore[union-attr]
            assert re.fullmatch(params.guided_regex, text)
