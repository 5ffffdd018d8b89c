"""What each method costs in WikiText-2 perplexity and in seconds, on one model, from one calibration text.

The protocol is that of the papers' tables, stated whole in the result: windows of 1024 tokens without overlap, no BOS,
the first token of a window not scored; 64 calibration windows of 512 tokens from the validation text. All variants run
one after another in one process. Run: python benchmarks/wikitext2_perplexity.py --data-dir DIR, where DIR/wikitext2
holds test.txt and valid.txt.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from eval.quality.run import evaluate
from eval.speed.machine import CpuMeter, usable_cores
from quantgate.source import resolve_checkpoint
from quantize import Manifest, Recipe, quantize_checkpoint

RESULTS = Path(__file__).parent / "results"
SAMPLES, SEQUENCE_LENGTH = 64, 512
RECIPES: dict[str, dict[str, Any]] = {
    "int8": {"method": "int8"},
    "w8a8": {"method": "int8", "activations": "int8"},
    "smoothquant": {"method": "smoothquant"},
    "int4": {"method": "int4"},
    "awq": {"method": "awq"},
    "gptq": {"method": "gptq"},
    "awq+gptq": {"method": "awq+gptq"},
    "int4-asymmetric": {"method": "int4", "symmetric": False},
    "awq-asymmetric": {"method": "awq", "symmetric": False},
    "gptq-asymmetric": {"method": "gptq", "symmetric": False},
    "awq+gptq-asymmetric": {"method": "awq+gptq", "symmetric": False},
}


def calibration_file(checkpoint: Path, text: Path, folder: Path) -> Path:
    """The first SAMPLES * SEQUENCE_LENGTH tokens of a text, as one document."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    path = folder / "calibration.jsonl"
    path.write_text(json.dumps({"text": tokenizer.decode(ids[: SAMPLES * SEQUENCE_LENGTH + 64])}) + "\n")
    return path


def measure(checkpoint: Path, out: Path, data_dir: Path, windows: int | None) -> dict[str, Any]:
    """Perplexity of a checkpoint and what it was computed with."""
    result = evaluate(checkpoint, tasks=["wikitext2"], data_dir=data_dir, limit=windows, out=out)
    (task,) = result.tasks
    return {
        "perplexity": task.value,
        "protocol": task.name,
        "windows": task.samples,
        "kernels": result.identity["kernels"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default="smollm2-135m")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=60, help="60 are those of the peers' figures; 0: the whole text")
    parser.add_argument("--variants", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--out", type=Path, default=RESULTS / "wikitext2_perplexity.json")
    options = parser.parse_args()
    checkpoint = resolve_checkpoint(options.checkpoint)
    windows = options.windows or None
    meter = CpuMeter([])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = calibration_file(checkpoint, options.data_dir / "wikitext2" / "valid.txt", folder)
        rows = {"bf16": measure(checkpoint, folder / "bf16-quality", options.data_dir, windows)}
        print("bf16", rows["bf16"]["perplexity"], flush=True)
        for name in options.variants:
            recipe = Recipe.from_mapping({"samples": SAMPLES, "sequence_length": SEQUENCE_LENGTH} | RECIPES[name])
            begin = time.perf_counter()
            manifest: Manifest = quantize_checkpoint(checkpoint, recipe, folder / name, calibration=text)
            seconds = time.perf_counter() - begin
            measured = measure(folder / name, folder / f"{name}-quality", options.data_dir, windows)
            rows[name] = measured | {
                "ratio": measured["perplexity"] / rows["bf16"]["perplexity"],
                "quantize_seconds": round(seconds, 1),
                "group_size": manifest.modules[0].group_size,
                "symmetric": manifest.modules[0].symmetric,
                "bytes": manifest.bytes_after,
                "fallbacks": sum(module.fallback is not None for module in manifest.modules),
            }
            print(name, rows[name]["perplexity"], f"{seconds:.0f} s", flush=True)
    document = {
        "checkpoint": options.checkpoint,
        "calibration": f"wikitext2/valid.txt, first {SAMPLES} x {SEQUENCE_LENGTH} tokens",
        "cores": usable_cores(),
        "foreign_cores": meter.foreign_cores(),
        "rows": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
