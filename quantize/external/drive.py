"""Runs inside the environment of an external quantizer, with none of this package: a job in, a checkpoint out.

usage: python -I drive.py JOB.json. The job holds library, algorithm, source, out, report (paths), bits, group_size
(-1 per channel), symmetric and token_ids [windows][tokens]. Each library is called as its own documentation does, with
its own defaults; what it needs beyond that to run on a CPU is set right here, with the reason. The versions used
and the seconds of every stage are written to `report` when all is done.
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
        recipe = [GPTQModifier(**settings)]
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


def run_gptqmodel(job: dict[str, Any]) -> None:
    with timed("import"):
        import torch
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
        from gptqmodel.quantization.config import FORMAT, METHOD
    # AWQ has no kernel of its own for a CPU unless it is named, and GEMM is the format that others load.
    is_awq, has_cuda = job["algorithm"] == "awq", torch.cuda.is_available()
    backend = BACKEND.AWQ_TORCH if is_awq and not has_cuda else BACKEND.AUTO
    kind = {"method": METHOD.AWQ, "format": FORMAT.GEMM} if is_awq else {"desc_act": False}
    config = QuantizeConfig(bits=job["bits"], group_size=job["group_size"], sym=job["symmetric"], **kind)
    with timed("load"):
        model = GPTQModel.load(job["source"], config, device="cuda" if has_cuda else "cpu")
    with timed("quantize"):
        windows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job["token_ids"]]
        model.quantize(windows, batch_size=1, backend=backend)
    with timed("save"):
        model.save(job["out"])


def run_autoawq(job: dict[str, Any]) -> None:
    with timed("import"):
        import torch
        from awq import AutoAWQForCausalLM
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with timed("load"):
        model = AutoAWQForCausalLM.from_pretrained(job["source"], device_map={"": device}, trust_remote_code=False)
    with timed("quantize"):
        windows = job["token_ids"]
        model.quantize(
            None,
            quant_config={
                "zero_point": not job["symmetric"],
                "q_group_size": job["group_size"],
                "w_bit": job["bits"],
                "version": "GEMM",
            },
            calib_data=windows,
            max_calib_samples=len(windows),
            max_calib_seq_len=len(windows[0]),
        )
    with timed("save"):
        model.save_quantized(job["out"])


def run_autogptq(job: dict[str, Any]) -> None:
    with open(os.path.join(job["source"], "config.json"), encoding="utf-8") as file:
        if "rope_parameters" in json.load(file):
            # Its transformers is of version 4 and would take the default base for the checkpoint's, without a word.
            sys.exit("AutoGPTQ cannot read rope_parameters, as transformers 5 writes them; use external:gptqmodel")
    with timed("import"):
        from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig
    config = BaseQuantizeConfig(bits=job["bits"], group_size=job["group_size"], sym=job["symmetric"], desc_act=False)
    with timed("load"):
        model = AutoGPTQForCausalLM.from_pretrained(job["source"], config)
    with timed("quantize"):
        model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job["token_ids"]])
    with timed("save"):
        model.save_quantized(job["out"], use_safetensors=True)


LIBRARIES: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "llmcompressor": ("llmcompressor", run_llmcompressor),
    "gptqmodel": ("gptqmodel", run_gptqmodel),
    "autoawq": ("autoawq", run_autoawq),
    "autogptq": ("auto-gptq", run_autogptq),
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
    used = {name: metadata.version(name) for name in (distribution, "torch", "transformers")}
    with open(job["report"], "w", encoding="utf-8") as file:
        json.dump({"versions": used, "seconds": SECONDS}, file)


if __name__ == "__main__":
    main()
