"""What a killed run has already finished: one line per shard, under a fingerprint of everything that decides the bytes.

A line is written only after its shard is on the disk, so a line means a whole shard; a torn last line means nothing.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from quantize.manifest import ModuleRecord

JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Entry:
    """A finished shard: its tensors' names, the file's sha256, and its modules' records."""

    file: str
    sha256: str
    tensors: tuple[str, ...]
    modules: tuple[ModuleRecord, ...]


@dataclass(frozen=True)
class Journal:
    """The journal in `folder`. Entries are in the order of the work, without gaps."""

    folder: Path
    entries: tuple[Entry, ...]

    @classmethod
    def resume(cls, folder: Path, fingerprint: str) -> "Journal":
        """The finished shards of an earlier run with this fingerprint; anything else in the folder is removed."""
        entries = read_entries(folder / JOURNAL, fingerprint)
        good: list[Entry] = []
        for entry in entries:
            if not (folder / entry.file).is_file() or file_digest(folder / entry.file) != entry.sha256:
                break
            good.append(entry)
        keep = {entry.file for entry in good}
        for entry_on_disk in folder.iterdir():
            if entry_on_disk.is_dir():
                shutil.rmtree(entry_on_disk)
            elif entry_on_disk.name not in keep:
                entry_on_disk.unlink()
        journal = cls(folder, tuple(good))
        append(folder / JOURNAL, [{"fingerprint": fingerprint}, *(asdict(entry) for entry in good)])
        return journal

    def record(self, entry: Entry) -> "Journal":
        append(self.folder / JOURNAL, [asdict(entry)])
        return Journal(self.folder, (*self.entries, entry))

    def close(self) -> None:
        """The work is done and the folder is to become a checkpoint."""
        (self.folder / JOURNAL).unlink()


def read_entries(file: Path, fingerprint: str) -> list[Entry]:
    if not file.is_file():
        return []
    entries: list[Entry] = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            content = json.loads(line)
            if number == 0:
                if content["fingerprint"] != fingerprint:
                    return []
                continue
            modules = tuple(ModuleRecord(**module) for module in content["modules"])
            entries.append(Entry(content["file"], content["sha256"], tuple(content["tensors"]), modules))
        except (ValueError, KeyError, TypeError):
            break
    return entries


def append(file: Path, lines: list[dict[str, object]]) -> None:
    with file.open("a", encoding="utf-8") as handle:
        for line in lines:
            handle.write(json.dumps(line, allow_nan=False) + "\n")
        handle.flush()
        os.fsync(handle.fileno())


def file_digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
