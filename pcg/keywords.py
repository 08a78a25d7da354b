"""Functions with the fields of a dataclass as keywords, typed and documented in the dataclass.

    @dataclass(frozen=True)
    class SaveArguments(SaveOptions):
        path: str

    @takes(SaveArguments)
    def save(arguments: SaveArguments) -> None: ...

is called as `save("model", sharded=True)`. It has the signature of the dataclass's constructor,
which type checkers, `help` and editors see. The error for an unknown keyword suggests the closest
field.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from pcg.errors import PcgError, UnsupportedError

Fields = ParamSpec("Fields")
Self = TypeVar("Self")
Result = TypeVar("Result")
Arguments = TypeVar("Arguments", covariant=True)


class Decorator(Protocol[Arguments, Fields]):
    """Replaces a function's dataclass parameter by the dataclass's fields."""

    @overload
    def __call__(self, function: Callable[[Arguments], Result]) -> Callable[Fields, Result]: ...
    @overload
    def __call__(
        self, function: Callable[[Self, Arguments], Result]
    ) -> Callable[Concatenate[Self, Fields], Result]: ...


def takes(
    arguments: Callable[Fields, Arguments], error: type[PcgError] = UnsupportedError
) -> Decorator[Arguments, Fields]:
    """Let a function or a method accept the fields of a dataclass and receive an instance.

    Args:
        arguments: the dataclass; its docstring documents the fields under `Attributes`.
        error: the class of the error for an unknown keyword.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        wrapped_signature = inspect.signature(function)
        fields = inspect.signature(arguments)
        before = list(wrapped_signature.parameters.values())[:-1]  # `self` of a method

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            check_names(keywords, fields.parameters, error)
            bound = fields.bind(*args[len(before) :], **keywords)
            return function(*args[: len(before)], arguments(*bound.args, **bound.kwargs))

        signature = fields.replace(
            parameters=[*before, *fields.parameters.values()],
            return_annotation=wrapped_signature.return_annotation,
        )
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _with_args(function.__doc__ or "", field_docs(arguments))
        return call

    return decorate


def check_names(
    names: Iterable[str], known: Iterable[str], error: type[PcgError] = UnsupportedError
) -> None:
    """Refuse an unknown name with an error that suggests our name, or the closest known name."""
    known = list(known)
    for name in names:
        if name not in known:
            ours, sentence = name_here(name, known)
            if ours or sentence:
                hint = f"the name here is {ours!r}" if ours else sentence
                raise error(f"unknown option {name!r}; {hint}")
            close = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ";"
            raise error(f"unknown option {name!r}{hint} the options are {', '.join(known)}")


NAMES: Mapping[str, str] = {
    # models and ranks
    "model": "model_name_or_path base_model model_name model_id pretrained_model_name_or_path",
    "dtype": "torch_dtype precision",
    "quantization": "quantization_config quant_method quantization_method",
    "attention": "attn_implementation attention_backend flash_attn",
    "device": "device_map",
    "tp": "tensor_parallel_size tensor_parallel tp_size",
    "pp": "pipeline_parallel_size pp_size",
    "dp": "data_parallel_size dp_size",
    "cp": "context_parallel_size decode_context_parallel_size cp_size",
    # adapters
    "peft": "peft_config peft_method peft_type finetuning_type",
    "r": "lora_r lora_rank",
    "target_modules": "lora_target lora_target_modules",
    "start_from": "adapter_name_or_path lora_model_dir",
    "output": "output_dir save_path",
    "overwrite": "overwrite_output_dir",
    # training
    "learning_rate": "lr",
    "epochs": "num_train_epochs num_epochs n_epochs",
    "num_train_epochs": "epochs num_epochs n_epochs",
    "max_steps": "max_train_steps num_steps",
    "batch_size": "per_device_train_batch_size train_batch_size micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation grad_accumulation_steps grad_accum",
    "optimizer": "optim",
    "optimizer_options": "optim_args optimizer_kwargs",
    "schedule": "lr_scheduler_type lr_scheduler lr_schedule scheduler",
    "lr_scheduler_type": "schedule lr_scheduler lr_schedule scheduler",
    "warmup_steps": "num_warmup_steps lr_warmup_steps",
    "betas": "adam_beta1 adam_beta2",
    "eps": "adam_epsilon adam_eps",
    "adam_epsilon": "eps adam_eps",
    "max_grad_norm": "grad_clip gradient_clipping gradient_clip_val clip_grad_norm",
    "max_length": "max_seq_length max_seq_len cutoff_len sequence_len model_max_length block_size",
    "chat_template": "chat_template_path template",
    "probabilities": "interleave_probs interleave_probabilities sampling_weights data_weights",
    "stopping_strategy": "mix_strategy",
    "data": "train_dataset dataset dataset_name train_file train_data train_data_path datasets",
    "eval_data": "eval_dataset validation_file validation_data val_data test_dataset",
    "eval_every": "eval_steps",
    "eval_at_start": "eval_on_start",
    "patience": "early_stopping_patience early_stopping",
    "min_delta": "early_stopping_threshold",
    "restore_best": "load_best_model_at_end",
    "save_every": "save_steps",
    "keep_last": "save_total_limit",
    "resume": "resume_from_checkpoint",
    "log_every": "logging_steps",
    "record": "logging_dir",
    "rewards": "reward_funcs reward_functions",
    # sampling
    "max_new_tokens": "max_tokens max_completion_tokens max_length max_gen_len",
    "max_completion_length": "max_new_tokens max_tokens max_completion_tokens",
    "min_tokens": "min_new_tokens min_length",
    "stop": "stop_strings stop_sequences",
    "n": "num_return_sequences",
    "guided_json": "json_schema response_format structured_outputs",
    "adapter": "lora_request adapter_name lora",
    # serving
    "max_model_len": "max_seq_len context_length max_context_len",
    "max_num_seqs": "max_batch_size max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size max_prefill_tokens",
    "gpu_memory_utilization": "mem_fraction_static",
    "lora_modules": "lora_paths adapter adapters",
}
"""Names of options, and the names for the same option in TRL, peft, transformers, LLaMA-Factory,
axolotl, vLLM and SGLang."""
_RECIPE = 'give peft a recipe, such as {"peft_type": "LORA", "r": 8, "lora_alpha": 16}'
_STEPS = "eval_every and save_every are numbers of steps, by default those of an epoch"
SENTENCES: Mapping[str, str] = {
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_quant_type"), "give quantization nf4"),
    "load_in_8bit": "give quantization int8",
    "bf16": "give dtype bfloat16",
    "fp16": "give dtype float16",
    "do_sample": "a temperature above 0 samples; 0 takes the most likely token",
    "num_beams": "there is no beam search; n and best_of draw several outputs",
    "gradient_checkpointing": "memory_budget bounds what is kept for the backward pass",
    **dict.fromkeys(
        ("packing", "group_by_length"), "batches have no padding; max_tokens bounds their tokens"
    ),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss", "train_on_inputs", "mask_prompt"),
        "only completions and the assistant's messages are learned",
    ),
    **dict.fromkeys(
        ("lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "r", "use_dora"),
        _RECIPE,
    ),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy"), _STEPS
    ),
    "callbacks": "they are objects, for executor.finetune in Python",
    "formatting_func": "it is a function, for executor.finetune in Python; columns renames columns",
    "dataset_text_field": "give columns text=NAME",
    "enable_lora": "adapters need no switch; name them with lora_modules",
}
"""Options of other libraries without an option here, and the way to their effect."""


def name_here(name: str, known: Iterable[str]) -> tuple[str, str]:
    """Return the name among `known` of another library's option, else a sentence; else "" twice."""
    names = [ours for ours in known if name in NAMES.get(ours, "").split()]
    return (names[0], "") if names else ("", SENTENCES.get(name, ""))


@functools.cache
def field_docs(owner: Any) -> Mapping[str, str]:
    """Return the documentation of each field, from the docstrings of a dataclass and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(inspect.getmro(owner)):
        docs |= _entries(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
    return {name: docs[name] for name in inspect.signature(owner).parameters if name in docs}


_ENTRY = re.compile(r"^    (\w[\w, ]*): ((?:.+\n?)(?:^ {5,}.+\n?)*)", re.MULTILINE)


def _entries(docstring: str) -> dict[str, str]:
    _, _, section = docstring.partition("Attributes:\n")
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    entries: dict[str, str] = {}
    for match in _ENTRY.finditer(section):
        text = " ".join(match[2].split())
        entries |= dict.fromkeys(re.split(r",\s*", match[1]), text)
    return entries


def _with_args(docstring: str, docs: Mapping[str, str]) -> str:
    """Add the fields as section `Args` before the other sections of a docstring."""
    text = inspect.cleandoc(docstring)
    lines = "\n".join(["Args:", *(f"    {name}: {doc}" for name, doc in docs.items())])
    match = re.search(r"^(Returns|Raises|Yields):$", text, re.MULTILINE)
    if match is None:
        return f"{text}\n\n{lines}\n"
    return f"{text[: match.start()].rstrip()}\n\n{lines}\n{text[match.start() :]}\n"
