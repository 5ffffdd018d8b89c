"""What goes along with the weights unchanged: tokenizer, chat templates, generation settings, licence.

Never code, never other weights.
"""

import shutil
from pathlib import Path

COPIED = ("*.jinja", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
          "merges.txt", "additional_chat_templates", "LICENSE*")  # fmt: skip


def copy_companions(source: Path, folder: Path) -> None:
    for pattern in COPIED:
        for file in sorted(source.glob(pattern)):
            if file.is_dir():
                shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
            elif file.suffix not in (".py", ".safetensors", ".bin", ".pt"):
                shutil.copyfile(file, folder / file.name)
