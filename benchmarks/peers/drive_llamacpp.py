"""llama.cpp through llama-cpp-python's C functions: `python drive_llamacpp.py FILE.gguf THREADS`, or, to make a file,
`python drive_llamacpp.py --quantize TYPE FROM.gguf TO.gguf`.

One sequence per prompt; a step takes one token of each, and the best token is picked from the logits."""

import ctypes
import sys
import time

from turns import Answer, take_jobs

TYPES = {"q4_0": 2, "q8_0": 7}
"""llama_ftype of llama.h."""
PREFILL_TOKENS = 2048


def quantize(kind: str, source: str, out: str) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = TYPES[kind]
    if code := llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params)):
        sys.exit(f"llama_model_quantize: code {code}")


def load():
    import llama_cpp
    import numpy as np

    file, threads = sys.argv[1], int(sys.argv[2])
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    tokens = llama_cpp.llama_batch_init(PREFILL_TOKENS, 0, 1)
    contexts = {}

    def context_for(batch: int, length: int):
        """One at a time: its KV cache has the job's size."""
        if (batch, length) not in contexts:
            for old in contexts.values():
                llama_cpp.llama_free(old)
            contexts.clear()
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = batch * (-(-length // 256) * 256)
            params.n_batch = PREFILL_TOKENS
            params.n_seq_max = batch
            params.n_threads = params.n_threads_batch = threads
            contexts[batch, length] = llama_cpp.llama_init_from_model(model, params)
        return contexts[batch, length]

    def put(token: int, position: int, sequence: int, wanted: bool) -> None:
        row = tokens.n_tokens
        tokens.token[row], tokens.pos[row] = token, position
        tokens.n_seq_id[row], tokens.seq_id[row][0] = 1, sequence
        tokens.logits[row] = wanted
        tokens.n_tokens = row + 1

    def run(context) -> None:
        if code := llama_cpp.llama_decode(context, tokens):
            raise RuntimeError(f"llama_decode: code {code}")

    def best(context, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

    def generate(prompts: list[list[int]], new_tokens: int) -> Answer:
        batch, length = len(prompts), len(prompts[0])
        context = context_for(batch, length + new_tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        newest = prefill(context, prompts)
        first_s = time.perf_counter() - start
        answer = [newest[0]]
        for step in range(new_tokens - 1):
            tokens.n_tokens = 0
            for sequence, token in enumerate(newest):
                put(token, length + step, sequence, True)
            run(context)
            newest = [best(context, row) for row in range(batch)]
            answer.append(newest[0])
        return Answer(first_s, time.perf_counter() - start, batch * (new_tokens - 1), answer)

    def prefill(context, prompts: list[list[int]]) -> list[int]:
        """Whole prompts together as long as they fit; then the best token of each."""
        newest: list[int] = []
        length = len(prompts[0])
        together = max(1, PREFILL_TOKENS // length)
        for begin in range(0, len(prompts), together):
            tokens.n_tokens = 0
            chunk = prompts[begin : begin + together]
            for sequence, prompt in enumerate(chunk, begin):
                for position, token in enumerate(prompt):
                    put(token, position, sequence, position == length - 1)
            run(context)
            newest += [best(context, (index + 1) * length - 1) for index in range(len(chunk))]
        return newest

    return {"llama_cpp_python": llama_cpp.__version__}, generate


if __name__ == "__main__":
    if sys.argv[1] == "--quantize":
        quantize(*sys.argv[2:])
    else:
        take_jobs(load)
