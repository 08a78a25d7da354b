"""Hooks of mkdocs: pages of docs/ link files of the repository, on the site as in the repository.

A page names other files relative to its own folder, as repository browsers follow links. The site
has pages for README.md and CONTRIBUTING.md, and copies of the other files that pages link. Its page
of results also lists the command, machine and commit of each result file.
"""

from __future__ import annotations

import json
import posixpath
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the site that are not in docs/, by their path in the repository."""
FENCE_OR_LINK = re.compile(
    r"^```.*?^```$|\]\((?P<path>[\w./-]+)(?P<anchor>#[\w-]*)?\)", re.MULTILINE | re.DOTALL
)


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, CONTRIBUTING.md, and the files of the repository that pages link."""
    texts = {f"docs/{page.src_uri}": page.content_string for page in files.documentation_pages()}
    for path, name in PAGES.items():
        texts[path] = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_rewrite_links(texts[path], path)))
    linked = {path for page, text in texts.items() for path in _linked(text, page)}
    for path in sorted(linked - PAGES.keys()):
        if not path.startswith("docs/") and (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page of docs/ lead to pages and files of the site."""
    name = page.file.src_uri
    if name in PAGES.values():
        return markdown
    if name == "results.md":
        markdown += _result_files(sorted(set(_linked(markdown, "docs/results.md"))))
    return _rewrite_links(markdown, f"docs/{name}")


def on_page_content(html: str, **_: Any) -> str:
    r"""Show `\|`, a bar of code in a table as repository browsers read it, as a bar."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(r"\|", "|"), html)


def _linked(text: str, page: str) -> Iterator[str]:
    """Yield the paths in the repository that a page links."""
    for match in FENCE_OR_LINK.finditer(text):
        if match["path"]:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), match["path"]))


def _rewrite_links(text: str, page: str) -> str:
    """Replace links relative to a page of the repository by links relative to the site's root."""

    def rewritten(match: re.Match[str]) -> str:
        if not match["path"]:
            return match[0]
        (path,) = _linked(match[0], page)
        return f"]({PAGES.get(path, path.removeprefix('docs/'))}{match['anchor'] or ''})"

    return FENCE_OR_LINK.sub(rewritten, text)


def _result_files(paths: list[str]) -> str:
    """Return a table with the command, machine and commit of the result files among `paths`."""
    lines = ["\n## Result files\n", "| file | command | machine | commit |", "|---|---|---|---|"]
    for path in paths:
        if path.endswith(".json"):
            result = json.loads((ROOT / path).read_text(encoding="utf-8"))
            measured = next(_environments(result), {})
            commit = measured.get("commit") or _last_commit(path)
            command, machine = measured.get("command", ""), measured.get("machine", "")
            name = posixpath.basename(path)
            lines.append(f"| [{name}](../{path}) | `{command}` | {machine} | {commit} |")
    return "\n".join(lines).replace("``", "") + "\n"


def _environments(result: Any) -> Iterator[dict[str, str]]:
    """Yield the descriptions of machine and command in a result, also of its parts."""
    if isinstance(result, dict):
        if "environment" in result:
            yield result["environment"]
        for part in result.values():
            yield from _environments(part)


def _last_commit(path: str) -> str:
    """Return the commit that last wrote a file; empty outside a repository."""
    command = ["git", "log", "-1", "--format=%h", "--", path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
