"""Second moments: sums of all batches, shared where the input is shared, and the errors that follow from them."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from quantize.gram import Gram, InputRecorder, InputsKnown, output_error, relative_output_error


@pytest.mark.parametrize("width", [8, 192, 500])
def test_batches_of_any_shape_add_up_to_the_second_moments_of_all_tokens(width):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 5, width, generator=generator), torch.randn(7, width, generator=generator)]
    gram = Gram(width, torch.device("cpu"))
    for batch in batches:
        gram.add(batch)
    rows = torch.cat([batch.reshape(-1, width) for batch in batches]).double()
    torch.testing.assert_close(gram.matrix().double(), rows.T @ rows / 17, rtol=1e-5, atol=1e-5)
    assert torch.equal(gram.matrix(), gram.matrix().T)


@pytest.mark.parametrize("shape", [(1, 5), (77, 13), (300, 100), (1500, 224)])
def test_bf16_activations_give_the_moments_of_their_float32_values(shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    gram = Gram(shape[1], torch.device("cpu"))
    gram.add(rows)
    gram.add(rows[: shape[0] // 2])
    exact = torch.cat([rows, rows[: shape[0] // 2]]).double()
    expected = exact.T @ exact / len(exact)
    torch.testing.assert_close(gram.matrix().double(), expected, rtol=1e-5, atol=1e-5)


def test_output_error_is_what_a_forward_pass_would_measure():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(50, 16, generator=generator)
    weight, other = torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)
    gram = inputs.T @ inputs / 50
    measured = ((inputs @ (weight - other).T) ** 2).mean(0)
    torch.testing.assert_close(output_error(weight - other, gram), measured)
    assert relative_output_error(weight, weight, gram) == 0
    assert relative_output_error(torch.zeros(4, 16), other, gram) == 0


class Fork(nn.Module):
    """a and b read one tensor, c another; c comes last and counts its calls."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.finished = 0

    def forward(self, states):
        states = states * 2
        outputs = self.c(self.a(states) + self.b(states))
        self.finished += 1
        return outputs


def test_linears_that_read_one_tensor_share_its_moments():
    model = Fork()
    recorder = InputRecorder(dict(model.named_children()))
    with torch.no_grad(), recorder.watching():
        for seed in range(3):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
            recorder.next_batch()
    grams = recorder.grams()
    assert recorder.leader == {"a": "a", "b": "a", "c": "c"}
    assert grams["a"] is grams["b"]
    assert not torch.equal(grams["a"], grams["c"])
    model(torch.zeros(1, 8))
    assert torch.equal(recorder.grams()["a"], grams["a"])  # nothing is recorded after the watch


def test_a_pass_for_inputs_alone_stops_at_the_last_linear_with_the_same_moments():
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model = Fork()
    whole, short = (InputRecorder(dict(model.named_children())) for _ in range(2))
    with torch.no_grad():
        with whole.watching():
            for batch in batches:
                model(batch)
                whole.next_batch()
        finished = model.finished
        with short.watching(only_inputs=True):
            for number, batch in enumerate(batches):
                if number == 0:
                    model(batch)
                else:
                    with pytest.raises(InputsKnown):
                        model(batch)
                short.next_batch()
    assert model.finished == finished + 1
    for name, gram in whole.grams().items():
        assert torch.equal(short.grams()[name], gram)


class Choice(nn.Module):
    """Two experts in order; the sign of a batch's sum chooses one, a large sum both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states):
        total = states.sum()
        outputs = states
        if total > 0:
            outputs = self.first(states * 1)
        if total < 0 or total > 100:
            outputs = self.second(states * 1)
        return outputs


def test_an_expert_that_runs_after_the_last_of_an_earlier_pass_is_still_recorded():
    batches = [torch.ones(4, 8), -torch.ones(2, 8), 5 * torch.ones(6, 8), torch.ones(1, 8), -torch.ones(3, 8)]
    model = Choice()
    recorder = InputRecorder(dict(model.named_children()))
    with torch.no_grad(), recorder.watching(only_inputs=True):
        for batch in batches:
            with suppress(InputsKnown):
                model(batch)
            recorder.next_batch()
    assert recorder.tokens() == {"first": 4 + 6 + 1, "second": 2 + 6 + 3}


def test_important_tokens_weigh_more_and_all_alike_is_the_plain_mean():
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(30, 8, generator=generator)
    importance = torch.rand(30, generator=generator) + 0.1
    weighed, alike = Gram(8, torch.device("cpu")), Gram(8, torch.device("cpu"))
    weighed.add(rows, importance)
    alike.add(rows, torch.full((30,), 0.5))
    expected = (rows * importance[:, None]).double().T @ rows.double() / importance.sum()
    torch.testing.assert_close(weighed.matrix().double(), expected.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alike.matrix().double(), rows.double().T @ rows.double() / 30, rtol=1e-4, atol=1e-5)
