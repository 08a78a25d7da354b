"""Step results: what a step computed of its sequences, on the device and then on the host."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

from torch import Tensor

from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.sampling.logprobs import Logprobs, TokenLogprobs


@dataclass(slots=True)
class StepResults:
    """The results of a step, for its sequences.

    Attributes:
        tokens: the token after each sequence all of whose tokens ran; `UNDRAWN` where there is
            none.
        logprobs: theirs, for sequences that ask for them.
        prompts: the logprobs of further tokens of prompts, for sequences that ask for these.
    """

    tokens: dict[Sequence, int] = field(default_factory=dict)
    logprobs: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    prompts: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True)
class DrawnTokens:
    """The tokens after sequences, on the device.

    Attributes:
        tokens: [sequences], int64.
        logprobs: those of the sequences that ask for them; None if none does.
    """

    sequences: List[Sequence]
    tokens: Tensor
    logprobs: Logprobs | None = None

    def read(self, results: StepResults) -> None:
        """Wait for the tokens, and add them to a step's results."""
        results.tokens.update(zip(self.sequences, self.tokens.tolist(), strict=True))
        if self.logprobs is not None:
            asking = [one for one in self.sequences if one.request.params.logprobs is not None]
            counts = [one.request.params.logprobs or 0 for one in asking]
            results.logprobs.update(zip(asking, self.logprobs.read(counts), strict=True))
