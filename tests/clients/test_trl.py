"""TRL's AsyncGRPO trains with `pcg serve` as its sampler; its training templates are an oracle."""

import itertools
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from pcg.errors import DataError
from pcg.runtime.data.dataset import load_examples
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import toy_tokenizers as toys
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


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def calls(*arguments):
    return [
        {"type": "function", "function": {"name": "add", "arguments": given}} for given in arguments
    ]


def result(text):
    return {"role": "tool", "name": "add", "content": text}


ONE, TWO, SYSTEM = user("one"), user("two"), {"role": "system", "content": "be kind"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "description": "To add."}},
                "required": ["number"],
            },
        },
    }
]
FIRST, SECOND = "<think>\nwhy\n</think>\n\nfirst", "<think>\nhow\n</think>\n\nsecond"
CALLED = [ONE, answer("", tool_calls=calls({"number": 1})), result("six"), answer("it is six")]
CHATS = {
    "turn": [ONE, answer("first answer")],
    "turns": [ONE, answer("first answer"), TWO, answer("second\n\nänswer")],
    "system": [SYSTEM, ONE, answer("first answer"), TWO, answer("second answer")],
    "thoughts": [ONE, answer(FIRST), TWO, answer(SECOND)],
    "reasoning": [ONE, answer("first", reasoning_content="why")],
    "call": CALLED,
    "calls": [
        *CALLED,
        TWO,
        answer("", tool_calls=calls({"number": 2})),
        result("ten"),
        answer("ten"),
    ],
    "parallel": [
        ONE,
        answer("both", tool_calls=calls({"number": 1}, {"other": "x"})),
        *map(result, ("six", "ten")),
        answer("it is done"),
    ],
    "chain": [
        *CALLED[:3],
        answer("", tool_calls=calls({"number": [2, 3]})),
        result("ten"),
        answer("x"),
    ],
    "agent": [
        SYSTEM,
        ONE,
        answer("let me see", reasoning_content="why", tool_calls=calls({"number": 1})),
        result("six"),
        answer("it is six", reasoning_content="so"),
    ],
}
WITH_TOOLS = ("calls", "parallel", "chain", "agent")
STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "gemma": ["<end_of_turn>"],
    "glm": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "idefics": ["<end_of_utterance>"],
    "llama": ["<|eot_id|>"],
    "llava": ["</s>"],
    "muse": ["<|eot|>"],
    "phi": ["</s>", "<|end|>"],
    "smolvlm": ["<end_of_utterance>"],
}
"""The tokens that end the output of a family; others end it with <|im_end|>."""
HEADERS = (
    "<think>",
    "<think></think>",
    "<｜Assistant｜>",
    "<｜Assistant｜><think>",
    "<｜tool▁outputs▁end｜>",
    "<|start|>assistant",
)
"""What TRL learns though the generation prompt writes it, without whitespace."""
MARK = re.compile(r"<[|｜][^<>'\"{}\s]+[|｜]>|</?(?:think|s|end_of_\w+|start_of_\w+)>")


def parts(messages):
    """The texts that the assistant says."""
    for message in messages:
        if message["role"] == "assistant":
            yield from re.split("</?think>", message["content"])
            yield message.get("reasoning_content", "")
            for call in message.get("tool_calls", ()):
                yield from call["function"]["arguments"]


def squeezed(text):
    return "".join(text.split())


def test_labels_are_those_of_trls_training_templates():
    """Where TRL learns all that the assistant says, but for headers, and line breaks behind turns.

    Elsewhere TRL drops a part of it, and here the chat is refused, or all of it is learned.
    """
    find = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    found = subprocess.check_output([client_program("trl", "python"), "-c", find], text=True)
    folder = Path(found.strip()) / "chat_templates"
    outcomes = Counter()
    for trained in sorted(folder.glob("*_training.jinja")):
        name = trained.name.removesuffix("_training.jinja")
        if name.startswith("diffusion"):  # no causal model
            continue
        own = (folder / f"{name}.jinja").read_text(encoding="utf-8")
        backend = toys.byte_level()
        stops = next((ends for key, ends in STOPS.items() if name.startswith(key)), ["<|im_end|>"])
        backend.add_special_tokens(list(dict.fromkeys(["<s>", "</s>", *stops, *MARK.findall(own)])))
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
        eos_ids = tuple(map(backend.token_to_id, stops))
        ours = Tokenizer(backend, names, eos_id=eos_ids[0], eos_ids=eos_ids).with_template(own)
        for kind, messages in CHATS.items():
            tools = TOOLS if kind in WITH_TOOLS else None
            outcomes[compared(name, kind, messages, tools, ours, theirs, trained)] += 1
    assert not outcomes["differs"], outcomes
    assert outcomes["same"] >= 185, outcomes


def compared(name, kind, messages, tools, ours, theirs, trained):
    try:
        trl = theirs.apply_chat_template(
            messages,
            tools,
            chat_template=trained.read_text(encoding="utf-8"),
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
    except (TemplateError, TypeError):
        return "TRL refuses"
    learned = [i for i, m in zip(trl["input_ids"], trl["assistant_masks"], strict=True) if m]
    is_whole = all(squeezed(part) in squeezed(theirs.decode(learned)) for part in parts(messages))
    is_whole = is_whole and (tools is None or "To add." in theirs.decode(trl["input_ids"]))
    row = {"messages": messages, "tools": tools}
    try:
        (example,) = load_examples([row], ours)
    except DataError:
        return "differs" if is_whole else "refused"
    if not is_whole:
        said = ours.decode([i for i in example.labels if i >= 0], skip_special_tokens=False)
        assert all(squeezed(part) in squeezed(said) for part in parts(messages)), (name, kind)
        return "more"
    marked = zip(trl["input_ids"], trl["assistant_masks"], strict=True)
    labels = [index if is_learned else -100 for index, is_learned in marked]
    for is_less, run in itertools.groupby(
        itertools.zip_longest(example.labels, labels, fillvalue=-100),
        lambda pair: (pair[0] >= 0) - (pair[1] >= 0),
    ):
        ids = [max(pair) for pair in run if is_less]
        text = squeezed(ours.decode(ids, skip_special_tokens=False))
        assert not is_less or text in ("", *(HEADERS if is_less < 0 else ())), (name, kind, text)
    return "same"
