"""Tools on the wire, as a chat's body has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from pcg.serve.openai.chat.schemas import bare
from pcg.serve.openai.wire import WireModel

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
MOST_TOOLS = 128
"""As OpenAI's."""


class Function(WireModel):
    """A function that the model may call; without parameters it takes none."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments, without descriptions."""
        if self.parameters:
            found: dict[str, Any] = bare(self.parameters, "tools")
            return found
        return {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(WireModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionRef(WireModel):
    """A function's name."""

    name: FunctionName


class NamedTool(WireModel):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionRef


class AllowedTools(WireModel):
    """Some of the tools, and whether one has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedToolsChoice(WireModel):
    """The choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice
Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]
