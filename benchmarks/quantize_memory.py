"""Does the memory of quantizing stay flat with depth? Peak resident memory for a random Llama of 4 and of 32 equal
layers, hidden size 1024, on the same calibration tokens.

Every measurement is a fresh process, and the figure is the kernel's own high-water mark of its resident pages (VmHWM),
memory-mapped files included. Run: python benchmarks/quantize_memory.py (about ten minutes on a quiet core).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RESULTS = Path(__file__).parent / "results"
METHODS = ("int8", "gptq", "awq")
DEPTHS = (4, 32)
HIDDEN, FEED_FORWARD, VOCABULARY = 1024, 2048, 1024
SAMPLES, SEQUENCE_LENGTH = 8, 256
ALLOWED = 1.1


def write_model(folder: Path, depth: int) -> None:
    """A bf16 checkpoint, layer by layer, so that writing it does not need its size in memory either."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=depth,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    files: dict[str, str] = {}
    by_file: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        by_file.setdefault(f"layer-{parts[2]}" if parts[1] == "layers" else "outside", []).append(name)
    for file, names in by_file.items():
        tensors = {
            name: torch.ones(shapes[name], dtype=torch.bfloat16)
            if len(shapes[name]) == 1
            else (torch.randn(shapes[name], generator=generator) * 0.02).to(torch.bfloat16)
            for name in names
            if name != "lm_head.weight"
        }
        save_file(tensors, folder / f"{file}.safetensors", {"format": "pt"})
        files |= dict.fromkeys(tensors, f"{file}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    letters = {"<unk>": 0} | {chr(code): code - 31 for code in range(32, 127)}
    spelling = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    spelling.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=spelling, unk_token="<unk>", eos_token="<unk>").save_pretrained(folder)


def quantize_here(source: Path, method: str, out: Path) -> dict[str, float]:
    """What a fresh process does: import, quantize, look at its own high-water mark."""
    torch.set_num_threads(1)
    from quantize import Recipe, quantize_checkpoint

    before = peak_bytes()
    manifest = quantize_checkpoint(source, Recipe(method, samples=SAMPLES, sequence_length=SEQUENCE_LENGTH), out)
    return {"peak_bytes": peak_bytes(), "imports_bytes": before, "seconds": manifest.seconds}


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "quantize_memory.json")
    parser.add_argument("--here", nargs=3, metavar=("SOURCE", "METHOD", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        source, method, out = arguments.here
        print(json.dumps(quantize_here(Path(source), method, Path(out))))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for depth in DEPTHS:
            source = Path(scratch) / f"depth-{depth}"
            write_model(source, depth)
            size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
            for method in METHODS:
                command = [sys.executable, __file__, "--here", str(source), method]
                ran = subprocess.run(
                    [*command, str(Path(scratch) / f"{method}-{depth}")], check=True, capture_output=True, text=True
                )
                rows.append({"method": method, "layers": depth, "checkpoint_bytes": size} | json.loads(ran.stdout))
                print(rows[-1], file=sys.stderr)
    ratios = {}
    for method in METHODS:
        shallow, deep = (
            next(row["peak_bytes"] for row in rows if (row["method"], row["layers"]) == (method, depth))
            for depth in DEPTHS
        )
        ratios[method] = deep / shallow
    result = {
        "model": {"hidden": HIDDEN, "feed_forward": FEED_FORWARD, "dtype": "bfloat16", "tied": True},
        "calibration": {"samples": SAMPLES, "sequence_length": SEQUENCE_LENGTH},
        "measure": "VmHWM of a fresh process, imports and mapped files included",
        "rows": rows,
        "deep_over_shallow": ratios,
        "within_ten_percent": all(ratio <= ALLOWED for ratio in ratios.values()),
    }
    text = json.dumps(result, indent=1)
    arguments.out.write_text(text + "\n")
    print(text)
    return 0 if result["within_ten_percent"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
