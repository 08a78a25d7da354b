"""TRL's AsyncGRPO trains with `pcg serve` as its sampler; its training templates are an oracle."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from pcg.runtime.text.chat import ChatTemplate
from pcg.runtime.text.chat_spans import assistant_spans
from tests.support.other_clients import CHECKPOINT, KEY, ROOT, client_program, run_client, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_trl_trains_with_this_server_as_its_sampler(tmp_path):
    python = client_program("trl", "python")
    adapters = tmp_path / "run" / ".vllm_lora"
    adapters.mkdir(parents=True)
    options = [f"--lora-roots={adapters}", "--logprobs-mode=processed_logprobs"]
    log = tmp_path / "log"
    with served(log, options=options) as server:
        printed = run_client(
            [python, str(ROOT / "tests" / "clients" / "trl_async_grpo.py")],
            tmp_path,
            PCG_MODEL=str(CHECKPOINT),
            PCG_OUTPUT=str(tmp_path / "run"),
            PCG_URL=server.url.replace("http://", f"http://trl:{KEY}@"),
            OMP_NUM_THREADS="1",
        )
    done = json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])
    assert done["steps"] == 3
    first = done["logs"][0]
    assert abs(first["ratio"] - 1) < 1e-5  # the trainer's log-probabilities are the sampler's
    assert first["sample/staleness_max"] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    calls = Counter((one["route"], one["status"]) for one in lines)
    assert calls["/v1/load_lora_adapter", 200] == calls["/pause", 200] == calls["/resume", 200] >= 4
    assert calls["/v1/unload_lora_adapter", 200] >= 1
    assert calls["/v1/completions", 200] > 10
    models = {one["model"] for one in lines if one["route"] == "/v1/completions"}
    assert {"trl-policy-v1", "trl-policy-v2"} <= models


PLAIN = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second answer"},
]
REASONING = [
    PLAIN[0],
    {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nfirst answer"},
    PLAIN[2],
    {"role": "assistant", "content": "<think>\nhow\n</think>\n\nsecond answer"},
]
CALLS = [
    PLAIN[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "name": "add", "content": "six"},
    {"role": "assistant", "content": "it is six"},
]
CHATML = {"plain": PLAIN, "reasoning": REASONING, "calls": CALLS}
TEXTS = {"plain": PLAIN, "reasoning": REASONING}
TEMPLATES = {
    "cohere": (("<|END_OF_TURN_TOKEN|>",), TEXTS),
    "deepseek_r1_distill": (("<｜end▁of▁sentence｜>",), TEXTS),
    "gemma": (("<end_of_turn>",), TEXTS),
    # TRL drops the reasoning of its earlier turns.
    "glm4moe": (("<|endoftext|>", "<|user|>", "<|observation|>"), {"plain": PLAIN, "calls": CALLS}),
    "lfm2_v2": (("<|im_end|>",), CHATML),
    "llama3": (("<|eot_id|>",), TEXTS),
    "phi3_5": (("</s>", "<|end|>"), TEXTS),
    "qwen2_5": (("<|im_end|>",), CHATML),
    "qwen3": (("<|im_end|>",), CHATML),
    "qwen3_instruct_2507": (("<|im_end|>",), CHATML),
    "qwen3_5_think": (("<|im_end|>",), CHATML),
    "qwen3_5_nothink": (("<|im_end|>",), CHATML),
    "qwen3_6": (("<|im_end|>",), CHATML),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_is_that_of_trls_training_templates(name):
    """Of the turns of each, but for what the generation prompt writes, and line breaks behind."""
    find = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    found = subprocess.check_output([client_program("trl", "python"), "-c", find], text=True)
    folder = Path(found.strip()) / "chat_templates"
    ours, theirs = (
        ChatTemplate({"default": (folder / file).read_text(encoding="utf-8")})
        for file in (f"{name}.jinja", f"{name}_training.jinja")
    )
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    stops, chats = TEMPLATES[name]
    for kind, messages in chats.items():
        marked = theirs.marked_spans(messages, **names)
        assert marked is not None
        text, spans = assistant_spans(
            messages,
            (1, 3),
            lambda part, prompt: ours.training.render(part, add_generation_prompt=prompt, **names),
            None,
            stops,
            stops,
        )
        assert text.rstrip() == marked[0].rstrip(), kind
        learned = [text[slice(*span)].rstrip() for span in spans]
        for turn, (begin, end) in zip(learned, marked[1], strict=False):
            whole = marked[0][begin:end].rstrip()
            assert whole.endswith(turn) or turn.startswith(whole), kind  # Phi-3's second end
            assert turn.endswith(stops), kind
