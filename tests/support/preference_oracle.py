"""Direct preference optimization by transformers, peft and torch.optim, with TRL's formula."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def with_adapter(model: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Peft's model of a directory, with an adapter that is to be trained."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)


Output = tuple[list[int], int, int]


def tokens_of(model: Path, row: dict[str, Any]) -> list[Output]:
    """The tokens of both outputs behind their prompt, and where each begins and ends.

    An output ends with the end of its turn; a template's line break behind that is none of it.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    found = []
    for key in ("chosen", "rejected"):
        prompt, output = row["prompt"], row[key]
        if isinstance(prompt, str):
            before = tokenizer(prompt)["input_ids"]
            ids = [*tokenizer(prompt + output)["input_ids"], tokenizer.eos_token_id]
        else:
            options = {"tokenize": True, "return_dict": False}
            before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **options)
            ids = tokenizer.apply_chat_template([*prompt, *output], **options)
        assert ids[: len(before)] == before
        end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        found.append((ids, len(before), end))
    return found


def sums(wrapped: Any, outputs: Sequence[Output]) -> Tensor:
    """The summed log-probability of each output, [outputs]."""
    found = []
    for ids, begin, end in outputs:
        logits = wrapped(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        values = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
        found.append(values[begin - 1 : end - 1].sum())
    return torch.stack(found)


def train(
    wrapped: Any, model: Path, batches: Sequence[Sequence[dict[str, Any]]], rates: Sequence[float]
) -> list[dict[str, float]]:
    """Take a step of AdamW for each batch of rows; returns TRL's metrics of each."""
    parameters = [one for one in wrapped.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    history = []
    for rows, rate in zip(batches, rates, strict=True):
        outputs = [one for row in rows for one in tokens_of(model, row)]
        with torch.no_grad(), wrapped.disable_adapter():
            reference = sums(wrapped, outputs).view(-1, 2)
        policy = sums(wrapped, outputs).view(-1, 2)
        ratios = policy - reference
        loss = -logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])).mean()
        rewards = 0.1 * ratios.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        history.append(
            {
                "loss": float(loss.detach()),
                "rewards/chosen": float(rewards[:, 0].mean()),
                "rewards/rejected": float(rewards[:, 1].mean()),
                "rewards/margins": float(margins.mean()),
                "rewards/accuracies": float((margins > 0).float().mean()),
                "logps/chosen": float(policy.detach()[:, 0].mean()),
                "logps/rejected": float(policy.detach()[:, 1].mean()),
            }
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return history
