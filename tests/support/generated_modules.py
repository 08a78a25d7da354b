"""Random modifications of small models, each compared with itself: right, refused, or wrong.

    python -m tests.support.generated_modules 1234 1235

A case is drawn from an integer: a family, its configuration, and edits of `EDITS`. The model is
built and edited twice: once for pcg, once for peft, whose adapter closures of the edits may reach.

The module's own forward without a cache is the oracle of logits and tokens; peft's of logits and
gradients with an adapter, in PyTorch's autograd.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import pcg.compiler as compiler
from pcg.errors import CodegenError, IrError, PassError, PcgError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion
from tests.support import attention_edits, module_edits, oracle, structure_edits
from tests.support.edited_model import EDITS, LONGEST, EditedModel, UnfitError
from tests.support.families import BY_NAME, FAMILIES

KINDS = (attention_edits, module_edits, structure_edits)
"""Importing them registers their edits."""
CASES = 2000
"""Cases of the slow run, from seed 0 on."""
POSITIONS = 512
RANK, ALPHA = 3, 6
NEW_TOKENS = 6
RATE = 1e3
"""Of the job's one step: small gradients, too, change a weight by more than its rounding."""
TOLERANCE = 3e-4
"""Relative error of a token's logits; rounding is 1e-5 or less."""
GRADIENT_TOLERANCE = 2e-3
LONGEST_MESSAGE = 400
_INTERNAL = (PassError, IrError, CodegenError)
_WEIGHTED = [name for name, one in EDITS.items() for _ in range(one.weight)]


@dataclass(frozen=True)
class Case:
    """A modified model.

    Attributes:
        seed: what it is drawn from.
        family: the name of the family of the stock model.
        changes: fields of its configuration that are not the family's.
        implementation: of attention.
        edits: the names of the edits, each with the seed of its numbers.
    """

    seed: int
    family: str
    changes: tuple[tuple[str, Any], ...]
    implementation: str
    edits: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        edits = " + ".join(f"{name}({seed})" for name, seed in self.edits)
        changes = ", ".join(f"{key}={value}" for key, value in self.changes)
        return f"seed {self.seed}: {self.family} ({changes}; {self.implementation}): {edits}"


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: "right"; "refused"; "invalid", where the module itself fails or gives no finite
            numbers; or "wrong": other numbers, or an error that names no cause.
        detail: the refusal, or what is wrong.
    """

    kind: str
    detail: str = ""


def draw(seed: int) -> Case:
    """The case of a seed; its first edit goes round all of them."""
    rng = random.Random(seed)
    first = _WEIGHTED[seed * 61 % len(_WEIGHTED)]
    for _ in range(40):
        case = _drawn(rng, seed, first)
        with contextlib.suppress(Exception), torch.no_grad(), edited(case) as (subject, fitting):
            is_finite = all(own_logits(subject.model, [5] * n).isfinite().all() for n in (1, 40, 9))
            if is_finite and fitting and fitting[0][0] == first:
                return replace(case, edits=fitting)
    raise AssertionError(f"{first} fits no family")


def _drawn(rng: random.Random, seed: int, first: str) -> Case:
    fitting = EDITS[first].families
    family = BY_NAME[rng.choice(fitting)] if fitting else rng.choice(FAMILIES)
    layers = rng.choice((2, 2, 3, 3, 4))
    changes: dict[str, Any] = {}
    if family.fields.get("sliding_window"):
        changes["sliding_window"] = rng.choice((rng.randint(1, 300), rng.randint(1, 20)))
    if "max_window_layers" in family.fields:
        changes["max_window_layers"] = rng.randint(0, layers)
    changes["layers"] = layers
    count = rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 2, 3))
    others = [rng.choice(_WEIGHTED) for _ in range(count - 1)]
    edits = tuple((name, rng.randrange(10**6)) for name in (first, *others))
    implementation = rng.choice(("sdpa", "sdpa", "eager"))
    return Case(seed, family.name, tuple(changes.items()), implementation, edits)


@contextlib.contextmanager
def edited(case: Case) -> Iterator[tuple[EditedModel, tuple[tuple[str, int], ...]]]:
    """A case's model, and those of its edits that fit it; what they patch is put back behind."""
    changes = dict(case.changes)
    family = BY_NAME[case.family]
    positions = {"max_position_embeddings", "n_positions", "max_seq_len"} & family.fields.keys()
    changes |= dict.fromkeys(positions, POSITIONS)
    config = family.config(changes.pop("layers"), **changes)
    with contextlib.ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        undo.callback(torch.set_grad_enabled, True)
        model = oracle.random_model(config)
        if model._supports_attention_backend and not getattr(
            model.config, "attn_logit_softcapping", None
        ):
            model.config._attn_implementation = case.implementation
        subject = EditedModel(model, undo)
        fitting = []
        for name, seed in case.edits:
            subject.draw = random.Random(seed)
            torch.manual_seed(seed)
            # An edit that does not fit has not begun, or leaves a model that is as good.
            with contextlib.suppress(UnfitError), torch.no_grad():
                EDITS[name].apply(subject)
                fitting.append((name, seed))
        model.eval()
        yield subject, tuple(fitting)


# -------------------------------------------------------------------------------------- the oracle


def own_logits(model: Any, ids: Sequence[int]) -> Tensor:
    out = model(input_ids=torch.tensor([ids]), use_cache=False)
    logits = out.logits if hasattr(out, "logits") else out[0]
    return logits[0]  # type: ignore[no-any-return]


def sequences_of(case: Case) -> list[list[int]]:
    """Of one token, of few, and beyond every threshold."""
    rng = random.Random(case.seed)
    lengths = (1, rng.randint(2, 24), rng.randint(25, 100), LONGEST)
    return [[rng.randint(3, 99) for _ in range(length)] for length in lengths]


def targets_of(subject: EditedModel, case: Case) -> list[str]:
    """Names of linear modules in the layers, for an adapter."""
    rng = random.Random(case.seed)
    names = {
        path.rpartition(".")[2]
        for path, module in subject.layers.named_modules()
        if type(module) in (nn.Linear, Conv1D)
    }
    usable = sorted(names - subject.unadapted - {"experts", "gate", "router", "second"})
    usable = [name for name in usable if not name.isdigit()]
    return sorted(rng.sample(usable, min(len(usable), rng.randint(1, 4))))


def lora_weight(path: str, shape: Sequence[int]) -> Tensor:
    """The same number in pcg's adapter and in peft's."""
    generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    return 0.1 * torch.randn(*shape, generator=generator)


def wrapped_by_peft(model: Any, targets: Sequence[str]) -> Any:
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(targets), task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(model, config).eval()
    for path, parameter in oracle.lora_parameters(wrapped).items():
        parameter.data.copy_(lora_weight(path, parameter.shape))
    return wrapped


def _is_wrapped_by_peft(case: Case, targets: Sequence[str]) -> bool:
    with edited(case) as (subject, _), torch.no_grad():
        try:
            own_logits(wrapped_by_peft(subject.model, targets).base_model, [5, 6, 7])
        except Exception:  # whatever peft does not take
            return False
    return True


# ----------------------------------------------------------------------------------- what pcg gives


@dataclass
class Given:
    """What a compiled program gives.

    Attributes:
        logits: of each sequence, without and with the adapter.
        completions: of prompts without and with the adapter, by an engine that trains beside them.
        gradients: of the adapter, by its parameters' names; empty without an adapter.
        loss: the sum over all targets.
        update: the gradients by an engine's job: what one step of SGD subtracts, by its rate.
    """

    logits: list[list[Tensor]]
    completions: list[tuple[list[int], bool, Completion]]
    gradients: dict[str, Tensor]
    loss: float
    update: dict[str, Tensor]


def compiled(model: Any, targets: Sequence[str]) -> Executor:
    recipe = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(targets),
    }
    if not targets:
        return compiler.compile(model)
    executor = compiler.compile(model, {"a": recipe, "b": recipe})
    for name in ("a", "b"):
        for path, weights in executor.adapters[name].weights.items():
            weights.a.copy_(lora_weight(f"{path}.lora_A", weights.a.shape))
            weights.b.copy_(lora_weight(f"{path}.lora_B", weights.b.shape))
        executor.refresh_adapter(name)
    return executor


def given_by(executor: Executor, sequences: Sequence[Sequence[int]], has_adapter: bool) -> Given:
    names = [None, "a"] if has_adapter else [None]
    logits = [list(executor.logits(list(sequences), name)) for name in names]
    prompts = [list(sequences[1]), list(sequences[-1][: LONGEST - NEW_TOKENS])]
    asked = [(prompt, name) for prompt in prompts for name in names]
    engine = executor.engine(Limits(tokens=96, least_chunk=8), kv_cache_bytes=2**23)
    order: dict[str, int] = {}
    for place, (prompt, name) in enumerate(asked):
        options: Any = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0}
        request = executor.request(prompt, name, **options)
        order[engine.submit(request)] = place
    examples = [Example(list(s), list(s)) for s in sequences[1:]]
    gradients, update, loss, job = {}, {}, 0.0, None
    if has_adapter:
        runner = executor.training_runner("a")
        loss = runner.forward_backward(examples, runner.count_targets(examples))
        gradients = {
            path: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for path, p in runner.parameters.items()
        }
        job = engine.finetune(
            examples, "b", max_steps=1, batch_size=len(examples), learning_rate=RATE,
            optimizer="sgd", max_grad_norm=None, shuffle=False, weight_decay=0.0,
        )  # fmt: skip
    done: dict[int, Completion] = {}
    while not engine.is_idle:
        for chunk in engine.step():
            if chunk.error is not None:
                raise chunk.error
            if chunk.completion is not None:
                done[order[chunk.request_id]] = chunk.completion
    if job is not None:
        if job.error is not None:
            raise job.error
        for path, weights in executor.adapters["b"].weights.items():
            for kind, now in (("lora_A", weights.a), ("lora_B", weights.b)):
                before = lora_weight(f"{path}.{kind}", now.shape)
                update[f"{path}.{kind}"] = (before - now) / RATE
    completions = [(p, n is not None, done[i]) for i, (p, n) in enumerate(asked)]
    return Given(logits, completions, gradients, loss, update)


# --------------------------------------------------------------------------------- the comparison


def token_error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a token's logits, by their spread around their mean."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.detach().double(), expected.detach().double()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((found - expected).norm(dim=-1) / spread.clamp_min(1e-6)).max())


def _wrong_logits(given: Given, model: Any, sequences: Any, row: int) -> str:
    for found, ids in zip(given.logits[row], sequences, strict=True):
        error = token_error(found, own_logits(model, ids))
        if not error < TOLERANCE:
            return f"logits of {len(ids)} tokens off by {error:.1e}"
    return ""


def _wrong_tokens(given: Given, model: Any, is_adapted: bool) -> str:
    for prompt, with_adapter, completion in given.completions:
        if with_adapter != is_adapted:
            continue
        ids = list(prompt)
        assert completion.logprobs is not None
        for place, token in enumerate(completion.logprobs):
            logits = own_logits(model, ids)[-1].double()
            error = float((logits.log_softmax(-1)[token.token_id] - token.logprob).abs())
            behind = float(logits.max() - logits[token.token_id])
            spread = float((logits - logits.mean()).norm())
            if not max(error, behind) < 10 * TOLERANCE * max(spread, 1.0):
                return (
                    f"token {place} behind a prompt of {len(prompt)} off by {error:.1e}, its logit "
                    f"{behind:.1e} below the greatest"
                )
            ids.append(token.token_id)
    return ""


def _wrong_gradients(given: Given, wrapped: Any, sequences: Any) -> str:
    trained = oracle.lora_parameters(wrapped)
    count = sum(len(s) - 1 for s in sequences)
    total = 0.0
    for ids in sequences:
        logits = own_logits(wrapped.base_model, ids)[:-1]
        loss = nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
        (loss / count).backward()
        total += float(loss)
    if not abs(given.loss - total) < 1e-3 * abs(total):
        return f"loss {given.loss:.6f}, not {total:.6f}"
    expected = {
        path: torch.zeros_like(p) if p.grad is None else p.grad for path, p in trained.items()
    }
    # What no gradient reaches is not among the parameters that are trained.
    unreached = {p: torch.zeros_like(g) for p, g in expected.items() if not g.any()}
    gradients = unreached | given.gradients
    if gradients.keys() != trained.keys():
        return f"gradients of {sorted(given.gradients)}, not {sorted(trained)}"
    largest = max(float(g.norm()) for g in expected.values())
    for what, found in (("gradient", gradients), ("job's step", unreached | given.update)):
        errors = {
            path: float((found[path] - g).norm() / max(float(g.norm()), 1e-3 * largest, 1e-5))
            for path, g in expected.items()
        }
        worst = max(errors, key=lambda path: errors[path])
        if not errors[worst] < GRADIENT_TOLERANCE:
            return f"{what} of {worst} off by {errors[worst]:.1e}"
    return ""


def check(case: Case) -> Outcome:
    """Compile a case's module and compare it with itself."""
    sequences = sequences_of(case)
    with edited(case) as (subject, _):
        model = subject.model
        targets = targets_of(subject, case)
        try:
            with torch.no_grad():
                before = [own_logits(model, ids) for ids in sequences]
        except Exception as error:  # whatever a modified module raises
            return Outcome("invalid", f"the module fails: {type(error).__name__}: {error}")
        if not all(x.dim() == 2 and x.isfinite().all() for x in before):
            return Outcome("invalid", "the module gives no finite logits")
    if not _is_wrapped_by_peft(case, targets):
        targets = []
    with edited(case) as (subject, _):
        model = subject.model
        stage = "compiling"
        try:
            executor = compiled(model, targets)
            torch.set_grad_enabled(True)
            stage = "running"
            given = given_by(executor, sequences, bool(targets))
        except PcgError as error:
            return _refusal(error, stage)
        except Exception as error:  # the failure that is looked for
            return Outcome("wrong", f"{stage} raises {type(error).__name__}: {error}")
        with torch.no_grad():
            wrong = _wrong_logits(given, model, sequences, 0)
            wrong = wrong or _wrong_tokens(given, model, is_adapted=False)
    if wrong or not targets:
        return Outcome("wrong", wrong) if wrong else Outcome("right")
    with edited(case) as (subject, _):
        wrapped = wrapped_by_peft(subject.model, targets)
        with torch.no_grad():
            wrong = _wrong_logits(given, wrapped.base_model, sequences, 1)
            wrong = wrong or _wrong_tokens(given, wrapped.base_model, is_adapted=True)
            wrong = f"with an adapter at {targets}, {wrong}" if wrong else ""
        wrong = wrong or _wrong_gradients(given, wrapped, sequences[1:])
    return Outcome("wrong", wrong) if wrong else Outcome("right")


def _refusal(error: PcgError, stage: str) -> Outcome:
    text = str(error)
    if isinstance(error, _INTERNAL):
        return Outcome("wrong", f"internal {type(error).__name__}: {text}")
    if "\n" in text or len(text) > LONGEST_MESSAGE:
        return Outcome("wrong", f"a message of {len(text)} characters: {text}")
    return Outcome("refused", text if stage == "compiling" else f"while {stage}: {text}")


def minimal(case: Case) -> tuple[Case, Outcome]:
    """The fewest of a case's edits that are wrong."""
    outcome = check(case)
    smaller = [
        *(replace(case, edits=(one,)) for one in case.edits),
        *(
            replace(case, edits=case.edits[:i] + case.edits[i + 1 :])
            for i in range(len(case.edits))
        ),
    ]
    for one in smaller if len(case.edits) > 1 else []:
        found = check(one)
        if found.kind == outcome.kind:
            return one, found
    return case, outcome


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        print(*minimal(draw(seed)), sep="\n")
