"""Writes the data of the tasks that ship: `python -m tasks.generate` gives the files in `tasks/data/` byte for byte.

Each file's seed stands in the metadata of its task, so a file, its size and its licence are described in one place.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from tasks.documents import DATA, ROOM, read_config
from tasks.generators import arithmetic, facts, grammar, held_out, python_output, retrieval

GENERATORS: dict[str, Callable[[int], list[dict[str, object]]]] = {
    "grammar": grammar.generate,
    "retrieval": retrieval.generate,
    "arithmetic": arithmetic.generate,
    "facts": facts.generate,
    "python": python_output.generate,
}


def generate(folder: Path = DATA) -> list[Path]:
    """Write every task's JSONL, and the held-out text where this Python has its documents; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in GENERATORS.items():
        seed = int(read_config(ROOM / "own" / f"{name}.yaml")["metadata"]["seed"])
        lines = [json.dumps(item, ensure_ascii=False) for item in make(seed)]
        written.append(folder / f"{name}.jsonl")
        written[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    if held_out.available():
        written.append(folder / "held_out_docs.txt")
        written[-1].write_text(held_out.text(), encoding="utf-8")
    return written


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA):
        print(path)
