"""The peak of activations is a step's own, whatever ran before it."""

import io

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.engine import Engine, EngineConfig
from eval.speed.traffic import PlannedRequest, Traffic
from eval.speed.worker import Worker

TOKENS, INTERMEDIATE = 1000, 4096
GATES_BYTES = 2 * TOKENS * INTERMEDIATE * 4
"""float32, as the native step has them; the module tree holds as much at once."""


@pytest.fixture
def worker():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=2048,
    )
    worker = Worker(io.StringIO())
    worker._engine = Engine(LlamaForCausalLM(config).float(), None, EngineConfig(num_blocks=256, max_num_seqs=4))
    return worker


def traffic(seed):
    prompt = np.random.default_rng(seed).integers(1, 128, TOKENS).tolist()
    return Traffic("probe", seed, 1, [PlannedRequest(f"r{seed}", 0.0, prompt, 2, 0, False, 0)]).to_mapping()


def test_activations_take_after_measured_blocks_what_they_took_before(worker):
    before = worker.do_memory(traffic(1))["activation_peak_bytes"]
    if before is None:
        pytest.skip("the kernel does not say what a process takes at most")
    worker.do_block(traffic(2))
    after = worker.do_memory(traffic(3))["activation_peak_bytes"]
    assert before > GATES_BYTES / 2
    assert 0.6 * before < after < 1.6 * before
