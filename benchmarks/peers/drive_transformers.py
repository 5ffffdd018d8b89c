"""transformers' `generate` with a static cache: `python drive_transformers.py CHECKPOINT`."""

import sys
import time

from turns import Answer, take_jobs


def load():
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()

    class Times(StoppingCriteria):
        """Is called after every step and stops nothing."""

        def __init__(self) -> None:
            self.steps: list[float] = []

        def __call__(self, input_ids, scores, **_):
            self.steps.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> Answer:
        times = Times()
        start = time.perf_counter()
        ids = torch.tensor(prompts)
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            cache_implementation="static",
            stopping_criteria=StoppingCriteriaList([times]),
        )
        later = len(prompts) * (len(times.steps) - 1)
        return Answer(times.steps[0] - start, times.steps[-1] - start, later, generated[0, ids.shape[1] :].tolist())

    return {"transformers": transformers.__version__, "torch": torch.__version__}, generate


if __name__ == "__main__":
    take_jobs(load)
