"""One model in the form of every engine: checkpoints of ours, GGUF files, OpenVINO and ONNX folders.

Each is made from the same bf16 checkpoint by what the engine's own users run, once, and kept under the digest of that
checkpoint; delete the folder to have them made anew.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from quantize import Checkpoint, Recipe, quantize_checkpoint
from quantize.formats.gguf_write import write_gguf
from quantize.progress import silent

GROUP_SIZE = 64
INT8_HEAD = {"lm_head": {"bits": 8, "group_size": -1}}
RECIPES = {
    "int8": {"method": "int8", "overrides": INT8_HEAD},
    "w8a8": {"method": "int8", "activations": "int8", "overrides": INT8_HEAD},
    "w8a8-bf16-head": {"method": "int8", "activations": "int8"},
    "int4": {"method": "int4", "group_size": GROUP_SIZE, "overrides": INT8_HEAD},
    "int4-int4-head": {"method": "int4", "group_size": GROUP_SIZE, "overrides": {"lm_head": {"bits": 4}}},
}
"""Ours; vLLM takes no quantized head, so it gets one of its own."""

OPENVINO = {
    "openvino-bf16": ["--weight-format", "fp16"],
    "openvino-int8": ["--weight-format", "int8"],
    "openvino-int4": ["--weight-format", "int4", "--sym", "--group-size", str(GROUP_SIZE), "--ratio", "1.0"],
}


class Models:
    """Makes what is asked for under `folder`. `environment` gives the interpreter of a peer."""

    def __init__(self, source: Path, folder: Path, environment: Callable[[str], Path]) -> None:
        self._source = source
        self._folder = folder / Checkpoint.open(source).weights_digest()[:12]
        self._environment = environment

    def path(self, name: str) -> Path:
        """A file or folder that is whole. Raises RuntimeError with the last words of a tool that failed."""
        if name == "bf16":
            return self._source
        path = self._folder / name
        if not path.exists():
            print(f"making {name}", file=sys.stderr, flush=True)
            draft = self._folder / "draft" / name
            shutil.rmtree(draft.parent, ignore_errors=True)
            draft.parent.mkdir(parents=True)
            self._make(name, draft)
            draft.rename(path)
        return path

    def _make(self, name: str, draft: Path) -> None:
        if name in RECIPES:
            quantize_checkpoint(self._source, Recipe.from_mapping(RECIPES[name]), draft)
        elif name == "bf16.gguf":
            # Nothing is quantized, so every linear goes out in the dtype that it has.
            write_gguf(Checkpoint.open(self._source), (), _no_weight, "gguf-q8_0", draft, lambda *_: None, silent)
        elif name.endswith(".gguf"):
            driver = Path(__file__).parent / "drive_llamacpp.py"
            quantize = [str(driver), "--quantize", name.removesuffix(".gguf"), str(self.path("bf16.gguf"))]
            draft.parent.mkdir(parents=True, exist_ok=True)
            _run([str(self._environment("llamacpp")), *quantize, str(draft)])
        elif name in OPENVINO:
            tool = self._environment("openvino").with_name("optimum-cli")
            export = ["export", "openvino", "-m", str(self._source), "--task", "text-generation-with-past"]
            _run([str(tool), *export, *OPENVINO[name], str(draft)])
        else:
            assert name == "onnx-int4", name
            build = ["-m", "onnxruntime_genai.models.builder", "-m", str(self._source), "-o", str(draft)]
            build += ["-p", "int4", "-e", "cpu", "-c", str(draft.parent / "cache")]
            _run([str(self._environment("onnxruntime")), *build, "--extra_options", f"int4_block_size={GROUP_SIZE}"])


def _no_weight(name: str):
    raise AssertionError(f"{name} is not quantized")


def _run(command: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stdout + done.stderr).strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"{Path(command[0]).name} failed: {words[-1][:300]}")
