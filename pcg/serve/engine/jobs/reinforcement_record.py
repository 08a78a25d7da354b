"""The record of a run of reinforcement: the numbers of its steps, and some of its completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pcg.records.record import RunRecord
from pcg.records.run_files import Status
from pcg.serve.engine.jobs.news import TRAIN_REWARD, VALID_REWARD, JobStep
from pcg.train.grpo.result import Sample

_TWICE = (TRAIN_REWARD, VALID_REWARD)
"""Numbers that the record has by other names."""
_SAMPLED, _LONGEST = 200, 2000
"""Steps of a run that have samples, and at most twice as many, and the characters of their texts:
the page reads them all."""


@contextmanager
def opened(
    folder: str, config: Mapping[str, Any], name: str, told: Sequence[JobStep]
) -> Iterator[RunRecord]:
    """Open the record of a run for a block, with the steps that a checkpoint has.

    Args:
        told: the last of these steps.
    Raises:
        RecordError: it cannot be written.
    """
    done = told[-1].step if told else 0
    with RunRecord(
        folder, config, name=name, kind="grpo", done=done, waits_for_page=False
    ) as record:
        for news in told:
            if news.step > record.last_step:
                add_step(record, news)
        yield record


def add_step(record: RunRecord, news: JobStep, samples: Sequence[Sample] = ()) -> None:
    """Add a step, and completions of it. RecordError: it cannot be written."""
    more = {name: value for name, value in news.more.items() if name not in _TWICE}
    if VALID_REWARD in news.more:
        more["eval_reward"] = news.more[VALID_REWARD]
    record.log(
        news.step,
        loss=news.loss,
        **more,
        learning_rate=news.learning_rate,
        gradient_norm=news.gradient_norm,
        tokens=news.tokens,
        tokens_per_second=round(news.tokens_per_second, 3),
    )
    if samples and news.step % max(1, news.total_steps // _SAMPLED) == 0:
        record.samples(news.step, [_short(one.row) for one in samples])


def _short(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row of samples with its texts cut."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in row.items()
        if name in ("prompt", "completion")
    }
    return {**row, **{name: text[:_LONGEST] for name, text in texts.items()}}


def end_cancelled(record: RunRecord) -> None:
    """End the record of a run that was cancelled."""
    record.end(Status.CANCELLED)
