"""Sampling parameters: how a request's tokens are drawn, and when the output ends."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from pcg.errors import GenerationError
from pcg.keywords import check_names
from pcg.runtime.sampling.guides import Guide, guide_of
from pcg.units import shown
from pcg.value_checks import (
    require_at_most,
    require_bool,
    require_int,
    require_number,
    require_texts,
    require_token_ids,
    require_unicode,
)

MOST_STOP_STRINGS = 128
MOST_STOP_TOKENS = 1_024
MOST_BIASES = 4_096
MOST_CONTINUATIONS = 128
MOST_BAD_WORDS = 1_024
MOST_BAD_TOKENS = 16_384
"""Limit of all bad words' tokens; a text counts twice: with and without a leading space."""
MOST_ALLOWED_TOKENS = 2**18
"""Limit of allowed tokens: the size of the largest vocabularies."""
MOST_CELLS = 2**18
"""Limit of further tokens with log-probabilities over all positions of a prompt."""
LogprobsMode: TypeAlias = Literal["raw_logprobs", "processed_logprobs"]
LONGEST_TEXT = 1_024
"""Maximum characters of a stop string or a bad word, and maximum tokens of a bad word."""


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords: a value, or a list for several prompts."""

    temperature: float | list[float]
    top_k: int | list[int | None] | None
    top_p: float | list[float | None] | None
    min_p: float | list[float | None] | None
    repetition_penalty: float | list[float]
    presence_penalty: float | list[float]
    frequency_penalty: float | list[float]
    logit_bias: Mapping[int, float] | list[Mapping[int, float]]
    bad_words: Sequence[str | Sequence[int]]
    allowed_token_ids: Sequence[int] | None
    seed: int | list[int | None] | None
    max_new_tokens: int | list[int]
    min_tokens: int | list[int]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool | list[bool]
    ignore_eos: bool | list[bool]
    skip_special_tokens: bool | list[bool]
    truncate_prompt_tokens: int | list[int | None] | None
    logprobs: int | list[int | None] | None
    logprobs_mode: LogprobsMode | list[LogprobsMode]
    prompt_logprobs: int | list[int | None] | None
    prompt_targets: Sequence[Sequence[int]]
    prompt_draws: int
    routed_experts: bool | list[bool]
    echo: bool | list[bool]
    n: int
    best_of: int | None
    guided_json: str | Mapping[str, Any] | list[str] | list[Mapping[str, Any]] | None
    guided_json_object: bool | list[bool]
    guided_regex: str | list[str | None] | None
    guided_choice: Sequence[str]
    guided_grammar: str | list[str | None] | None


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the most likely tokens up to this probability, in (0, 1]; None keeps all.
        min_p: keep tokens with at least this probability relative to the most likely token; None
            keeps all.
        repetition_penalty: values above 1 discourage tokens of the prompt and the output; from 0.01
            to 100.
        presence_penalty: subtracted from the logits of generated tokens; from -2 to 2.
        frequency_penalty: subtracted for each occurrence of a token in the output; from -2 to 2.
        logit_bias: numbers from -100 to 100 to add to the logits, by token id.
        bad_words: texts, or sequences of token ids, to exclude from the output.
        allowed_token_ids: the only tokens allowed in the output; None allows all.
        seed: seed of the request's generator; None for a random seed.
        max_new_tokens: maximum number of tokens to generate; 0 to compute only the prompt.
        min_tokens: minimum number of tokens to generate before the output may end.
        stop: strings that end the output, and are not part of it.
        stop_token_ids: tokens that end the output, in addition to the model's end-of-sequence
            tokens.
        include_stop_str_in_output: keep the stop string, or the text of the token that ends the
            output, in the text.
        ignore_eos: continue after an end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        truncate_prompt_tokens: keep only this number of a prompt's last tokens; None keeps all.
        logprobs: return the log-probability of each generated token, and of this number of
            likeliest tokens at its position; None for none. An engine's limits apply.
        logprobs_mode: `raw_logprobs` of the model, or `processed_logprobs` of the distribution that
            the token was drawn from; names as in vLLM.
        prompt_logprobs: the same as `logprobs`, for each token of the prompt except the first.
        prompt_targets: for each token of the prompt except the first, further tokens whose
            log-probabilities are returned, in `top` after the likeliest tokens; below 0 for no
            token, with 0.0.
        prompt_draws: the number of tokens to draw at each of these positions, only by `temperature`
            and `seed`; returned with log-probabilities, in `top` after the targets.
        routed_experts: return the experts that the prompt's and the output's tokens chose in each
            layer, for a replay in training.
        n: the number of continuations of the prompt, which is computed once. With a seed,
            continuation i samples with seed + i.
        best_of: the number of continuations to compute, of which the n with the highest
            log-probability are returned, the best first; None for n.
        echo: start the text with the prompt's text; with `logprobs`, also the default of
            prompt_logprobs.
        guided_json: a JSON schema for the output, a mapping or JSON text. The output is compact
            JSON unless the schema's `x-guidance` has other options.
        guided_json_object: the output is a JSON object.
        guided_regex: a regular expression that matches the whole output.
        guided_choice: the possible texts of the output.
        guided_grammar: a context-free grammar of the output, in Lark's notation or in GBNF.
    Raises:
        GenerationError: a value is out of range or has a wrong type.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[Any, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    max_new_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    prompt_logprobs: int | None = None
    prompt_targets: tuple[tuple[int, ...], ...] = ()
    prompt_draws: int = 0
    routed_experts: bool = False
    echo: bool = False
    n: int = 1
    best_of: int | None = None
    guided_json: str | Mapping[str, Any] | None = None
    guided_json_object: bool = False
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] = ()
    guided_grammar: str | None = None

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0.0, math.inf)
        require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.top_k is not None:
            require_int("top_k", self.top_k, 1, hint="; None keeps all tokens")
        if self.top_p is not None:
            require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        if self.min_p is not None:
            require_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            require_int("seed", self.seed, 0, 2**63 - 1)
        require_int("max_new_tokens", self.max_new_tokens, 0)
        most = f", which is max_new_tokens={shown(self.max_new_tokens)}"
        require_int("min_tokens", self.min_tokens, 0, self.max_new_tokens, most)
        require_texts("stop", self.stop, MOST_STOP_STRINGS, LONGEST_TEXT)
        require_token_ids("stop_token_ids", self.stop_token_ids, MOST_STOP_TOKENS)
        for name in _FLAGS:
            require_bool(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 0, hint="; None returns none")
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise GenerationError(
                f"logprobs_mode={shown(self.logprobs_mode)}; use "
                f"{' or '.join(get_args(LogprobsMode))}; logits are not returned"
            )
        if self.truncate_prompt_tokens is not None:
            hint = "; None keeps the whole prompt"
            require_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, hint=hint)
        require_int("n", self.n, 1, MOST_CONTINUATIONS)
        if self.best_of is not None:
            fewest = f", and not below n={self.n}"
            require_int("best_of", self.best_of, self.n, MOST_CONTINUATIONS, fewest)
        self._check_cells()
        self._check_tokens()
        if self.guide is not None and self.guided_json is not None:
            object.__setattr__(self, "guided_json", self.guide.text)  # nobody changes it later

    def _check_cells(self) -> None:
        require_int("prompt_draws", self.prompt_draws, 0, MOST_CELLS)
        if not isinstance(self.prompt_targets, tuple):
            raise GenerationError(
                "prompt_targets is no tuple; give each place a tuple of token ids"
            )
        cells = 0
        for place, row in enumerate(self.prompt_targets):
            if not isinstance(row, tuple) or set(map(type, row)) - {int}:
                raise GenerationError(f"prompt_targets[{place}]={shown(row)}; use token ids")
            cells += len(row)
        if cells > MOST_CELLS:
            raise GenerationError(f"prompt_targets has {cells} ids; use at most {MOST_CELLS}")
        if (self.prompt_targets or self.prompt_draws) and self.prompt_logprobs is None:
            raise GenerationError(
                "prompt_targets and prompt_draws are of prompt_logprobs; give that, too: 0 does"
            )

    def _check_tokens(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise GenerationError(
                f"logit_bias={shown(self.logit_bias)}; use a mapping from token ids to numbers"
            )
        require_at_most("logit_bias", self.logit_bias, MOST_BIASES, "entries")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # nobody changes it later
        for token, bias in self.logit_bias.items():
            require_int("a token of logit_bias", token, 0)
            require_number(f"logit_bias of token {shown(token)}", bias, -100.0, 100.0)
        if not isinstance(self.bad_words, tuple):
            raise GenerationError(
                f"bad_words={shown(self.bad_words)}; use a tuple of texts, or of tuples of ids"
            )
        texts = [word for word in self.bad_words if isinstance(word, str)]
        require_at_most("bad_words", [*self.bad_words, *texts], MOST_BAD_WORDS, "words")
        for word in self.bad_words:
            if not isinstance(word, str | tuple) or not word:
                raise GenerationError(
                    f"bad_words has {shown(word)}; use texts or tuples of token ids, none empty"
                )
            if isinstance(word, str):
                require_at_most("a text of bad_words", word, LONGEST_TEXT, "characters")
                require_unicode("a text of bad_words", word)
            else:
                require_token_ids("a sequence of bad_words", word, LONGEST_TEXT)
        ids = [token for word in self.bad_words if isinstance(word, tuple) for token in word]
        require_at_most("bad_words", ids, MOST_BAD_TOKENS, "tokens in all words together")
        if self.allowed_token_ids is not None:
            require_token_ids("allowed_token_ids", self.allowed_token_ids, MOST_ALLOWED_TOKENS)
            if not self.allowed_token_ids:
                raise GenerationError("allowed_token_ids is empty; None allows all tokens")

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise a GenerationError for tokens beyond a model's vocabulary."""
        for name, tokens in self._named_tokens():
            most = max(tokens, default=0)
            if most >= vocabulary:
                raise GenerationError(
                    f"{name} has token {shown(most)}; the model's are 0 to {vocabulary - 1}"
                )

    def _named_tokens(self) -> Iterator[tuple[str, Sequence[int]]]:
        yield "stop_token_ids", self.stop_token_ids
        yield "logit_bias", tuple(self.logit_bias)
        yield "allowed_token_ids", self.allowed_token_ids or ()
        words = [word for word in self.bad_words if isinstance(word, tuple)]
        yield "prompt_targets", [token for row in self.prompt_targets for token in row]
        yield "bad_words", [token for word in words for token in word]

    @classmethod
    def of(cls, options: Mapping[str, Any], index: int = 0, count: int = 1) -> "SamplingParams":
        """Return the parameters of prompt `index` of `count` prompts.

        Args:
            options: fields by name; a list has a value for each prompt. Prompt i of several samples
                with seed + i, or with n continuations from seed + i n on.
        Raises:
            GenerationError: a field is unknown, or a value is out of its range.
        """
        check_names(options, [field.name for field in dataclasses.fields(cls)], GenerationError)
        mine = {}
        for name, value in options.items():
            per_prompt = isinstance(value, list) and len(value) == count and name not in _WHOLE
            mine[name] = value[index] if per_prompt else value
        if isinstance(mine.get("stop"), str):
            mine["stop"] = (mine["stop"],)
        for name in _LISTS:
            if isinstance(mine.get(name), list):
                mine[name] = tuple(mine[name])
        if isinstance(mine.get("bad_words"), tuple):
            words = mine["bad_words"]
            mine["bad_words"] = tuple(tuple(w) if isinstance(w, list) else w for w in words)
        if isinstance(mine.get("prompt_targets"), tuple):
            rows = mine["prompt_targets"]
            mine["prompt_targets"] = tuple(tuple(r) if isinstance(r, list) else r for r in rows)
        if isinstance(mine.get("logit_bias"), Mapping):
            mine["logit_bias"] = {_token(key): v for key, v in mine["logit_bias"].items()}
        if type(mine.get("seed")) is int and not isinstance(options["seed"], list):
            # So every continuation of every prompt has a seed of its own.
            width = cls(n=mine.get("n", 1), best_of=mine.get("best_of")).width
            mine["seed"] += index * width
        return cls(**mine)

    @cached_property
    def guide(self) -> Guide | None:
        """The guide of the output; None without."""
        return guide_of(
            self.guided_json,
            self.guided_json_object,
            self.guided_regex,
            self.guided_choice,
            self.guided_grammar,
        )

    @property
    def width(self) -> int:
        """The number of continuations to compute."""
        return self.n if self.best_of is None else self.best_of

    @property
    def of_tokens(self) -> int | None:
        """The number of likeliest tokens to find for each generated token; None for no logprobs."""
        return 0 if self.logprobs is None and self.width > self.n else self.logprobs

    @property
    def of_prompt(self) -> int | None:
        """The number of likeliest tokens to return for each of the prompt; None for nothing."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


_FLAGS = (
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "routed_experts"),
    "echo",
)
_LISTS = (
    *("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "guided_choice"),
    "prompt_targets",
)
_WHOLE = (*_LISTS, "n", "best_of")
"""Fields with a common value for all prompts."""


def _token(key: object) -> object:
    """Return the token that a key of `logit_bias` names; in JSON and in shells keys are texts."""
    is_number = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
    return int(key) if is_number else key  # type: ignore[call-overload]
