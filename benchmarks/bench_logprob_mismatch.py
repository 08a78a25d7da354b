"""Measure how far the logprobs of sampled tokens are from those that training gives them.

    python benchmarks/bench_logprob_mismatch.py [--prompts 32] [--new-tokens 64]

An engine samples from an adapter (LoRA, rank 16, all linear modules, updated 8 times) of the model
that ships, at temperature 1, with a request's log-probability of each token; all requests run in
the same steps. Then the trainer of that adapter computes the log-probabilities of the same tokens,
as forward_backward does, in batches of 8 sequences. What differs is what off-policy corrections
see: with x of training and q of sampling

    mismatch    |x - q|                                    of a token
    ratio       exp(x - q)                                 of a token, and of whole outputs
    kl          mean of exp(x - q) - 1 - (x - q)           an estimate of KL(sampler, trainer)

The peer is transformers with peft, with itself: the same tokens by decoding steps over its KV
cache, one sequence at a time, and by one forward of each whole sequence.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import write
from peft import PeftModel
from transformers import AutoModelForCausalLM

import pcg

CHECKPOINT = Path(__file__).parent.parent / "examples" / "checkpoint"
RECIPE = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
UPDATES = 8


def sampled(
    dtype: str, prompts: list[list[int]], new_tokens: int, state: Path
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[int]]]:
    """Return the log-probabilities of outputs by sampling and by training, fp64, and the tokens.

    Args:
        state: where the adapter is saved.
    """
    executor = pcg.compile(CHECKPOINT, dtype=dtype)
    with executor.engine(kv_cache_bytes=2**26).start() as running:
        trainer = running.trainer("mine", peft=RECIPE, seed=0, batch_size=8)
        for _ in range(UPDATES):
            trainer.forward_backward([pcg.Datum(one) for one in prompts])
            trainer.optim_step(learning_rate=1e-3)
        trainer.snapshot().wait()
        streams = [
            running.submit(
                prompt, "mine", temperature=1.0, seed=i, max_new_tokens=new_tokens,
                logprobs=0, ignore_eos=True,
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        done = [stream.wait() for stream in streams]
        rows = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, done, strict=True)]
        scored = trainer.forward([pcg.Datum(row) for row in rows]).wait()
        trainer.save_state(state).wait()
        trainer.close().result()
    by_sampling = [
        torch.tensor([token.logprob for token in one.logprobs or ()], dtype=torch.float64)
        for one in done
    ]
    by_training = [
        values[len(prompt) - 1 : -1].double()
        for prompt, values in zip(prompts, scored.logprobs, strict=True)
    ]
    return by_sampling, by_training, rows


@torch.no_grad()
def by_transformers(
    dtype: str, prompts: list[list[int]], rows: list[list[int]], state: Path
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what transformers gives the same tokens, by decoding and by whole sequences, fp64."""
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=getattr(torch, dtype))
    model = PeftModel.from_pretrained(base, state, autocast_adapter_dtype=False).eval()
    decoded, whole = [], []
    for prompt, row in zip(prompts, rows, strict=True):
        begin = len(prompt)
        logits = model(torch.tensor([row])).logits[0, begin - 1 : -1].float().log_softmax(-1)
        wanted = torch.tensor(row[begin:])[:, None]
        whole.append(logits.gather(1, wanted)[:, 0].double())
        step = model(torch.tensor([prompt]), use_cache=True)
        found = []
        for token in row[begin:]:
            found.append(step.logits[0, -1].float().log_softmax(-1)[token].double())
            step = model(
                torch.tensor([[token]]), past_key_values=step.past_key_values, use_cache=True
            )
        decoded.append(torch.stack(found))
    return decoded, whole


def compared(by_sampling: list[torch.Tensor], by_training: list[torch.Tensor]) -> dict[str, Any]:
    """Return the numbers of the result."""
    differences = [x - q for x, q in zip(by_training, by_sampling, strict=True)]
    flat = torch.cat(differences)
    whole = torch.stack([one.sum() for one in differences])
    return {
        "tokens": len(flat),
        "largest_mismatch": float(flat.abs().max()),
        "mean_mismatch": float(flat.abs().mean()),
        "p99_mismatch": float(flat.abs().quantile(0.99)),
        "largest_token_ratio": float(flat.abs().exp().max()),
        "largest_output_ratio": float(whole.abs().exp().max()),
        "kl": float((flat.exp() - 1 - flat).mean()),
    }


def main() -> None:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vocabulary = json.loads((CHECKPOINT / "config.json").read_text())["vocab_size"]
    lengths = [4 + i % 13 for i in range(arguments.prompts)]
    prompts = [torch.randint(5, vocabulary - 5, (n,)).tolist() for n in lengths]
    result: dict[str, Any] = {"prompts": len(prompts), "new_tokens": arguments.new_tokens}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder) / "state"
            *ours, rows = sampled(dtype, prompts, arguments.new_tokens, state)
            result[dtype] = {
                "pcg": compared(*ours),
                "transformers": compared(*by_transformers(dtype, prompts, rows, state)),
            }
    write("logprob_mismatch", result)


if __name__ == "__main__":
    main()
