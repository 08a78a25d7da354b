"""Pretrain the small Llama of `examples/checkpoint/` on Python's own standard library.

    python examples/pretrain.py --minutes 50 --out examples/checkpoint

The checkpoint is real, not random: adapters on it learn the tasks of `signature_tasks.py`, its
samples read as Python, and its weights fit in git. One CPU core trains it in under an hour.

The learning rate follows the time that is spent, so any `--minutes` ends with a finished schedule.
With p = (training seconds so far) / (60 * minutes):

    lr(p) = PEAK_LR * p / WARMUP                                          p <  WARMUP
    lr(p) = PEAK_LR * (FLOOR + (1 - FLOOR) * (1 + cos(pi * q)) / 2)       p >= WARMUP,
            q = (p - WARMUP) / (1 - WARMUP)

Batches depend on the seed and the step number alone. How many steps fit in the time depends on the
machine, so two runs see the same data in the same order but do not stop at the same step.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from stdlib_corpus import SourceFile, read_stdlib
from stdlib_tokens import (
    END,
    MAX_LENGTH,
    VOCAB_SIZE,
    pack,
    split_some_spaces,
    train_tokenizer,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SEED = 0
TOKENS_PER_STEP = 2048
# Short windows first: 2490 against 1900 tokens/s in the log of the shipped run. The long ones last,
# so that every position up to MAX_LENGTH is trained.
SHORT_LENGTH, SHORT_SHARE = 256, 0.7
PEAK_LR, WARMUP, FLOOR = 3e-3, 0.02, 0.03
WEIGHT_DECAY, BETAS, CLIP_NORM = 0.1, (0.9, 0.98), 1.0
STATE_EVERY_S = 300

PROMPTS = ("class TestQueue(unittest.TestCase):\n    def ", "def parse_args(")


@dataclass
class Progress:
    """The progress of a run, which `--state` stores beside the weights and the optimizer."""

    step: int = 0
    seconds: float = 0.0


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model: 3.15M parameters, tied embeddings, 4 query and 2 KV heads."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    return LlamaForCausalLM(config)


def batch_at(ids: np.ndarray, step: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one step, both [TOKENS_PER_STEP / length, length], int64.

    Each pass over the data cuts it at a new offset and shuffles the windows anew.
    """
    per_step = TOKENS_PER_STEP // length
    steps_per_epoch = (len(ids) - 1 - length) // length // per_step
    epoch, index = divmod(step, steps_per_epoch)
    rng = np.random.default_rng((SEED, epoch, length))
    offset = rng.integers(length)
    order = rng.permutation(steps_per_epoch * per_step)
    starts = offset + length * order[index * per_step : (index + 1) * per_step]
    windows = torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts]).astype(np.int64))
    return windows[:, :-1], windows[:, 1:]


def learning_rate(progress: float) -> float:
    """Return the learning rate of the module's docstring; progress is p, 0 to 1."""
    if progress < WARMUP:
        return PEAK_LR * progress / WARMUP
    q = min(1.0, (progress - WARMUP) / (1 - WARMUP))
    return PEAK_LR * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * q)) / 2)


def next_token_loss(
    model: LlamaForCausalLM, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Return the cross-entropy in nats. x, y: [batch, length], int64."""
    logits = model(x, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction=reduction)


@torch.inference_mode()
def held_out_nats(model: LlamaForCausalLM, ids: np.ndarray) -> tuple[float, int]:
    """Return the summed loss over every token of the packed held-out files, and their number.

    Windows of MAX_LENGTH do not overlap, so a window's first tokens have little context.
    """
    tokens = torch.from_numpy(ids.astype(np.int64))
    total = 0.0
    for start in range(0, len(tokens) - 1, MAX_LENGTH):
        window = tokens[start : start + MAX_LENGTH + 1]
        total += next_token_loss(model, window[None, :-1], window[None, 1:], "sum").item()
    return total, len(tokens) - 1


@torch.inference_mode()
def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Return the prompt and 120 sampled tokens, at temperature 0.7 and seed SEED."""
    torch.manual_seed(SEED)
    inputs = tokenizer(END + prompt, return_tensors="pt")
    out = model.generate(
        **inputs, max_new_tokens=120, do_sample=True, temperature=0.7, top_k=0, top_p=0.95
    )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def save_checkpoint(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    held_out: list[SourceFile],
    record: dict[str, object],
    out: Path,
) -> dict[str, object]:
    """Write the bfloat16 checkpoint, read it back, and record the score of the written weights."""
    rounded = LlamaForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)

    shipped_tokenizer = AutoTokenizer.from_pretrained(out)
    shipped = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    nats, tokens = held_out_nats(shipped, pack(held_out, shipped_tokenizer))
    size_bytes = sum(len(file.text.encode()) for file in held_out)
    record = {
        "held_out_loss_nats_per_token": round(nats / tokens, 4),
        "held_out_bits_per_byte": round(nats / math.log(2) / size_bytes, 4),
        "held_out_files": len(held_out),
        "held_out_tokens": tokens,
        "held_out_bytes": size_bytes,
        "parameters": sum(p.numel() for p in shipped.parameters()),
        "model_size_bytes": (out / "model.safetensors").stat().st_size,
        **record,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    samples = [sample(shipped, shipped_tokenizer, prompt) for prompt in PROMPTS]
    (out / "README.md").write_text(model_card(record, samples))
    return record


def model_card(record: dict[str, object], samples: list[str]) -> str:
    """Return the text of the checkpoint's README."""
    shown = "\n\n".join(f"```\n{text}\n```" for text in samples)
    return f"""---
license: psf-2.0
library_name: transformers
pipeline_tag: text-generation
---
# A {record["parameters"]:,}-parameter Llama that writes Python

Made by `examples/pretrain.py` from the source of the standard library of Python
{record["python"]}, for the examples and tests of pcg. It knows the shape of Python and of the
standard library's tests; it is of no use as a coding assistant.

| | |
|---|---|
| held-out loss | {record["held_out_loss_nats_per_token"]} nats/token |
| held-out bits per byte | {record["held_out_bits_per_byte"]} |
| held-out files | {record["held_out_files"]} ({record["held_out_tokens"]:,} tokens) |
| training files | {record["training_files"]} ({record["training_tokens"]:,} tokens) |
| tokens seen | {record["tokens_seen"]:,} in {record["wall_minutes"]} minutes on one core |
| weights | bfloat16, {record["model_size_bytes"]:,} bytes |
| context | {MAX_LENGTH} tokens |

The loss is that of the bfloat16 weights in this folder, run in float32, over all tokens of files
that no step saw (`examples/stdlib_corpus.py` has the rule). Documents begin and end with
`{END}`; the tokenizer adds no token by itself. `training.json` has every number.

Samples (temperature 0.7, top-p 0.95, seed {SEED}, not chosen):

{shown}
"""


def save_state(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Store all that a restart needs. The rename makes a kill during the write harmless."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **vars(progress)}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_state(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore the state that `save_state` wrote."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(state["step"], state["seconds"])


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """Return AdamW; the norms' scales do not decay."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim != 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0}],
        lr=PEAK_LR,
        betas=BETAS,
        fused=True,
    )


def describe(progress: Progress, args: argparse.Namespace) -> dict[str, object]:
    """Return the facts of the run that `training.json` records."""
    tokens_seen = progress.step * TOKENS_PER_STEP
    return {
        "tokens_seen": tokens_seen,
        "steps": progress.step,
        "wall_minutes": round(progress.seconds / 60, 1),
        "planned_minutes": args.minutes,
        "tokens_per_s": round(tokens_seen / progress.seconds),
        "seed": SEED,
        "tokens_per_step": TOKENS_PER_STEP,
        "sequence_lengths": [SHORT_LENGTH, MAX_LENGTH],
        "short_sequence_share": SHORT_SHARE,
        "optimizer": "AdamW",
        "peak_lr": PEAK_LR,
        "warmup_share": WARMUP,
        "final_lr_share": FLOOR,
        "weight_decay": WEIGHT_DECAY,
        "betas": list(BETAS),
        "clip_norm": CLIP_NORM,
        "threads": args.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def train(
    model: LlamaForCausalLM,
    ids: np.ndarray,
    args: argparse.Namespace,
    save: Callable[[Progress], None],
) -> None:
    """Train until the time is spent. `save(progress)` writes a checkpoint."""
    optimizer = build_optimizer(model)
    progress = Progress()
    if args.state and args.state.exists():
        progress = load_state(args.state, model, optimizer)
    budget_s = 60 * args.minutes
    early_s = 60 * args.early_minutes if args.early_minutes else math.inf
    early_s = math.inf if progress.seconds >= early_s else early_s
    state_at_s = progress.seconds + STATE_EVERY_S
    model.train()
    while progress.seconds < budget_s:
        began = time.perf_counter()
        share = progress.seconds / budget_s
        length = SHORT_LENGTH if share < SHORT_SHARE else MAX_LENGTH
        lr = learning_rate(share)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = next_token_loss(model, *batch_at(ids, progress.step, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        step_s = time.perf_counter() - began
        progress.step += 1
        progress.seconds += step_s
        if progress.step % args.log_every == 0:
            print(
                f"step {progress.step:6d}  {progress.seconds / 60:5.1f} min  length {length:4d}  "
                f"lr {lr:.2e}  loss {loss.item():.3f}  {TOKENS_PER_STEP / step_s:.0f} tokens/s",
                flush=True,
            )
        if progress.seconds >= early_s:
            early_s = math.inf
            save(progress)
        if args.state and progress.seconds >= state_at_s:
            state_at_s = progress.seconds + STATE_EVERY_S
            save_state(args.state, model, optimizer, progress)
    save(progress)


def main() -> None:
    """Read the corpus, train the tokenizer and the model, write the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=50.0, help="time to train")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--early-minutes", type=float, help="also save once, after this time")
    parser.add_argument(
        "--state", type=Path, help="file to continue from, written every five minutes"
    )
    parser.add_argument("--log-every", type=int, default=50, metavar="STEPS")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)

    files = read_stdlib()
    held_out = [file for file in files if file.held_out]
    training = [file for file in files if not file.held_out]
    rng = np.random.default_rng(SEED)
    training = [training[i] for i in rng.permutation(len(training))]
    tokenizer = train_tokenizer(training)
    packed = pack(training, tokenizer)
    print(f"{len(training)} files, {len(packed):,} tokens to train on; {len(held_out)} held out")

    model = build_model(tokenizer)

    def save(progress: Progress) -> None:
        data = {"training_files": len(training), "training_tokens": len(packed)}
        run = data | describe(progress, args)
        print(json.dumps(save_checkpoint(model, tokenizer, held_out, run, args.out)), flush=True)

    train(model, split_some_spaces(packed, tokenizer, rng), args, save)


if __name__ == "__main__":
    main()
