"""One side of a measurement, in a process of its own: `python -m eval.speed.worker`, one JSON object a line each way.

A process of its own makes peak memory this side's own and keeps one side's threads, caches and allocator out of the
other's times. It does nothing until it is told to, and it ends with its parent whatever happens to that.

    load    {checkpoint, options, threads, variant, text}  -> {identity, memory, text_ids}
    block   {traffic}                            -> {requests, steps, speculation, request_records, step_records}
    memory  {traffic}                                      -> {process_peak_bytes, activation_peak_bytes}

While a block runs, lines {finished: n} come before the answer; a failure is {error: one line}.
"""

import gc
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import Any, TextIO

PROGRESS_EVERY_S = 0.5
PARENT_CHECK_S = 0.5
TOKENIZE_CHARACTERS = 20_000
"""Text is tokenised in pieces, so that the tokenizer's own memory does not set the process's peak."""


class Worker:
    """Holds the engine between messages; `load` comes first."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._engine: Any = None

    def serve(self, messages: TextIO) -> None:
        """Answers until the messages end."""
        for line in messages:
            message = json.loads(line)
            try:
                answer = getattr(self, f"do_{message.pop('do')}")(**message)
            except Exception as failure:
                answer = {"error": _one_line(failure)}
            self._say(answer)

    def do_load(
        self, checkpoint: str, options: dict[str, Any], threads: int | None, variant: str, text: str
    ) -> dict[str, Any]:
        import torch

        from eval.engine.engine import Engine

        if threads:
            torch.set_num_threads(threads)
        self._engine = engine = Engine.from_checkpoint(checkpoint, **options)
        engine.telemetry.variant = variant
        pieces = [text[start : start + TOKENIZE_CHARACTERS] for start in range(0, len(text), TOKENIZE_CHARACTERS)]
        text_ids = [token for piece in pieces for token in engine.tokenizer.encode(piece, add_special_tokens=False)]
        memory = {**engine.memory(), "weights_read_bytes": self._weights_read_bytes()}
        return {"identity": engine.identity(), "memory": memory, "text_ids": text_ids}

    def do_block(self, traffic: dict[str, Any]) -> dict[str, Any]:
        from eval.speed.drive import run_block
        from eval.speed.traffic import Traffic

        gc.collect()
        last = time.monotonic()

        def on_finished(count: int) -> None:
            nonlocal last
            if time.monotonic() - last >= PROGRESS_EVERY_S:
                last = time.monotonic()
                self._say({"finished": count})

        driven = run_block(self._engine, Traffic.from_mapping(traffic), on_finished)
        return {
            "requests": [asdict(request) for request in driven.block.requests],
            "steps": [asdict(step) for step in driven.block.steps],
            "speculation": asdict(driven.block.speculation),
            "request_records": [asdict(record) for record in driven.request_records],
            "step_records": [asdict(record) for record in driven.step_records],
        }

    def do_memory(self, traffic: dict[str, Any]) -> dict[str, Any]:
        from eval.speed.drive import run_block
        from eval.speed.memory_probe import activation_peak_bytes, process_peak_bytes
        from eval.speed.traffic import Traffic

        planned = Traffic.from_mapping(traffic)
        peak = process_peak_bytes()
        self._engine.release_scratch()
        activations = activation_peak_bytes(lambda: run_block(self._engine, planned), self._engine.kv_tensors)
        return {"process_peak_bytes": peak, "activation_peak_bytes": activations}

    def _weights_read_bytes(self) -> int:
        """Served bytes that one decode step must read: all of them, but of an untied input embedding only rows. (A
        draft model's are among them, though it reads them for every token that it drafts.)"""
        model = self._engine.model
        into, out_of = model.get_input_embeddings().weight, model.get_output_embeddings()
        total = int(self._engine.memory()["weights_bytes"])
        tied = out_of is not None and getattr(out_of, "weight", None) is into
        return total if tied else total - into.nbytes

    def _say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def _one_line(failure: Exception) -> str:
    from eval.errors import EvalError
    from quantize.errors import QuantizeError

    text = " ".join(str(failure).split())
    return text if isinstance(failure, EvalError | QuantizeError) else f"{type(failure).__name__}: {text}"


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """The answers take over the real standard output; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _end_with_parent()
    Worker(answers).serve(sys.stdin)


if __name__ == "__main__":
    main()
