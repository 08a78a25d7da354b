"""What pcg makes of every causal LM of transformers, for `pcg models --families` and the documents.

`python -m tests.support.model_table` writes the file and its table, in a few minutes.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import pcg
import pcg.compiler as compiler
from pcg.errors import PcgError
from pcg.ir.program.program import short_positions
from pcg.trace.model_config import CAUSES, cause_of
from tests.support import oracle
from tests.support.architectures import CAUSAL_LMS, default_config

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
FILE = Path(pcg.__file__).parent / "trace" / "model_types.json"
BEGIN = "<!-- written by `python -m tests.support.model_table` -->\n"
END = "<!-- end -->\n"
RUNS, EXPLAINS = "runs", "explains"
_WHY = {
    RUNS: "logits and greedy tokens are those of transformers",
    EXPLAINS: "`pcg explain` alone takes it",
    **{cause.name: cause.why for cause in CAUSES},
}
_NEW_TOKENS = 8
_MOST_TOKENS = 4100
_TOLERANCE = 3e-4
"""Of the logits' spread; weights are large, so that tokens out of a window count."""
_BOUND = re.compile(r"window|chunk|position|n_ctx|max_seq|local_att|extent|floor")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


class WrongError(AssertionError):
    """A model that compiles computes something else than transformers."""


def lengths_of(config: Mapping[str, Any]) -> list[int]:
    """24, 61, and lengths beyond the largest bound, and the largest window, up to 4,100 tokens."""
    bounds = {
        name: size
        for name, size in config.items()
        if type(size) is int and 8 < size < _MOST_TOKENS and _BOUND.search(name)
    }
    most = min((config[name] for name in _POSITIONS if config.get(name)), default=2**20)
    most = min(most, short_positions(config) or most)
    windows = [size for name, size in bounds.items() if name not in _POSITIONS]
    lengths = {24, 61, max(bounds.values(), default=0) + 2, 2 * max(windows, default=0) + 2}
    return sorted({min(n, most - _NEW_TOKENS, _MOST_TOKENS) for n in lengths if n > 2})


def outcome(kind: str, lengths: list[int] | None = None) -> str:
    """Return "runs", "explains" or the name of the cause for which a causal LM is refused.

    Args:
        kind: the model type; its default configuration, made small, is compiled from files.
        lengths: numbers of tokens to compare; those of `lengths_of` by default.
    Raises:
        WrongError: it compiles, and its logits or greedy tokens are not those of transformers.
        PcgError: it is refused, and the message names no cause.
    """
    return outcome_of(default_config(kind), lengths)


def outcome_of(config: Mapping[str, Any], lengths: list[int] | None = None) -> str:
    """The same of a configuration of a small model."""
    try:
        pcg.explain(config, None)
    except PcgError as error:
        cause = cause_of(str(error))
        if cause is None:
            raise
        return cause.name
    model = oracle.random_model(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2.5)
    with tempfile.TemporaryDirectory() as folder:
        oracle.save_model(model, Path(folder))
        try:
            executor = compiler.compile(folder)
        except PcgError:
            return EXPLAINS
        for tokens in lengths_of(config) if lengths is None else lengths:
            _compare(model, executor, tokens)
    return RUNS


def _compare(model: Any, executor: Any, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    prompt = torch.randint(3, 128, (tokens,), generator=generator).tolist()
    expected = oracle.logits(model, prompt).double()
    found = executor.logits([prompt])[0].double()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    errors = (found - expected).norm(dim=-1) / spread
    # Rounding sends a token in thousands to another expert; the last tokens are beyond the bounds.
    error = max(float(errors[-_NEW_TOKENS:].max()), float(errors.quantile(0.99)))
    if not error < _TOLERANCE:
        raise WrongError(f"logits of {tokens} tokens are off by {error:.1e}")
    continued = executor.generate(
        [prompt], max_new_tokens=_NEW_TOKENS, temperature=0, ignore_eos=True
    )[0].token_ids
    greedy = oracle.greedy(model, prompt, _NEW_TOKENS)
    if list(continued) != greedy:
        raise WrongError(f"after {tokens} tokens {continued} are generated, and not {greedy}")


def written() -> dict[str, str]:
    """The outcome of each model type, as the file says."""
    outcomes = json.loads(FILE.read_text("utf-8"))["outcomes"]
    return {kind: row["outcome"] for row in outcomes for kind in row["model_types"]}


def rows_of(outcomes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The file's rows."""
    kinds = defaultdict(list)
    for kind, name in sorted(outcomes.items()):
        kinds[name].append(kind)
    return [
        {"outcome": name, "why": why, "model_types": kinds[name]}
        for name, why in _WHY.items()
        if kinds[name]
    ]


def table(outcomes: Mapping[str, str], version: str = transformers.__version__) -> str:
    """The part of the document, of what becomes of each model type."""
    rows = [
        f"| {row['outcome']} | {row['why']} | {', '.join(f'`{t}`' for t in row['model_types'])} |"
        for row in rows_of(outcomes)
    ]
    head = f"| of transformers {version} | | model types |\n|---|---|---|\n"
    return BEGIN + head + "\n".join(rows) + "\n" + END


def write(outcomes: Mapping[str, str], version: str = transformers.__version__) -> None:
    """Write the file, and its table in the document."""
    content = {"transformers": version, "outcomes": rows_of(outcomes)}
    FILE.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    text = DOCUMENT.read_text("utf-8")
    DOCUMENT.write_text(text.replace(_part(text), table(outcomes, version)), "utf-8")


def _part(text: str) -> str:
    return text[text.index(BEGIN) : text.index(END) + len(END)]


if __name__ == "__main__":
    write({kind: outcome(kind, [24]) for kind in CAUSAL_LMS})
