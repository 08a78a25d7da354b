"""A client of completions and adapters for `soak_kills.py`: every answer is the one of before."""

from __future__ import annotations

import openai
from kills_world import KEY, MODEL, Load, World

PROMPTS = tuple(f"def load_{word}(path):" for word in ("file", "table", "page", "row"))


class InferenceLoad(Load):
    """Asks the base and an adapter, which it also unloads and loads, for greedy texts."""

    def __init__(self, world: World, seed: int, adapter: str) -> None:
        self.name = f"inference-{seed}"
        super().__init__(world, seed)
        self._adapter = adapter
        self._texts: dict[tuple[str, str], str] = {}

    def work(self) -> None:
        with self.world.openai() as client:
            for _ in range(10):
                if self.world.is_over:
                    return
                if self.drawn.random() < 0.2:
                    self._load(client)
                model = self.drawn.choice((MODEL, self._adapter))
                self._complete(client, model, self.drawn.choice(PROMPTS))

    def _load(self, client: openai.OpenAI) -> None:
        """Load the adapter by name, in the place of itself."""
        body = {"lora_name": self._adapter, "lora_path": self._adapter, "load_inplace": True}
        client.post(
            "/load_lora_adapter", body=body, cast_to=str, options={"headers": {"x-api-key": KEY}}
        )
        self.world.acknowledge("adapters loaded")

    def _complete(self, client: openai.OpenAI, model: str, prompt: str) -> None:
        stream = self.drawn.random() < 0.5
        asked = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        if stream:
            parts = list(client.completions.create(**asked, stream=True))
            if not parts[-1].choices or parts[-1].choices[0].finish_reason is None:
                return  # the server went
            text = "".join(part.choices[0].text for part in parts)
        else:
            text = client.completions.create(**asked).choices[0].text
        before = self._texts.setdefault((model, prompt), text)
        self.check(text == before, f"{model} wrote {before!r} to {prompt!r}, and now {text!r}")
        self.world.acknowledge("completions")

    def settle(self) -> bool:
        with self.world.openai() as client:
            for model, prompt in list(self._texts):
                self._complete(client, model, prompt)
        return True
