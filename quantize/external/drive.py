"""Runs inside the environment of an external quantizer, with none of this package: a job in, a checkpoint out.

usage: python -I drive.py JOB.json. The job holds library, algorithm, source, out, report (paths), bits, group_size
(-1 per channel), symmetric, damp, act_order and token_ids [windows][tokens]. Each library is called as its own
documentation does; what it needs beyond that to run on a CPU is set right here, with the reason. The versions used are
written to `report` when all is done; the seconds of every stage are printed.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

SECONDS: dict[str, float] = {}


@contextmanager
def timed(stage: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    SECONDS[stage] = round(time.perf_counter() - begin, 3)


def run_llmcompressor(job: dict[str, Any]) -> None:
    with timed("import"):
        import torch
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier
        from llmcompressor.pipelines.cache import IntermediatesCache
        from transformers import AutoModelForCausalLM
    if not torch.accelerator.is_available():
        # AWQ pins its cache for an accelerator that is not there, and crashes.
        IntermediatesCache.pin_memory = lambda self, *args, **kwargs: None
    per_channel = job["group_size"] == -1
    weights = {
        "num_bits": job["bits"],
        "type": "int",
        "symmetric": job["symmetric"],
        "strategy": "channel" if per_channel else "group",
        "group_size": None if per_channel else job["group_size"],
    }
    settings = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    if job["algorithm"] == "gptq":
        static = {} if job["act_order"] else {"actorder": None}
        recipe = [GPTQModifier(dampening_frac=job["damp"], **static, **settings)]
    elif job["algorithm"] == "awq":
        recipe = [AWQModifier(duo_scaling="both"), QuantizationModifier(**settings)]
    else:
        recipe = [QuantizationModifier(**settings)]
    with timed("load"):
        model = AutoModelForCausalLM.from_pretrained(job["source"], dtype="auto")
    with timed("quantize"):
        calibration: dict[str, Any] = {}
        if job["token_ids"]:
            windows = job["token_ids"]
            calibration = {
                "dataset": Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(x) for x in windows]}),
                "max_seq_length": len(windows[0]),
                "num_calibration_samples": len(windows),
                "shuffle_calibration_samples": False,
            }
        oneshot(model=model, recipe=recipe, **calibration)
    with timed("save"):
        model.save_pretrained(job["out"], save_compressed=True)


LIBRARIES: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "llmcompressor": ("llmcompressor", run_llmcompressor),
}


def end_with_parent() -> None:
    """Standard input is a pipe from the process that gave the job: its end means that nobody waits for the result."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    distribution, run = LIBRARIES[job["library"]]
    run(job)
    print("seconds:", SECONDS, flush=True)
    used = {name: metadata.version(name) for name in (distribution, "torch", "transformers")}
    with open(job["report"], "w", encoding="utf-8") as file:
        json.dump({"versions": used}, file)


if __name__ == "__main__":
    main()
