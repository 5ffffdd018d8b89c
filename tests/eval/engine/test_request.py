"""A request's own state: what its seed decides."""

import random

import pytest

from eval.engine.request import Request, SamplingParams


def first_uniform(params: SamplingParams) -> float:
    return Request("r", [1], params).uniform(0)


def test_samples_of_a_negative_seed_differ():
    asked = SamplingParams(n=3, seed=-1)
    assert len({first_uniform(asked.of_sample(index)) for index in range(3)}) == 3
    assert first_uniform(SamplingParams(seed=-1)) == first_uniform(SamplingParams(seed=-1))


@pytest.mark.parametrize("seed", [0, 1, 11, 2**63])
def test_other_seeds_are_pythons_own(seed):
    assert first_uniform(SamplingParams(seed=seed)) == random.Random(seed).random()
