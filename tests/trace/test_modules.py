"""Modules of other classes, and adapters at modules that compute more than their product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers.modeling_outputs import CausalLMOutput

import pcg.compiler as compiler
from pcg.errors import PcgError
from pcg.runtime.data.example import Example
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts

LAYERS = 4


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class TinyConfig(transformers.PreTrainedConfig):
    model_type = "pcg-tiny"


class TinyLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tiny(transformers.PreTrainedModel):
    """A causal LM that transformers does not know: a table, one kind of layer, a head."""

    config_class = TinyConfig
    base_model_prefix = "trunk"

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.trunk = nn.Module()
        self.trunk.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.trunk.layers = nn.ModuleList(
            TinyLayer(config.hidden_size) for _ in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        hidden = self.trunk.embed(input_ids)
        for layer in self.trunk.layers:
            hidden = layer(hidden)
        return CausalLMOutput(logits=self.head(hidden))


class Forwarding(transformers.LlamaForCausalLM):
    """Takes positions and use_cache among the arguments for the forward of Llama."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, **kwargs)


class Star(transformers.LlamaForCausalLM):
    """A model whose forward hides its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = 2.0 * out.logits
        return out


@pytest.mark.parametrize("kind", [Forwarding, Star, "pruned"])
def test_a_forward_that_hides_its_arguments_and_pruned_weights(kind: Any) -> None:
    stock = oracle.random_model(BY_NAME["llama3"].config(2))
    model = stock if kind == "pruned" else kind(stock.config).eval()
    if kind == "pruned":
        prune.l1_unstructured(model.model.layers[1].mlp.up_proj, "weight", amount=0.5)
    executor = compiler.compile(model)
    (prompt,) = prompts((13,))
    assert relative(executor.logits(prompt), oracle.logits(model, prompt)) < 1e-5
    options = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    (found,) = executor.generate([prompt], **options)
    assert list(found.token_ids) == oracle.greedy(model, prompt, 6)


@pytest.mark.parametrize("registered", [False, True])
def test_an_architecture_that_transformers_does_not_know(registered: bool) -> None:
    config = TinyConfig(vocab_size=128, hidden_size=32, num_hidden_layers=3)
    torch.manual_seed(0)
    model = Tiny(config).eval()
    executor = compiler.compile(model)
    (prompt,) = prompts((13,))
    assert relative(executor.logits(prompt), oracle.logits(model, prompt)) < 1e-5
    assert executor.state.program.base.layers == (0, 0, 0)
    if registered:
        transformers.AutoConfig.register("pcg-tiny", TinyConfig)
        transformers.AutoModelForCausalLM.register(TinyConfig, Tiny)
        traced = compiler.trace(config.to_dict())
        assert str(traced.graph) == str(compiler.trace(model).graph)


@pytest.mark.parametrize("hook", ["before", "behind"])
def test_an_adapter_at_a_module_that_does_more_is_refused(hook: str) -> None:
    """peft would add the adapter's product to what the hook gives, from what it does not see."""
    model = oracle.random_model(BY_NAME["llama3"].config(2))
    projection = model.model.layers[1].self_attn.v_proj
    if hook == "before":
        projection.register_forward_pre_hook(lambda _, given: (given[0] * 2.0,))
    else:
        projection.register_forward_hook(lambda _, __, out: out * 2.0)
    with pytest.raises(PcgError, match=r"self_attn.v_proj computes mul beside its product"):
        compiler.compile(model, "lora")
    recipe = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (prompt,) = prompts((9,))
    found = compiler.compile(model, recipe).logits(prompt)
    assert relative(found, oracle.logits(model, prompt)) < 1e-5


def _scaled_by_a_parametrization(model: Any) -> None:
    class Half(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 0.5 * weight

    parametrize.register_parametrization(model.model.layers[1].mlp.up_proj, "weight", Half())


def _tied_in_a_layer(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight


def _weight_read_elsewhere(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: torch.relu(mlp.gate_proj(x)) @ mlp.down_proj.weight.T


@pytest.mark.parametrize(
    ("change", "targets", "words"),
    [
        (_scaled_by_a_parametrization, ["up_proj"], "the weight of .*mlp.up_proj is computed"),
        (_tied_in_a_layer, ["gate_proj"], "mlp.up_proj reads the weight of .*mlp.gate_proj"),
        (_weight_read_elsewhere, ["down_proj"], r"0\.mlp\.down_proj, which is no linear module"),
    ],
)
def test_an_adapter_that_peft_would_place_otherwise_is_refused(
    change: Any, targets: list[str], words: str, tmp_path: Path
) -> None:
    model = oracle.random_model(BY_NAME["llama3"].config(LAYERS))
    change(model)
    oracle.save(oracle.with_adapter(model, targets, rank=2, copied=False), tmp_path / "a")
    model = oracle.random_model(BY_NAME["llama3"].config(LAYERS))
    change(model)
    with pytest.raises(PcgError, match=words):
        compiler.compile(model, {"a": str(tmp_path / "a")})
    (prompt,) = prompts((9,))
    executor = compiler.compile(model, {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})
    assert relative(executor.logits(prompt), oracle.logits(model, prompt)) < 1e-5


def test_an_adapter_of_modules_of_other_sizes_in_one_layer(tmp_path: Path) -> None:
    model = oracle.random_model(BY_NAME["llama3"].config(LAYERS))
    mlp, width = model.model.layers[1].mlp, model.config.hidden_size
    mlp.gate_proj, mlp.up_proj = (nn.Linear(width, 24, bias=False) for _ in range(2))
    mlp.down_proj = nn.Linear(24, width, bias=False)
    wrapped = oracle.with_adapter(model, ["gate_proj", "down_proj"], rank=2)
    oracle.save(wrapped, tmp_path)
    executor = compiler.compile(model, {"a": str(tmp_path)})
    (prompt,) = prompts((9,))
    assert relative(executor.logits(prompt, "a"), oracle.logits(wrapped, prompt)) < 1e-5
    runner = executor.training_runner("a")
    runner.forward_backward([Example(prompt, prompt)], len(prompt) - 1)
    _, expected = oracle.loss_and_gradients(wrapped, [prompt])
    for path, parameter in runner.parameters.items():
        assert relative(parameter.grad, expected[path]) < 1e-5, path


def test_a_vector_of_another_dtype_is_no_bias() -> None:
    """In bf16 it is added in fp32, and what is written in place is rounded again."""
    model = oracle.random_model(BY_NAME["llama3"].config(3)).to(torch.bfloat16)
    vector = torch.linspace(-1, 1, model.config.hidden_size) * 0.37
    model.model.layers[1].mlp.register_forward_hook(
        lambda _, __, out: None if out.add_(vector) is out else out
    )
    (prompt,) = prompts((13,))
    expected = oracle.logits(model, prompt)
    executor = compiler.compile(model, {"a": "lora"}, verify=False)
    assert relative(executor.logits(prompt), expected) < 2e-2
    runner = executor.training_runner("a")
    runner.forward_backward([Example(prompt, prompt)], len(prompt) - 1)


def test_layers_that_read_the_embedding_again_are_finetuned(tmp_path: Path) -> None:
    model = oracle.random_model(BY_NAME["llama3"].config(3))
    kept: dict[str, torch.Tensor] = {}
    model.model.embed_tokens.register_forward_hook(lambda _, __, out: kept.update(first=out))
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, out: out + 0.2 * kept["first"])
    wrapped = oracle.with_adapter(model, ["q_proj", "down_proj"], rank=2)
    oracle.save(wrapped, tmp_path)
    (prompt,) = prompts((13,))
    executor = compiler.compile(model, {"a": str(tmp_path)})
    assert relative(executor.logits(prompt, "a"), oracle.logits(wrapped, prompt)) < 1e-5
    runner = executor.training_runner("a")
    runner.forward_backward([Example(prompt, prompt)], len(prompt) - 1)
    _, expected = oracle.loss_and_gradients(wrapped, [prompt])
    for path, parameter in runner.parameters.items():
        assert relative(parameter.grad, expected[path]) < 1e-5, path


def test_rounding_that_chooses_other_experts_is_no_other_model() -> None:
    model = oracle.random_model(BY_NAME["mixtral"].config(2), torch.bfloat16)
    compiler.compile(model)
    model.model.layers[1].register_forward_hook(
        lambda _, __, out: out if torch.compiler.is_exporting() else 2 * out.roll(1, -1)
    )
    with pytest.raises(PcgError, match="verify=False"):
        compiler.compile(model)


def test_a_large_module_is_verified_on_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = oracle.random_model(BY_NAME["llama3"].config(LAYERS))
    model.model.layers[1].mlp.register_forward_hook(
        lambda _, __, out: out if torch.compiler.is_exporting() else 2 * out
    )
    monkeypatch.setattr(compiler, "VERIFIED_PARAMETERS", 10)
    compiler.compile(model)
    with pytest.raises(PcgError, match="verify=False"):
        compiler.compile(model, verify=True)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch.compile itself
def test_what_is_no_causal_lm_is_refused() -> None:
    with pytest.raises(PcgError, match="Linear has no transformers configuration"):
        compiler.compile(nn.Linear(3, 3))
    t5 = transformers.T5Config(num_layers=1, d_model=16, d_kv=4, d_ff=16, vocab_size=32)
    with pytest.raises(PcgError, match="encoder-decoder"):
        compiler.compile(transformers.T5ForConditionalGeneration(t5))
    model = oracle.random_model(BY_NAME["llama3"].config(2))
    with pytest.raises(PcgError, match="LlamaModel returns no logits"):
        compiler.compile(model.model)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}
    classifier = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes))
    with pytest.raises(PcgError, match="gpt2 has a head of its own"):
        compiler.compile(classifier.eval())
    with pytest.raises(PcgError, match="wrapped by torch"):
        compiler.compile(torch.compile(model))
    with pytest.raises(PcgError, match="wrapped by peft"):
        compiler.compile(oracle.with_adapter(model, "all-linear", rank=2))
    with torch.device("meta"):
        meta = transformers.AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(PcgError, match="meta device"):
        compiler.compile(meta)
    assert compiler.trace(meta).schedule == (0, 0)


def test_a_module_is_left_as_it_was() -> None:
    """Training mode, what is trained, the attention and the depth, also where tracing fails."""
    model = oracle.random_model(BY_NAME["llama3"].config(LAYERS)).train()
    model.lm_head.requires_grad_(False)
    state = [(n, p.requires_grad, p.data_ptr()) for n, p in model.named_parameters()]
    compiler.compile(model, dtype="bfloat16")
    model.model.layers[0].register_forward_hook(lambda _, __, out: out + out.roll(1, 1))
    with pytest.raises(PcgError, match="roll"):
        compiler.compile(model)
    assert [(n, p.requires_grad, p.data_ptr()) for n, p in model.named_parameters()] == state
    assert all(module.training for module in model.modules())
    assert len(model.model.layers) == model.config.num_hidden_layers == LAYERS
    assert model.config._attn_implementation == "sdpa"
