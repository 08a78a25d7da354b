"""Arguments and results of a trainer: options, data, batches of data, and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pcg.errors import DataError, FinetuneError
from pcg.options import UpdateOptions
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.data.example import IGNORED, ModelSizes
from pcg.runtime.text.chat import ChatTemplate
from pcg.runtime.training.losses import Columns, Loss, Options
from pcg.runtime.training.options import DEFAULT_BATCH_SIZE, check_fields, check_number
from pcg.runtime.training.torch_optimizers import Optimizer
from pcg.units import is_finite, shown
from pcg.value_checks import check_padding


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(UpdateOptions):
    """Options of a trainer.

    Attributes:
        seed: the seed of a new adapter's weights, and of dropout.
        batch_size: sequences per batch; gradients do not depend on batches.
        max_tokens: tokens per batch; may be combined with `batch_size`.
        total_steps: the total number of updates, which AdaLoRA's schedule needs.
        temperature: divisor of the logits in all log-probabilities; 1 equals the log-probabilities
            of requests.
        dropout: apply the recipe's dropout in forward_backward. Without dropout, log-probabilities
            equal those of sampling.
    """

    seed: int = 0
    batch_size: int = DEFAULT_BATCH_SIZE
    max_tokens: int | None = None
    total_steps: int | None = None
    temperature: float = 1.0
    dropout: bool = True

    def __post_init__(self) -> None:
        counts = ("batch_size", "max_tokens", "total_steps")
        check_fields(self, dict.fromkeys(counts, 1), ("dropout",))
        if self.optimizer_options is not None and not isinstance(self.optimizer_options, Mapping):
            raise FinetuneError(
                f"optimizer_options={shown(self.optimizer_options)}; use a dict, such as "
                "{'momentum': 0.9}"
            )
        check_number("temperature", self.temperature, 0.0, True)
        if self.loraplus_lr_ratio is not None:
            check_number("loraplus_lr_ratio", self.loraplus_lr_ratio, 0.0, True)
        self.make_optimizer()

    def make_optimizer(self) -> Optimizer:
        """Return the optimizer with its options; weight decay is 0 by default."""
        kind = Optimizer.of(self.optimizer)
        defaults = {"weight_decay": 0.0} if "weight_decay" in kind.fields else {}
        values = {**defaults, **(self.optimizer_options or {})}
        result = Optimizer.of(self.optimizer, values, self.offload_optimizer)
        return result.with_ratio(self.loraplus_lr_ratio)


@dataclass(frozen=True)
class TrainerArguments(TrainerOptions):
    """Arguments of `Executor.trainer`.

    Attributes:
        name: the adapter's name; an existing adapter is trained further, a missing one is created.
        peft: the recipe of a new adapter, as for `add_adapter`; None for the recipe that the
            program was compiled for under the name, else "lora".
        chat_template: the template that renders the adapter's chats; None for its own, or the
            model's.
        tenant: for a trainer of an engine, the tenant; see `JobArguments`.
    """

    name: str
    peft: object = field(default=None, kw_only=True)
    chat_template: ChatTemplate | None = field(default=None, kw_only=True, repr=False)
    tenant: str = field(default="", kw_only=True)


MOST_TARGETS = 1024
"""The maximum number of targets per token; the head runs once for each."""


if TYPE_CHECKING:
    Ids: TypeAlias = Sequence[int]
    WideIds: TypeAlias = Sequence[Sequence[int]]
    Numbers: TypeAlias = Sequence[float]
    WideNumbers: TypeAlias = Sequence[Sequence[float]]
else:  # the type in messages
    Ids = WideIds = Numbers = WideNumbers = Tensor


@dataclass(frozen=True)
class Datum:
    """A sequence to train on, with numbers for each token, without shifts.

    Values may be lists, tuples, arrays or tensors.

    Attributes:
        tokens: the token ids, [N].
        targets: the target id of each token, [N]: `targets[i]` follows `tokens[: i + 1]`; -100 for
            no target. By default the next token, and no target for the last token. Linear losses
            (cross_entropy and functions) also support K targets per token, [N, K].
        weights: the weight of each target's loss, shaped as `targets`, of either sign; 1 by
            default.
        advantages: the advantage of each target, [N].
        logprobs: the log-probability of each target at the time of sampling or, for dpo, by the
            reference, [N].
        routed_experts: the experts that the first n tokens have to choose, [n, layers, k], as
            `Completion.routed_experts` has them, or [n, layers · k]; -1, and further tokens, are
            left to the routers.
    """

    tokens: Ids
    targets: Ids | WideIds | None = None
    weights: Numbers | WideNumbers | None = None
    advantages: Numbers | None = None
    logprobs: Numbers | None = None
    routed_experts: Tensor | None = None


@dataclass(frozen=True)
class CheckedDatum:
    """A checked datum, with the interface of an example for passes.

    Attributes:
        ids: the token ids.
        targets: the target of each token, -100 for none.
        columns: weights, advantages and sampled log-probabilities; zeros for tokens without target.
        further: for K targets per token, the second, third, … targets, each with its weights.
        is_wide: True for targets of the shape [N, K], also with K = 1.
        routes: the experts that the first tokens have to choose, [n, layers, k], int16, or None.
    """

    ids: Sequence[int]
    targets: Sequence[int]
    columns: tuple[Sequence[float], Sequence[float], Sequence[float]]
    further: Sequence[tuple[Sequence[int], Sequence[float]]] = ()
    is_wide: bool = False
    routes: Tensor | None = field(default=None, compare=False)

    @property
    def predicted(self) -> int:
        """The number of targets."""
        rows = (self.targets, *(targets for targets, _ in self.further))
        return sum(target != IGNORED for row in rows for target in row)

    def further_targets(self, k: int) -> Sequence[int]:
        """Return the k-th target of each token, counted from 0, [N]."""
        return self.further[k - 1][0] if k <= len(self.further) else [IGNORED] * len(self.ids)

    def further_weights(self, k: int) -> Sequence[float]:
        """Return the weights of the k-th targets, [N]."""
        return self.further[k - 1][1] if k <= len(self.further) else [0.0] * len(self.ids)

    def weighted(self, weights: Tensor) -> CheckedDatum:
        """Return the datum with other weights, shaped as its targets: [N] or [N, K]."""
        if not self.is_wide:
            return dataclasses.replace(self, columns=(weights.tolist(), *self.columns[1:]))
        first, *rest = weights.T.tolist()
        further = [(target[0], values) for target, values in zip(self.further, rest, strict=True)]
        return dataclasses.replace(self, columns=(first, *self.columns[1:]), further=further)

    def shaped(self, logprobs: Tensor) -> Tensor:
        """Return log-probabilities, [N] or [N, K or more], in the shape of the targets."""
        if not self.is_wide:
            return logprobs if logprobs.dim() == 1 else logprobs[:, 0]
        return logprobs.view(len(self.ids), -1)[:, : 1 + len(self.further)]


def checked(data: object, loss: Loss, sizes: ModelSizes, virtual: int) -> list[CheckedDatum]:
    """Check data and convert it to lists, with the defaults of a loss.

    Raises:
        DataError: a datum does not fit the model or the loss; names its place.
    """
    if isinstance(data, Datum | str | bytes) or not hasattr(data, "__iter__"):
        raise DataError(f"the data is a {type(data).__name__}; give a list of pcg.Datum")
    checked_data = [
        _checked(datum, f"data[{i}]", loss, sizes, virtual) for i, datum in enumerate(data)
    ]
    if not checked_data:
        raise DataError("there is no datum; give at least one")
    if len(checked_data) % loss.together:
        raise DataError(
            f"loss {loss.name!r} takes {loss.together} data at a time, chosen and rejected in "
            f"turns, and there are {len(checked_data)}; give pairs"
        )
    return checked_data


def _checked(
    given_datum: object, place: str, loss: Loss, sizes: ModelSizes, virtual: int
) -> CheckedDatum:
    if not isinstance(given_datum, Datum):
        raise DataError(f"{place} is a {type(given_datum).__name__}; give a pcg.Datum")
    read = {f.name: _listed(getattr(given_datum, f.name), f"{place}.{f.name}") for f in _FIELDS}
    ids = read["tokens"]
    if not ids:
        raise DataError(f"{place} has no tokens; give at least one")
    most = sizes.max_positions
    if most is not None and len(ids) + virtual > most:
        beside = f" beside {virtual} virtual ones" if virtual else ""
        raise DataError(
            f"{place} has {len(ids)} tokens{beside}, more than the model's {most} positions; "
            "split it"
        )
    for name, values in read.items():
        if values is not None and len(values) != len(ids):
            raise DataError(
                f"{place} has {len(ids)} tokens and {len(values)} {name}; give each token one"
            )
    targets, further = _columns(read["targets"], "targets", place, loss)
    weights, further_weights = _columns(read["weights"], "weights", place, loss)
    is_wide = further is not None
    if is_wide != (further_weights is not None) and weights is not None:
        raise DataError(f"{place} has targets and weights of other shapes; give both [N] or [N, K]")
    if further_weights is not None and len(further_weights) != len(further or ()):
        raise DataError(
            f"{place} has {1 + len(further or ())} targets a token and {1 + len(further_weights)} "
            "weights; give each target one"
        )
    targets = [*ids[1:], IGNORED] if targets is None else targets
    _check_ids(ids, place, sizes.tokens)
    check_padding(ids, place, sizes.padding, DataError)
    fix = "a sequence classifier's targets are numbers of its labels" if sizes.of_labels else _FIX
    for row in (targets, *(further or ())):
        _check_ids(row, f"{place}.targets", sizes.vocabulary, IGNORED, fix)
    for name in ("advantages", "logprobs"):
        _check_numbers(read[name], name, place, loss)
    for row in (weights, *(further_weights or ())):
        _check_numbers(row, "weights", place, loss)
    default = [1.0] * len(ids)
    if loss.skips_zero_advantages:
        default = [float(item != 0) for item in read["advantages"] or ()]
    weights = default if weights is None else weights
    columns = (weights, read["advantages"] or default, read["logprobs"] or default)
    kept = [_counted(column, targets) for column in columns]
    others = further_weights or [default] * len(further or ())
    pairs = [(row, _counted(item, row)) for row, item in zip(further or (), others, strict=True)]
    routes = _routes(given_datum.routed_experts, len(ids), place, sizes)
    datum = CheckedDatum(ids, targets, (kept[0], kept[1], kept[2]), pairs, is_wide, routes)
    if not datum.predicted:
        raise DataError(f"{place} predicts nothing; give at least one of its tokens a target")
    return datum


def _routes(values: Any, tokens: int, place: str, sizes: ModelSizes) -> Tensor | None:
    if values is None:
        return None
    layers, chosen, experts = sizes.routes
    try:
        routes = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{place}.routed_experts is no array of numbers: {error}") from error
    if layers and routes.dim() == 2 and routes.shape[1] == layers * chosen:
        routes = routes.unflatten(1, (layers, chosen))
    shape = list(routes.shape)
    if routes.is_floating_point() or shape[1:] != [layers, chosen] or shape[0] > tokens:
        raise DataError(
            f"{place}.routed_experts has the shape {shape} and dtype {routes.dtype}; give ints "
            f"[n, {layers}, {chosen}] for the first n of {tokens} tokens: the model has {layers} "
            f"layers with experts, of which a token chooses {chosen}"
        )
    if len(routes) and not -1 <= int(routes.min()) <= int(routes.max()) < experts:
        raise DataError(
            f"{place}.routed_experts has numbers outside -1 to {experts - 1}; -1 is the router's "
            "choice, and others are experts"
        )
    return routes.to(torch.int16)


def _counted(numbers: Sequence[Any], targets: Sequence[int]) -> list[float]:
    """Return numbers as floats, 0 for tokens without a target."""
    pairs = zip(numbers, targets, strict=True)
    return [0.0 if target == IGNORED else float(x) for x, target in pairs]


def _columns(
    rows: list[Any] | None, name: str, place: str, loss: Loss
) -> tuple[list[Any] | None, list[list[Any]] | None]:
    """Return the first number of each row, and the others, [K - 1, N]; None for flat numbers."""
    if rows is None or not any(hasattr(row, "__iter__") for row in rows):
        return rows, None
    if not loss.is_linear:
        raise DataError(
            f"{place}.{name} is of the shape [N, K], which linear losses take and loss "
            f"{loss.name!r} does not; give [N]"
        )
    listed = [_listed(row, f"{place}.{name}[{i}]") or [] for i, row in enumerate(rows)]
    widths = sorted({len(row) for row in listed})
    if len(widths) != 1 or not widths[0]:
        raise DataError(f"{place}.{name} has rows of {widths} numbers; give all K of them")
    if widths[0] > MOST_TARGETS:
        raise DataError(
            f"{place}.{name} has {widths[0]} columns; a token has at most {MOST_TARGETS} targets"
        )
    first, *rest = (list(column) for column in zip(*listed, strict=True))
    return first, rest


def _listed(values: Any, place: str) -> list[Any] | None:
    if values is None:
        return None
    listed = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(listed, str | bytes | dict) or not hasattr(listed, "__iter__"):
        raise DataError(f"{place} is a {type(values).__name__}; give a list of numbers")
    return [
        value.item() if hasattr(value, "item") else value for value in listed
    ]  # numbers of numpy


_FIX = "use the model's own tokenizer"


def _check_ids(
    ids: Sequence[Any], place: str, vocabulary: int, ignored: int | None = None, fix: str = _FIX
) -> None:
    for kind in set(map(type, ids)):
        if not issubclass(kind, Integral) or issubclass(kind, bool):
            raise DataError(f"{place} has a {kind.__name__} among its tokens; tokens are ints")
    wrong = [t for t in set(ids) if t != ignored and not 0 <= t < vocabulary]
    if wrong:
        raise DataError(
            f"{place} has the token {shown(wrong[0])}, which the model's vocabulary of "
            f"{vocabulary} does not; {fix}"
        )


def _check_numbers(values: Sequence[Any] | None, name: str, place: str, loss: Loss) -> None:
    if values is None:
        if name in loss.reads:
            raise DataError(f"{place} has no {name}, which loss {loss.name!r} reads; give [N]")
        return
    if name not in loss.reads and not (name == "weights" and loss.reads_weights):
        raise DataError(f"{place} has {name}, which loss {loss.name!r} does not read; leave it out")
    for index, value in enumerate(values):
        if not is_finite(value):
            raise DataError(f"{place}.{name}[{index}] is {shown(value)}; use finite numbers")


_FIELDS = [item for item in dataclasses.fields(Datum) if item.name != "routed_experts"]


def columns_of(data: Sequence[CheckedDatum], device: torch.device) -> Columns:
    """Concatenate the columns of data on a device."""
    weights, advantages, sampled = (
        torch.tensor([x for datum in data for x in datum.columns[i]], dtype=torch.float64)
        for i in range(3)
    )
    most = max(len(datum.further) for datum in data)
    if most:
        others = (
            [x for datum in data for x in datum.further_weights(k)] for k in range(1, most + 1)
        )
        rest = [torch.tensor(column, dtype=torch.float64) for column in others]
        weights = torch.stack([weights, *rest], 1)
    lengths = torch.tensor([len(datum.ids) for datum in data])
    places = torch.repeat_interleave(torch.arange(len(data)), lengths)
    read = [tensor.to(device) for tensor in (weights, advantages, sampled, places)]
    return Columns(read[0], read[1], read[2], read[3], len(data))


@dataclass(frozen=True)
class ScoredBatch:
    """A batch of data, with the loss and its columns."""

    data: Sequence[CheckedDatum]
    loss: Loss
    options: Options
    columns: Columns


def cut(
    data: Sequence[CheckedDatum], together: int, batch_size: int, max_tokens: int | None
) -> list[list[CheckedDatum]]:
    """Cut data into batches, in order.

    Args:
        together: the number of consecutive data in a term of the loss, which stay together.
        batch_size: the maximum number of data in a batch, unless a term has more.
        max_tokens: the maximum number of tokens, unless a term has more; None for no maximum.
    """
    batches: list[list[CheckedDatum]] = []
    tokens = 0
    for begin in range(0, len(data), together):
        group = data[begin : begin + together]
        length = sum(len(datum.ids) for datum in group)
        tokens += length
        is_full = bool(batches) and (
            len(batches[-1]) + together > batch_size
            or (max_tokens is not None and tokens > max_tokens)
        )
        if is_full or not batches:
            batches.append([])
            tokens = length
        batches[-1] += group
    return batches


@dataclass(frozen=True)
class Scored:
    """The result of `forward` and `forward_backward`.

    Attributes:
        loss: the loss, a sum over all data and tokens.
        logprobs: for each datum, the log-probabilities of its targets, [N] or [N, K], in host
            memory; 0 for tokens without a target.
        tokens: number of tokens that went through the model, without virtual tokens.
        targets: number of targets.
        metrics: metrics of a loss graph, by name.
    """

    loss: float
    logprobs: tuple[Tensor, ...]
    tokens: int
    targets: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stepped:
    """The result of `optim_step`.

    Attributes:
        step: the number of updates of the adapter, including this update.
        gradient_norm: the norm of the gradients before clipping.
        tokens: number of tokens in forward_backward since the previous update.
        loss: the sum of the losses since the previous update.
    """

    step: int
    gradient_norm: float
    tokens: int
    loss: float


@dataclass(frozen=True)
class Saved:
    """The result of `save_state` and `load_state`.

    Attributes:
        path: the state's directory.
        step: the number of updates of the adapter.
        notes: the notes kept with the state.
    """

    path: Path
    step: int
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """The result of `snapshot`: a served version of the adapter.

    Attributes:
        version: the version's name and number, `name@number`.
        adapter: the version's adapter, which requests may name even after a replacement.
    """

    version: AdapterVersion
    adapter: Adapter = field(repr=False)
