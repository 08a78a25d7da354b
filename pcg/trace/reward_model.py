"""Reward models: sequence classifiers of transformers that score completions for GRPO.

    rewards = RewardModel("reward-model")
    train_grpo(executor, prompts, rewards)

The score of a completion is the model's only logit for the prompt with the completion, without
further special tokens, as TRL's GRPOTrainer computes it. Chats are rendered by the chat template of
the reward model's tokenizer. The model runs by transformers, and is not trained.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pcg.errors import FinetuneError
from pcg.units import shown


class RewardModel:
    """A reward function by a sequence classifier with a single label.

    Attributes:
        __name__: the name of the metrics: that of the folder or repository.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, device: str = "cpu", batch_size: int = 8
    ) -> None:
        """Load the model and its tokenizer.

        Args:
            model: a folder or a hub id.
            batch_size: completions per forward.
        Raises:
            FinetuneError: it cannot be loaded, has several labels, or its tokenizer has no token
                for padding.
        """
        name = os.fspath(model)
        self.__name__ = os.path.basename(os.path.normpath(name))
        self._device, self._size = torch.device(device), batch_size
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
            loaded = AutoModelForSequenceClassification.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise FinetuneError(
                f"reward model {name} cannot be loaded: {str(error).partition(chr(10))[0]}"
            ) from error
        if loaded.config.num_labels != 1:
            raise FinetuneError(
                f"reward model {name} has {loaded.config.num_labels} labels; a reward model has "
                "one, its score"
            )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token is None:
            raise FinetuneError(
                f"reward model {name}: its tokenizer has neither a token for padding nor one for "
                "the end; set pad_token in its tokenizer_config.json"
            )
        loaded.config.pad_token_id = self._tokenizer.pad_token_id
        self._model: Any = loaded.eval().to(self._device)

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: object
    ) -> list[float]:
        """Return the score of each completion."""
        texts = [
            self._text(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        scores: list[float] = []
        for begin in range(0, len(texts), self._size):
            inputs = self._tokenizer(
                texts[begin : begin + self._size],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            )
            scores += self._model(**inputs.to(self._device)).logits[:, 0].tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if isinstance(prompt, list) and isinstance(completion, list):
            rendered: str = self._tokenizer.apply_chat_template(
                [*prompt, *completion], tokenize=False
            )
            return rendered
        raise FinetuneError(
            f"reward model {self.__name__} reads texts and chats, and a prompt is {shown(prompt)}"
        )
