"""Our side: `python drive_quantgate.py CHECKPOINT BATCH TOKENS`."""

import sys

from turns import Answer, Tally, take_jobs


def load():
    import torch

    from eval.engine import Engine, SamplingParams

    checkpoint, batch, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = Engine.from_checkpoint(
        checkpoint,
        dtype="bfloat16",
        prefix_caching=False,
        max_num_seqs=batch,
        max_model_len=tokens,
        max_batched_tokens=4096,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> Answer:
        engine.telemetry.clear()
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        tally = Tally(len(prompts))
        places = {engine.add_request(prompt, params): place for place, prompt in enumerate(prompts)}
        while engine.has_unfinished():
            for output in engine.step():
                tally.add(places[output.request_id], output.new_token_ids)
            tally.step_ended()
        return tally.answer()

    return {"torch": torch.__version__, "threads": torch.get_num_threads(), **engine.identity()}, generate


if __name__ == "__main__":
    take_jobs(load)
