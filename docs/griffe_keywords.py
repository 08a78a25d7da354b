"""Show functions of `pcg.keywords.takes` with the fields of their dataclass as parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe


class Keywords(griffe.Extension):
    """Replace the parameter of a decorated function as the decorator does at run time."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Edit the functions of a package, when all of its classes are known."""
        for function in _functions(pkg):
            for decorator in function.decorators:
                call = decorator.value
                if isinstance(call, griffe.ExprCall) and call.canonical_path.endswith(".takes"):
                    fields = pkg.modules_collection[call.arguments[0].canonical_path]
                    _take(function, fields)


def _functions(owner: griffe.Object) -> Iterator[griffe.Function]:
    for member in owner.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, griffe.Module | griffe.Class):
            yield from _functions(member)


def _take(function: griffe.Function, fields: griffe.Class) -> None:
    before = list(function.parameters)[:-1]  # `self` of a method
    after = [parameter for parameter in fields.parameters if parameter.name != "self"]
    function.parameters = griffe.Parameters(*before, *after)
    texts: dict[str, str] = {}
    for owner in reversed([fields, *fields.mro()]):
        for section in owner.docstring.parse("google") if owner.docstring else []:
            if section.kind is griffe.DocstringSectionKind.attributes:
                for item in section.value:
                    texts |= dict.fromkeys(
                        item.name.split(", "), " ".join(item.description.split())
                    )
    lines = [f"    {one.name}: {texts[one.name]}" for one in after if one.name in texts]
    text = function.docstring.value if function.docstring else ""
    summary, _, errors = text.partition("\nRaises:\n")
    text = "\n".join([summary, "", "Args:", *lines, *(["", "Raises:", errors] if errors else [])])
    function.docstring = griffe.Docstring(text, parent=function, parser="google")
