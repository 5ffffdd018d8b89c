"""OpenVINO GenAI's continuous batching: `python drive_openvino.py FOLDER BATCH THREADS`.

The KV cache and the inference precision are its own choice, as its users get them (KV in 8 bits, bf16 where the CPU has
it)."""

import sys
from itertools import count

from turns import Answer, Tally, take_jobs


def load():
    import numpy as np
    import openvino
    import openvino_genai as genai

    folder, batch, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = 1
    scheduling.max_num_batched_tokens = 4096
    scheduling.max_num_seqs = batch
    scheduling.enable_prefix_caching = False
    settings = {"INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", settings)
    numbers = count()

    def generate(prompts: list[list[int]], new_tokens: int) -> Answer:
        how = genai.GenerationConfig()
        how.max_new_tokens = how.min_new_tokens = new_tokens
        how.ignore_eos = True
        how.do_sample = False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        tally = Tally(len(prompts))
        handles = [pipeline.add_request(next(numbers), one, how) for one in inputs]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for place, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tally.add(place, list(output.generated_ids))
            tally.step_ended()
        return tally.answer()

    return {"openvino_genai": genai.__version__, "openvino": openvino.__version__}, generate


if __name__ == "__main__":
    take_jobs(load)
