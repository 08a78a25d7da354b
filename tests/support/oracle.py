"""What transformers and peft make of a small random model: the oracle of the family tests."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from pcg.peft.adapter_files import WEIGHTS

NEW_TOKENS = 32
CACHE = "past_key_values"
"""The argument and the output with the KV cache; transformers 5.24 renames it."""
if CACHE not in inspect.signature(transformers.LlamaModel.forward).parameters:
    CACHE = "cache"


def random_model(
    config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """A transformers model whose every parameter matters: no weight is zero, no scale is one."""
    fields = dict(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about options of generation
        parsed = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        if getattr(parsed, "attn_logit_softcapping", None):
            parsed._attn_implementation = (
                "eager"  # transformers 5.17 takes SDPA, which leaves it out
            )
        model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    # Corrections of routers' scores; other buffers are computed.
    zeros = [b for b in model.named_buffers() if not b[1].any() and b[1].is_floating_point()]
    for name, parameter in (*model.named_parameters(), *zeros):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith((".A_log", ".dt_bias")):
            # Drawn by torch's generator, where little is left of earlier tokens.
            parameter.data.copy_(noise - 1.0)
        elif parameter.dim() > 1:
            parameter.data.copy_(0.08 * noise)
        else:
            # Rounded, as transformers draws some of them, such as gpt-oss' sinks.
            parameter.data.round_().add_(0.1 * noise)
    return model.to(dtype).eval()


def with_adapter(
    model: Any,
    targets: str | Sequence[str],
    *,
    rank: int,
    excluded: Sequence[str] = (),
    parameters: Sequence[str] = (),
    seed: int = 1,
    copied: bool = True,
) -> Any:
    """A copy of the model, or the model itself, wrapped by peft; its adapter does something."""
    import peft  # seconds, which processes of ranks save

    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=list(excluded) or None,
        target_parameters=list(parameters) or None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2's Conv1D stores its weight the other way round
        wrapped = peft.get_peft_model(copy.deepcopy(model) if copied else model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in lora_parameters(wrapped).values():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return wrapped


_IN_OUT = ("Llama4TextExperts", "RecurrentGemmaRglru")
"""Modules with parameters [experts, in, out] that peft takes for [experts, out, in]."""


def lora_parameters(wrapped: Any) -> dict[str, Tensor]:
    """The adapter's parameters by pcg's name: the module's path, and lora_A or lora_B."""
    from peft.tuners.lora.layer import ParamWrapper

    parameters = {}
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            path, _, kind = name.removesuffix(".default.weight").rpartition(".")
            module = wrapped.get_submodule(path)
            if isinstance(module, ParamWrapper):
                path = path.replace(".base_layer", "")
                path += f":{module.parameter_name}:{module.num_experts}"
                is_swapped = type(module.get_base_layer()).__name__ in _IN_OUT
                path += ":mT" * (is_swapped and module.num_experts > 1)
            parameters[f"{path.removeprefix('base_model.model.')}.{kind}"] = parameter
    return parameters


def copy_lora(adapter: Any, wrapped: Any) -> None:
    """Copy the parameters of peft's adapter to pcg's."""
    for path, parameter in lora_parameters(wrapped).items():
        module, _, kind = path.rpartition(".")
        weights = adapter.weights[module]
        (weights.a if kind == "lora_A" else weights.b).copy_(parameter.data)


def save(wrapped: Any, directory: Path) -> None:
    """Write the adapter as peft does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(directory)


def check_same_weights(first: Path, second: Path) -> None:
    """Two saved adapters have equal tensors of the same names."""
    theirs, ours = (load_file(directory / WEIGHTS) for directory in (first, second))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


def save_model(model: Any, directory: Path, shard: str = "5GB") -> None:
    """Write a model as transformers does, in files of so many bytes at most."""
    disable_progress_bar()
    model.save_pretrained(directory, max_shard_size=shard)


def load_saved(model: Any, directory: Path, **options: Any) -> Any:
    """The model with an adapter that peft itself reads from files."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(copy.deepcopy(model), directory, **options).eval()


@torch.no_grad()
def logits(model: Any, sequence: Sequence[int]) -> Tensor:
    """Of the sequence's own tokens, without virtual ones before them."""
    return model(torch.tensor([sequence]), **_without_cache(model)).logits[0, -len(sequence) :]


def _without_cache(model: Any) -> dict[str, bool]:
    """Options of a forward call; a prefix is a cache."""
    config = model.active_peft_config if hasattr(model, "active_peft_config") else None
    return (
        {} if config is not None and config.peft_type == "PREFIX_TUNING" else {"use_cache": False}
    )


def _forget(model: Any) -> None:
    """Drop the states of the last call, which RecurrentGemma keeps."""
    for module in model.modules():
        for name in {"conv1d_state", "recurrent_states"} & vars(module).keys():
            setattr(module, name, None)


def greedy(model: Any, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """The most likely continuation, by transformers' own generate with its KV cache."""
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        # peft 0.21 overlooks the cache of transformers 5.24, and prepends its tokens at each step.
        sequence = list(prompt)
        for _ in range(new_tokens):
            sequence.append(int(logits(model, sequence)[-1].argmax()))
        return sequence[len(prompt) :]
    ids = torch.tensor([prompt])
    _forget(model)
    # transformers' generate counts from 0 also where the model's forward, as RoBERTa's, does not.
    counting = (m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids"))
    first = next((module.padding_idx + 1 for module in counting), 0)
    positions = {"position_ids": torch.arange(len(prompt))[None] + first} if first else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **positions,
        )
    return out[0, len(prompt) :].tolist()


def loss_and_gradients(
    wrapped: Any, sequences: Sequence[Sequence[int]]
) -> tuple[float, dict[str, Tensor]]:
    """The summed loss, and the gradients of the mean loss over all target tokens.

    A token before which there is nothing, not even a virtual one, is no target.
    """
    config = wrapped.active_peft_config if hasattr(wrapped, "active_peft_config") else None
    has_prompt = config is not None and config.peft_type in ("PROMPT_TUNING", "P_TUNING")
    count = sum(len(sequence) - 1 + has_prompt for sequence in sequences)
    total = torch.zeros((), dtype=torch.float64)
    wrapped.zero_grad()
    for sequence in sequences:
        ids = torch.tensor([sequence])
        _forget(wrapped)
        out = wrapped(ids, **_without_cache(wrapped)).logits[0, :-1][-ids.shape[1] :]
        loss = torch.nn.functional.cross_entropy(
            out, ids[0, ids.shape[1] - len(out) :], reduction="sum"
        )
        (loss / count).backward()
        total += loss.detach()
    gradients = {name: parameter.grad for name, parameter in lora_parameters(wrapped).items()}
    found = {name: g.clone() for name, g in gradients.items() if g is not None}
    return float(total), in_own_dims(found)


def in_own_dims(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of A and B, by pcg's name, with A of the inputs also where peft's is of outputs."""
    found = {}
    for path, tensor in tensors.items():
        (module, _, kind), tensor = path.rpartition("."), tensor.detach()
        if module.endswith(":mT"):
            experts = int(module.split(":")[-2])
            if kind == "lora_A":
                tensor = tensor.view(experts, -1, tensor.shape[1]).permute(2, 1, 0).flatten(1)
            else:
                tensor = tensor.view(len(tensor), -1, experts).permute(2, 1, 0).flatten(0, 1)
            kind = {"lora_A": "lora_B", "lora_B": "lora_A"}[kind]
        found[f"{module}.{kind}"] = tensor
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, by the largest number expected."""
    return float((found - expected).abs().max() / expected.abs().max())
