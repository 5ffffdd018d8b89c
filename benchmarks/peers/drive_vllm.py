"""vLLM on the CPU, in one process, compiled: `python drive_vllm.py CHECKPOINT BATCH TOKENS`."""

import os
import sys
from itertools import count

from turns import Answer, Tally, take_jobs

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # By default it leaves one core to others.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


def load():
    os.environ.update(SETTINGS)
    import vllm
    from vllm import LLM, SamplingParams

    checkpoint, batch, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = LLM(
        checkpoint,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_num_seqs=batch,
        max_model_len=tokens,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        disable_log_stats=True,
        async_scheduling=False,
    ).llm_engine
    numbers = count()

    def generate(prompts: list[list[int]], new_tokens: int) -> Answer:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        tally = Tally(len(prompts))
        places, seen = {}, [0] * len(prompts)
        for place, prompt in enumerate(prompts):
            places[name := str(next(numbers))] = place
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                place, tokens = places[output.request_id], list(output.outputs[0].token_ids)
                tally.add(place, tokens[seen[place] :])
                seen[place] = len(tokens)
            tally.step_ended()
        return tally.answer()

    return {"vllm": vllm.__version__}, generate


if __name__ == "__main__":
    take_jobs(load)
