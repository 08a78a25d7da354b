"""lm-eval's tasks on an executor's base and adapters, in this process (pip install 'pcg[lm-eval]').

    results = evaluate_tasks(executor, ["hellaswag"], adapter="mine")

The class is that of `lm_eval.simple_evaluate(model=ExecutorLM(executor))`. Its tokens are those of
lm-eval's model `hf`: a text has the tokenizer's special tokens, and an empty context is the bos, or
the eos without a bos.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pcg.errors import GenerationError
from pcg.runtime.executor import Executor

_LOT = 64
"""Number of prompts per call of the executor."""
_MOST = 2048
"""The most tokens of a window of a model without a bound of positions, as of lm-eval's `hf`."""
_NEW = 256
"""The most generated tokens of a task that does not say, as of lm-eval's `hf`."""


class ExecutorLM(TemplateLM):  # type: ignore[misc]  # lm-eval is untyped
    """A base, or an adapter, as a model of lm-eval.

    Args:
        adapter: the adapter's name; None for the base.
    """

    def __init__(self, executor: Executor, adapter: str | None = None) -> None:
        super().__init__()
        if executor.tokenizer is None or executor.tokenizer.eos_id is None:
            raise GenerationError("lm-eval needs a tokenizer with an eos token")
        self._executor, self._adapter = executor, adapter
        self._tokenizer = executor.tokenizer
        self.max_length = executor.state.max_positions or _MOST

    @property
    def eot_token_id(self) -> int:
        eos_id = self._tokenizer.eos_id
        assert eos_id is not None
        return eos_id

    @property
    def prefix_token_id(self) -> int:
        bos_id = self._tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the tokens of a text; special tokens are not repeated."""
        if add_special_tokens is None:
            prefix = self._tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        results = []
        for begin in range(0, len(requests), _LOT):
            lot = requests[begin : begin + _LOT]
            prompts = [[*context, *ending][-self.max_length :] for _, context, ending in lot]
            names = [self._adapter] * len(lot)
            completions: list[Any] = self._executor.generate(
                prompts, names, max_new_tokens=0, prompt_logprobs=0
            )
            for (_, _, ending), completion in zip(lot, completions, strict=True):
                scored = completion.prompt_logprobs[1:][-len(ending) :]
                total = float(sum(each.logprob for each in scored))
                results.append((total, all(each.rank == 1 for each in scored)))
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows of the model's positions."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,  # the last token is scored, too
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to a text of the task's `until`."""
        texts = []
        for request in requests:
            context, settings = request.args
            new = int(settings.get("max_gen_toks", settings.get("max_tokens", _NEW)))
            until = settings.get("until") or []
            samples = (
                bool(settings.get("do_sample")) and float(settings.get("temperature", 1.0)) > 0
            )
            prompt = self.tok_encode(context)[-(self.max_length - new) :]
            (completion,) = self._executor.generate(
                [prompt],
                [self._adapter],
                max_new_tokens=new,
                stop=tuple([until] if isinstance(until, str) else until),
                temperature=float(settings.get("temperature", 1.0)) if samples else 0.0,
                top_p=settings.get("top_p") if samples else None,
            )
            texts.append(completion.text)
        return texts


def evaluate_tasks(
    executor: Executor,
    tasks: Sequence[str],
    adapter: str | None = None,
    *,
    include_path: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, Any]:
    """Return lm-eval's results of tasks: the metrics by task.

    Args:
        tasks: names of tasks, or YAML files.
        include_path: a folder with further tasks.
        limit: the number of documents of a task; None for all.
        num_fewshot: the number of examples in a context; None for the task's.
    """
    results = lm_eval.simple_evaluate(
        model=ExecutorLM(executor, adapter),
        tasks=[*tasks],
        task_manager=TaskManager(include_path=include_path),
        limit=limit,
        num_fewshot=num_fewshot,
        bootstrap_iters=0,
    )
    metrics: dict[str, Any] = results["results"]
    return metrics
