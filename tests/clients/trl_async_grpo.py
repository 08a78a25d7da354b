"""TRL's AsyncGRPO on a CPU with a server of pcg as its sampler; prints its log as JSON."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def raises(completions: Any, **_: Any) -> list[float]:
    """Return 1 for a completion that raises something, and a little for each word."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float("raise" in text) + 0.01 * len(text.split()) for text in texts]


def varlen(
    query: Any,
    key: Any,
    value: Any,
    queries: Any,
    keys: Any,
    *_: Any,
    softmax_scale: Any,
    **__: Any,
) -> Any:
    """Attention of sequences one after the other, causal from their ends, [T, heads, size]."""
    import torch

    found = []
    for i in range(len(queries) - 1):
        q, k, v = (
            x[ends[i] : ends[i + 1]].transpose(0, 1)
            for x, ends in ((query, queries), (key, keys), (value, keys))
        )
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        seen = seen.tril(k.shape[1] - q.shape[1])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        found.append(out.transpose(0, 1))
    return torch.cat(found)


def main() -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        async_rollout_worker,
        packing,
    )

    # Which asks for the name of a GPU; where there is none, it reports no utilization.
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    # Which asks for vLLM to be installed; it is a client of it over HTTP alone.
    async_rollout_worker.is_vllm_available = lambda *_, **__: True
    # Whose attention is a kernel of flash-attn 3, for GPUs.
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
    model, output = os.environ["PCG_MODEL"], os.environ["PCG_OUTPUT"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen3_chat_template  # one that TRL can parse replies of
    prompts = [[{"role": "user", "content": text}] for text in ("def main():\n", "try:\n")]
    config = AsyncGRPOConfig(
        output,
        dtype="float32",
        use_cpu=True,
        bf16=False,
        max_steps=3,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=8,
        max_staleness=2,
        max_inflight_tasks=8,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        token_budget=256,
        vllm_server_base_url=os.environ["PCG_URL"],
    )
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=raises,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts * 32}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    print(json.dumps({"steps": trainer.state.global_step, "logs": logs}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
