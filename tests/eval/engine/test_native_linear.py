"""The native bfloat16 linear rounds the exact product once, whatever the shape; everything else stays torch's."""

import pytest
import torch
from torch import nn

from eval.engine import native_linear
from eval.engine.native_linear import MAX_TOKENS, NativeLinear, use_native_linears
from quantize.native_build import load_native


@pytest.fixture(scope="module", autouse=True, params=["", "avx2"], ids=["widest", "avx2"])
def kernel(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTGATE_NATIVE", request.param)
        load_native.cache_clear()
        if not use_native_linears(nn.Linear(2, 2).to(torch.bfloat16)):
            pytest.skip("no compiler, or no AVX2 on this machine")
        yield
    load_native.cache_clear()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (64, 49), (33, 7), (1, 1), (100, 65)])
def test_every_batch_size_rounds_the_exact_product_once(inputs, outputs, bias):
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias).to(torch.bfloat16)
    use_native_linears(linear)
    assert type(linear) is NativeLinear
    for tokens in range(1, MAX_TOKENS + 2):
        x = torch.randn(1, tokens, inputs).to(torch.bfloat16)
        exact = nn.functional.linear(
            x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()
        )
        # Half a unit in bfloat16's last place, and float32 sums that cancel.
        bound = exact.abs() * 2**-8 + 1e-5
        assert ((linear(x).double() - exact).abs() <= bound).all()


def test_only_plain_bfloat16_linears_change():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16), Special(4, 4).to(torch.bfloat16), nn.Embedding(4, 4)
    )
    assert use_native_linears(model) == ["1"]
    assert [type(module).__name__ for module in model] == ["Linear", "NativeLinear", "Special", "Embedding"]


def test_weights_are_not_copied():
    linear = nn.Linear(8, 8).to(torch.bfloat16)
    address = linear.weight.data_ptr()
    use_native_linears(linear)
    assert linear.weight.data_ptr() == address
    assert list(linear.state_dict()) == ["weight", "bias"]


def test_rows_that_are_not_contiguous_go_to_torch():
    linear = nn.Linear(8, 8).to(torch.bfloat16)
    x = torch.randn(8, 4).to(torch.bfloat16).T
    expected = linear(x)
    use_native_linears(linear)
    assert torch.equal(linear(x), expected)


def test_without_a_compiler_nothing_changes(monkeypatch):
    monkeypatch.setattr(native_linear, "load_native", lambda source: None)
    linear = nn.Linear(8, 8).to(torch.bfloat16)
    assert use_native_linears(linear) == []
    assert type(linear) is nn.Linear
