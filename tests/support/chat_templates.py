"""Chat templates that show tools or reasoning, in the manner of families of models."""

from __future__ import annotations

_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHOWN = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_JSON = '{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}}'

HERMES = _SHOWN + _TURNS.replace("CALL", f"\n<tool_call>\n{_JSON}\n</tool_call>").replace(
    "KEY", "arguments"
)
LLAMA3 = _SHOWN + _TURNS.replace("CALL", _JSON).replace("KEY", "parameters")
MISTRAL = _SHOWN + _TURNS.replace("CALL", f"[TOOL_CALLS] [{_JSON}]").replace("KEY", "arguments")
MISTRAL_BY_NAME = _SHOWN + _TURNS.replace(
    "CALL", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
)
MISTRAL_V3 = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls[0].function | tojson }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Shows tools before the last question alone, and has no generation prompt."""
XML = _SHOWN + _TURNS.replace("CALL", "<tool_call><function={{ c.function.name }}></tool_call>")
"""Shows calls in a form that is not known."""

GLM4 = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A turn ends where the next role's token stands."""

_SPLIT = (
    "{% set ns = namespace(LAST=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.LAST = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set reasoning_content = '' %}"
    "{% if m.reasoning_content is string %}{% set reasoning_content = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set reasoning_content = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
)
_CHATML_REST = (
    "{{ content }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)
_THOUGHT = "<think>\n{{ reasoning_content }}\n</think>\n\n"
_QWEN3 = (
    _SPLIT.replace("LAST", "last_query_index")
    + "<|im_start|>assistant\n{% if loop.index0 > ns.last_query_index %}"
    "{% if loop.last or (not loop.last and reasoning_content) %}"
    + _THOUGHT
    + "{% endif %}{% endif %}"
    + _CHATML_REST
)
_NEMOTRON = (
    _SPLIT.replace("LAST", "last_user_idx")
    + "<|im_start|>assistant\n{% if not (loop.index0 < ns.last_user_idx) %}"
    + _THOUGHT
    + "{% else %}<think></think>{% endif %}"
    + _CHATML_REST
)
_GLM45 = (
    _SPLIT.replace("LAST", "last_user_index")
    + "<|assistant|>\n{% if loop.index0 > ns.last_user_index and reasoning_content %}"
    "<think>{{ reasoning_content }}</think>{% else %}<think></think>{% endif %}\n{{ content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_DISTILLED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|assistant|>{{ content }}<|im_end|>{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
REASONING: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "Qwen3": (_QWEN3.replace("PROMPT", ""), (None, "reasoning_content")),
    "Qwen3.5": (_QWEN3.replace("PROMPT", "<think>\n"), (None, "reasoning_content")),
    "no thinking": (
        _QWEN3.replace("PROMPT", "<think>\n\n</think>\n\n"),
        (None, "reasoning_content"),
    ),
    "Nemotron 3": (_NEMOTRON.replace("PROMPT", "<think>\n"), (None, "reasoning_content")),
    "GLM-4.5": (_GLM45, (None, "reasoning_content")),
    "DeepSeek-R1-Distill": (_DISTILLED, (None,)),
}
"""Templates that drop reasoning, and the keys that they read it from, None in the content."""
