"""Chat templates that show tools, in the manner of three families of models."""

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
XML = _SHOWN + _TURNS.replace("CALL", "<tool_call><function={{ c.function.name }}></tool_call>")
"""Shows calls in a form that is not known."""
