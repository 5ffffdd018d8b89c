"""ONNX Runtime GenAI: `python drive_onnxruntime.py FOLDER THREADS`."""

import json
import sys
import time

from turns import Answer, take_jobs


def load():
    import numpy as np
    import onnxruntime_genai as genai

    folder, threads = sys.argv[1], int(sys.argv[2])
    config = genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = genai.Model(config)

    def generate(prompts: list[list[int]], new_tokens: int) -> Answer:
        batch, length = len(prompts), len(prompts[0])
        params = genai.GeneratorParams(model)
        total = length + new_tokens
        params.set_search_options(max_length=total, min_length=total, batch_size=batch, do_sample=False)
        start = time.perf_counter()
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        generator.generate_next_token()
        first_s = time.perf_counter() - start
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
        last_s = time.perf_counter() - start
        tokens = [int(token) for token in generator.get_sequence(0)[length:]]
        assert len(tokens) == new_tokens, f"{len(tokens)} tokens instead of {new_tokens}"
        return Answer(first_s, last_s, batch * (new_tokens - 1), tokens)

    return {"onnxruntime_genai": genai.__version__}, generate


if __name__ == "__main__":
    take_jobs(load)
