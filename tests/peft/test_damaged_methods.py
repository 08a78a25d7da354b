"""Files of every method that are damaged, or of another base, are refused by what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from pcg.errors import AdapterError
from pcg.files import SUMS
from tests.support import compiled, oracle
from tests.support.adalora import FIELDS as ADALORA
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, wrap

Tensors = Mapping[str, Tensor]
Q_DOWN = {"target_modules": ["q_proj", "down_proj"]}


def key_of(tensors: Tensors, end: str) -> str:
    return next(key for key in tensors if key.endswith(end))


def changed(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda t: {**t, key_of(t, end): change(t[key_of(t, end)])}


def without(*ends: str) -> Callable[[Tensors], Tensors]:
    return lambda t: {k: v for k, v in t.items() if not k.endswith(ends)}


def all_of(change: Callable[[str, Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda t: {k: change(k, v) for k, v in t.items()}


METHODS: dict[str, Any] = {
    "adalora": peft.AdaLoraConfig(**ADALORA),
    "loha": peft.LoHaConfig(r=3, alpha=5, **Q_DOWN),
    "vera": peft.VeraConfig(r=4, **Q_DOWN),
    "ia3": peft.IA3Config(target_modules=["fc2", "k_proj"], feedforward_modules=["fc2"]),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=12, **CAUSAL),
    "houlsby": {"peft_type": "BOTTLENECK", "bottleneck_size": 4, "variant": "houlsby"},
    "bitfit": {"peft_type": "BITFIT"},
}
FAMILIES = {"ia3": "opt", "houlsby": "gpt2", "bitfit": "gpt2"}
PROMPT = "prompt_embeddings"
DAMAGES: list[tuple[str, str, Callable[[Tensors], Tensors]]] = [
    ("adalora", "the partner of another", without("0.self_attn.q_proj.lora_E")),
    ("adalora", r"\[3, 1\]; expected", changed("lora_E", lambda t: t[:3])),
    ("adalora", r"\[4\]; expected", changed("lora_E", lambda t: t[:, 0])),
    ("loha", "the partner of another", without("0.self_attn.q_proj.hada_w2_b")),
    ("loha", r"\[2, 64\]; expected \[64, 3\], \[3, 64\], \[64, 3\], \[3, 64\]",
     changed("q_proj.hada_w2_b", lambda t: t[:2])),
    ("loha", "has LoHa of rank 2 .* gives it LoHa of rank 3",
     all_of(lambda k, t: t[:2] if k.endswith("_b") else t[:, :2])),
    ("loha", r"\[3, 30\] for .*, which is \[64, 96\]",
     all_of(lambda k, t: t[:, :30] if k.endswith("_b") else t)),
    ("vera", "nothing of vera_A, vera_B", without("vera_A", "vera_B")),
    ("vera", "vera_B of vera_A, vera_B", without("vera_A")),
    ("vera", "the partner of another", without("0.self_attn.q_proj.vera_lambda_d")),
    ("vera", "VeRA of rank 3, and its", changed("vera_lambda_d", lambda t: t[:3])),
    ("vera", r"\[4, 1\]; expected", changed("vera_lambda_d", lambda t: t.reshape(4, 1))),
    ("vera", r"vera_A \[4, 90\], and this base needs \[4, 96\]",
     changed("vera_A", lambda t: t[:, :90])),
    ("ia3", r"fc2 has ia3_l \[96, 1\]; expected \[1, in\]",
     changed("0.fc2.ia3_l", lambda t: t.reshape(-1, 1))),
    ("ia3", r"tensors \[5\] for .*fc2, which is \[64, 96\]",
     changed("0.fc2.ia3_l", lambda t: t[:, :5])),
    ("ia3", r"no \(IA\)³ weight",
     lambda t: {**t, key_of(t, "fc2.ia3_l").replace("ia3_l", "lora_A.weight"): t[key_of(t, "l")]}),
    ("prompt", r"prompt_embeddings is \[3, 64\], .*\[5, hid", changed(PROMPT, lambda t: t[:3])),
    ("prompt", r"\[5, 8\] for the token embedding", changed(PROMPT, lambda t: t[:, :8])),
    ("prompt", "prompt, which is no prompt tuning weight", lambda t: {"prompt": t[PROMPT]}),
    ("prompt", "holds no prompt tuning weights", lambda t: {}),
    ("prefix", r"prompt_embeddings is \[3, .*\[12, 2 · 2 · features\]",
     changed(PROMPT, lambda t: t[:3])),
    ("prefix", r"\[12, 2 · 2 · features\]", changed(PROMPT, lambda t: t[:, :-1])),
    ("prefix", r"tensors .* for layers\.0", changed(PROMPT, lambda t: t[:, : t.shape[1] // 2])),
    ("houlsby", r"adapter_down.bias, the partner of another",
     without("0.attn.c_proj.adapter_down.bias")),
    ("houlsby", r"\[3\], .*; expected \[4, 64\], \[4\], ",
     changed("adapter_down.bias", lambda t: t[:3])),
    ("bitfit", r"none as transformer.ln_f.bias, .* \[64\]", without("ln_f.bias")),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_files_that_do_not_fit(method: str, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME[FAMILIES.get(method, "llama3")].config(2))
    executor, config = compiled.executor(base), METHODS[method]
    if isinstance(config, dict):
        executor.add_adapter("a", config)
        executor.save_adapter("a", tmp_path)
        (tmp_path / SUMS).unlink()
    else:
        oracle.save(wrap(base, config), tmp_path)
    executor.add_adapter("whole", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, message, damage in DAMAGES:
        if name == method:
            save_file({k: t.clone().contiguous() for k, t in damage(tensors).items()}, file)
            with pytest.raises(AdapterError, match=message):
                executor.add_adapter("damaged", tmp_path)


def test_a_prefix_of_other_layers() -> None:
    executor = compiled.executor(oracle.random_model(BY_NAME["llama3"].config(3)))
    fields = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4, "num_layers": 7}
    with pytest.raises(AdapterError, match="num_layers=7, and the base has 3 layers"):
        executor.add_adapter("other", fields)
