"""Our compiled CPU kernels compute what the reference does; where they cannot be built it is said and torch serves."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.kernels import native
from quantize.kernels.native import NativeDynamicInt8, NativeInt4, NativeInt8, by_lanes, interleave
from quantize.kernels.reference import quantize_tokens, reference_linear
from quantize.native_build import load_native
from quantize.scheme import QuantizedWeight, Scheme, dequantize, quantize_rtn

BF16 = 2.0**-8
FP32 = 2.0**-24


@pytest.fixture(scope="module", autouse=True)
def _built(tmp_path_factory):
    """Built once in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTGATE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("QUANTGATE_NATIVE", raising=False)
        load_native.cache_clear()
        if native.library() is None:
            pytest.skip("no AVX-512 BF16 and VNNI, or no compiler")
        yield
    load_native.cache_clear()


def random_weight(scheme: Scheme, outputs: int, inputs: int, dtype=torch.bfloat16) -> QuantizedWeight:
    torch.manual_seed(outputs + inputs)
    return quantize_rtn((torch.randn(outputs, inputs) * 0.1 + 0.05).to(dtype), scheme)


def assert_within_digits(kernel, x: torch.Tensor, weight: QuantizedWeight) -> None:
    """A token's input is off by half a step of its digits, which is its group's largest input over 32639 (and a little
    for the float32 division that finds the digits); products and sums within a group are exact, the groups' sums are
    float32, and the result is rounded to bf16."""
    exact = reference_linear(x.double(), weight)
    inputs = x.shape[1]
    scale = weight.scale.double().repeat_interleave(inputs // weight.scale.shape[1], dim=1)
    zero = torch.zeros(()) if weight.zero_point is None else weight.zero_point.double()
    values = (weight.codes.double() - zero.repeat_interleave(inputs // zero.shape[1], 1)) if zero.ndim else weight.codes
    padded = torch.nn.functional.pad(x.double().abs(), (0, -inputs % kernel.digit_group))
    largest = padded.view(len(x), -1, kernel.digit_group).amax(dim=2).repeat_interleave(kernel.digit_group, 1)
    step = largest[:, :inputs] / 32639
    magnitude = (values.double().abs() * scale).T
    allowed = 0.51 * step @ magnitude + x.double().abs() @ magnitude * (inputs + 4) * FP32
    assert ((kernel(x).double() - exact).abs() <= allowed * (1 + BF16) + exact.abs() * BF16 + 1e-30).all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 11, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (80, 576), (37, 34), (5, 2)])
def test_int8(tokens, outputs, inputs):
    weight = random_weight(Scheme(8), outputs, inputs)
    assert NativeInt8.supports(weight.scheme, inputs)
    assert_within_digits(NativeInt8(weight), torch.randn(tokens, inputs).bfloat16(), weight)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 11, 33])
@pytest.mark.parametrize(
    ("scheme", "outputs", "inputs"),
    [
        (Scheme(4, 32), 64, 96),
        (Scheme(4, 64, False), 112, 576),
        (Scheme(4, -1), 37, 40),
        (Scheme(4, -1, False), 20, 576),
        (Scheme(4, 256), 16, 512),
        (Scheme(4, 8, False), 5, 24),
        (Scheme(3, 96, False), 48, 192),
        (Scheme(2, 32, False), 33, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_int4(tokens, scheme, outputs, inputs, scale_dtype):
    weight = random_weight(scheme, outputs, inputs, scale_dtype)
    assert NativeInt4.supports(scheme, inputs)
    assert_within_digits(NativeInt4(weight), torch.randn(tokens, inputs).bfloat16(), weight)


@pytest.mark.parametrize("tokens", [1, 3, 4, 9, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (80, 577), (37, 31), (16, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dynamic_int8(tokens, outputs, inputs, dtype):
    weight = random_weight(Scheme(8, activations="int8"), outputs, inputs)
    x = (torch.randn(tokens, inputs) * torch.logspace(-3, 3, tokens)[:, None]).to(dtype)
    x[0] = 0
    codes, scale = quantize_tokens(x)
    expected = (codes.double() * scale.double()) @ dequantize(weight, torch.float64).T
    error = (NativeDynamicInt8(weight)(x).double() - expected).abs()
    # The integer sum is exact: only the conversion of the sum, the two scales and the output are rounded.
    assert (error <= expected.abs() * (4 * FP32 + (BF16 if dtype == torch.bfloat16 else 0)) + 1e-30).all()


def test_a_token_does_not_depend_on_its_neighbours():
    x = torch.randn(37, 192).bfloat16()
    for kernel in (
        NativeInt8(random_weight(Scheme(8), 80, 192)),
        NativeInt4(random_weight(Scheme(4, 64, False), 80, 192)),
        NativeDynamicInt8(random_weight(Scheme(8, activations="int8"), 80, 192)),
    ):
        together = kernel(x)
        for size in (1, 2, 5, 8):
            assert torch.equal(torch.cat([kernel(part) for part in x.split(size)]), together)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible_wherever_it_stands(value):
    for kernel in (
        NativeInt8(random_weight(Scheme(8), 37, 90)),
        NativeInt4(random_weight(Scheme(4, -1, False), 37, 96)),
        NativeInt4(random_weight(Scheme(4, 24), 37, 96)),
        NativeDynamicInt8(random_weight(Scheme(8, activations="int8"), 37, 90)),
    ):
        for place in (0, 5, 17, 31, 40, 63, 64, 89):
            x = torch.randn(2, 90 if "int8" in kernel.name else 96).bfloat16()
            x[1, place] = value
            found = kernel(x)
            assert found[0].isfinite().all()
            assert not found[1].isfinite().any()


@pytest.mark.parametrize("size", [1e-30, 1e-35, 1e-37, 1e-39])
def test_the_smallest_inputs_are_zeros_at_worst(size):
    """The inverse of their digits' scale would not be finite."""
    weight = random_weight(Scheme(8), 37, 90)
    x = (torch.rand(3, 90) * size).bfloat16()
    error = (NativeInt8(weight)(x).double() - reference_linear(x.double(), weight)).abs()
    assert (error <= x.double() @ dequantize(weight, torch.float64).abs().T + 1e-40).all()


def test_no_tokens_and_rows_that_are_not_contiguous():
    kernel = NativeInt8(random_weight(Scheme(8), 48, 64))
    assert kernel(torch.zeros(0, 64).bfloat16()).shape == (0, 48)
    x = torch.randn(64, 6).bfloat16().T
    assert torch.equal(kernel(x), kernel(x.contiguous()))


def test_int4_takes_half_a_byte_per_weight_and_scales_as_stored():
    kernel = NativeInt4(random_weight(Scheme(4, 32, False), 64, 128))
    assert kernel.nibbles.nbytes == 64 * 128 // 2
    assert kernel.scale.nbytes == 64 * 4 * 2
    assert kernel.zero_point.nbytes == 64 * 4


@settings(deadline=None, max_examples=25)
@given(outputs=st.integers(1, 50), steps=st.integers(1, 9), step=st.sampled_from([1, 2, 4]))
def test_interleaving_puts_every_code_in_its_lane(outputs, steps, step):
    codes = torch.arange(outputs * steps * step).view(outputs, -1)
    lanes = interleave(codes, step)
    assert lanes.shape == (-(-outputs // 16), steps, 16, step)
    assert torch.equal(lanes.transpose(1, 2).reshape(-1, steps * step)[:outputs], codes)
    assert by_lanes(codes).shape == (-(-outputs // 16), steps * step, 16)


SHARED_RUNTIME = """
import torch
from quantize.kernels.native import library
assert library() is not None
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libiomp" in line}
assert len(mapped) == 1, mapped
"""


def test_the_kernels_use_torch_s_threads():
    subprocess.run([sys.executable, "-c", SHARED_RUNTIME], check=True)


@pytest.mark.parametrize("compiler", ["/bin/false", "/nowhere/g++"])
def test_without_a_compiler_it_is_said_once_and_torch_serves(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("QUANTGATE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    load_native.cache_clear()
    with pytest.warns(UserWarning, match="the slower torch path is used"):
        assert native.library() is None
    assert native.library() is None
    from quantize.kernels.choose import choose_kernel

    weight = random_weight(Scheme(8), 64, 96)
    assert choose_kernel(weight, torch.device("cpu"), torch.bfloat16).name == "torch-int8"
    monkeypatch.undo()
    load_native.cache_clear()


def test_they_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("QUANTGATE_NATIVE", "0")
    load_native.cache_clear()
    assert native.library() is None
    monkeypatch.undo()
    load_native.cache_clear()


def test_torch_compile_sees_one_graph():
    x = torch.randn(3, 96).bfloat16()
    for kernel in (
        NativeInt8(random_weight(Scheme(8), 40, 96)),
        NativeInt4(random_weight(Scheme(4, 32, False), 40, 96)),
        NativeDynamicInt8(random_weight(Scheme(8, activations="int8"), 40, 96)),
    ):
        compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), kernel(x))


def test_the_operators_keep_their_promises_to_torch():
    x = torch.randn(3, 96).bfloat16()
    kernel = NativeInt4(random_weight(Scheme(4, 32, False), 40, 96))
    arguments = (
        kernel.nibbles,
        kernel.scale,
        kernel.scale_is_bf16,
        kernel.zero_point,
        kernel.digit_group,
        kernel.spread,
    )
    torch.library.opcheck(torch.ops.quantgate.native_int4.default, (x, 40, *arguments))
    kernel = NativeInt8(random_weight(Scheme(8), 40, 96))
    torch.library.opcheck(torch.ops.quantgate.native_int8.default, (x, 40, kernel.codes, kernel.scale, 64))
    kernel = NativeDynamicInt8(random_weight(Scheme(8, activations="int8"), 40, 96))
    arguments = (x, 40, kernel.codes, kernel.scale, kernel.sums)
    torch.library.opcheck(torch.ops.quantgate.native_dynamic_int8.default, arguments)
