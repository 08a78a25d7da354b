"""The chats that a server can serve: their template, the format of tool calls, what is allowed."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from pcg.errors import ConfigError
from pcg.files import read_text
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.openai.chat.tool_use import ToolSupport


class ChatSupport:
    """The chats of one model.

    Args:
        tokenizer: None for a model without one.
        chat_template: a file with a template in place of the model's.
        tool_call_parser: the format of tool calls; None to see it in the template.
        trusts_templates: True if requests may bring templates.

    Raises:
        ConfigError: the file cannot be read, or the template does not compile.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        chat_template: Path | None = None,
        tool_call_parser: str | None = None,
        trusts_templates: bool = False,
    ) -> None:
        if tokenizer is not None and chat_template is not None:
            tokenizer = tokenizer.with_template(read_text(chat_template, ConfigError))
        self.tokenizer = tokenizer
        self.tools = ToolSupport(tokenizer, tool_call_parser)
        self.trusts_templates = trusts_templates

    @cached_property
    def knows_developer(self) -> bool:
        """True if the template has the role."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return False
        return any("developer" in one for one in self.tokenizer.chat_template.sources.values())

    @cached_property
    def reads_parts(self) -> bool:
        """True if the template writes contents that are lists of parts."""
        return self.tokenizer is not None and self.tokenizer.reads_parts()
