"""A client of files and uploads for `soak_kills.py`, and what it was told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import openai
from kills_world import Load, World


@dataclass
class Kept:
    """A file by the name that it was sent under; nobody knows of it what no server answered."""

    content: bytes
    id: str | None = None
    is_there: bool = False
    is_gone: bool = False


@dataclass
class Begun:
    """An upload that is under way."""

    id: str
    name: str
    content: bytes
    parts: list[str] = field(default_factory=list)
    sent: int = 0


class FilesLoad(Load):
    """Keeps files, whole and in parts, reads and deletes them."""

    def __init__(self, world: World, seed: int) -> None:
        self.name = f"files-{seed}"
        super().__init__(world, seed)
        self.kept: dict[str, Kept] = {}
        self._upload: Begun | None = None

    def work(self) -> None:
        with self.world.openai() as client:
            for _ in range(6):
                if self.world.is_over:
                    return
                self.drawn.choice((self._create, self._create, self._part, self._part, self._read,
                                   self._delete))(client)  # fmt: skip

    def _new(self) -> tuple[str, Kept]:
        name = f"{self.name}-{len(self.kept)}"
        size = self.drawn.choice((1, 100, 5_000, 300_000))
        self.kept[name] = Kept(self.drawn.randbytes(size))
        return name, self.kept[name]

    def _create(self, client: openai.OpenAI) -> None:
        name, one = self._new()
        made = client.files.create(file=(name, one.content), purpose="user_data")
        one.id, one.is_there = made.id, True
        self.world.acknowledge("files")

    def _part(self, client: openai.OpenAI) -> None:
        """Go on with an upload; one whose answer did not come is given up, done or not."""
        if self._upload is None:
            name, one = self._new()
            made = client.uploads.create(
                bytes=len(one.content), filename=name, mime_type="text/plain", purpose="user_data"
            )
            self._upload = Begun(made.id, name, one.content)
            self.world.acknowledge("uploads")
            return
        one, self._upload = self._upload, None
        if one.sent < len(one.content):
            piece = one.content[one.sent : one.sent + max(1, len(one.content) // 3)]
            try:
                one.parts.append(client.uploads.parts.create(one.id, data=piece).id)
            finally:
                self._upload = one  # its part may be sent again: only those that are named count
            one.sent += len(piece)
            self.world.acknowledge("parts")
            return
        if self.drawn.random() < 0.2:
            client.uploads.cancel(one.id)
            self.kept[one.name].is_gone = True
            self.world.acknowledge("uploads cancelled")
            return
        done = client.uploads.complete(one.id, part_ids=one.parts)
        kept = self.kept[one.name]
        assert done.file is not None
        kept.id, kept.is_there = done.file.id, True
        self.world.acknowledge("uploads completed")

    def _some(self) -> Kept | None:
        there = [one for one in self.kept.values() if one.is_there]
        return self.drawn.choice(there) if there else None

    def _read(self, client: openai.OpenAI) -> None:
        one = self._some()
        if one is not None:
            assert one.id is not None
            self._compare(client, one)

    def _compare(self, client: openai.OpenAI, one: Kept) -> None:
        try:
            found = client.files.content(str(one.id)).content
        except openai.NotFoundError:
            self.check(False, f"{one.id} is lost")
            return
        self.check(found == one.content, f"{one.id} has other bytes")
        self.world.counts["files read"] += 1

    def _delete(self, client: openai.OpenAI) -> None:
        one = self._some()
        if one is None or self.drawn.random() < 0.5:
            return
        one.is_there = False  # nobody knows, until there is an answer
        client.files.delete(str(one.id))
        one.is_gone = True
        self.world.acknowledge("files deleted")

    def settle(self) -> bool:
        with self.world.openai() as client:
            found: dict[str, list[Any]] = {}
            for file in client.files.list(purpose="user_data"):
                found.setdefault(file.filename, []).append(file)
            mine = {name: some for name, some in found.items() if name.startswith(self.name + "-")}
            for name, one in self.kept.items():
                there = mine.pop(name, [])
                self.check(len(there) <= 1, f"{name} is there {len(there)} times")
                if one.is_there:
                    ids = [file.id for file in there]
                    self.check(ids == [one.id], f"{name} is {ids}, and was {one.id}")
                if one.is_gone:
                    self.check(not there, f"{name} was deleted or cancelled, and is there")
                for file in there:
                    one.id = file.id
                    self._compare(client, one)
            self.check(not mine, f"files that nobody sent: {list(mine)}")
        return True
