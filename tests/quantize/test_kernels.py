"""Every kernel computes what the reference does, within a bound that follows from how it rounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.kernels import choose
from quantize.kernels.builtin import INT4_LARGEST_BATCH, INT8_LARGEST_BATCH, BuiltinInt4, BuiltinInt8
from quantize.kernels.choose import choose_kernel
from quantize.kernels.dequantized import Dequantized, pack_halves, unpack_halves
from quantize.kernels.dynamic_int8 import DynamicInt8, cpu_multiplies_int8_exactly, exact_product
from quantize.kernels.native import library
from quantize.kernels.reference import quantize_tokens, reference_linear, rounded_inputs
from quantize.linear import QuantizedLinear
from quantize.scheme import QuantizedWeight, Scheme, dequantize, quantize_rtn

BF16 = 2.0**-8
FP32 = 2.0**-24
CPU = torch.device("cpu")


def random_weight(scheme: Scheme, outputs: int = 128, inputs: int = 192, dtype=torch.bfloat16) -> QuantizedWeight:
    torch.manual_seed(outputs + inputs)
    # An offset, so that zero points are not all near the middle.
    return quantize_rtn((torch.randn(outputs, inputs) * 0.1 + 0.05).to(dtype), scheme)


def exact(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    return reference_linear(x.double(), weight)


def dequantized64(weight: QuantizedWeight) -> torch.Tensor:
    return dequantize(weight, torch.float64)


def allowed(x: torch.Tensor, weight: QuantizedWeight, per_product: float) -> torch.Tensor:
    """sum |x w| times (rounding of a product's factors, and of K additions in float32), and the output's rounding."""
    magnitude = x.double().abs() @ dequantized64(weight).abs().T
    additions = x.shape[1] * FP32
    return magnitude * (per_product + additions) * 1.01 + exact(x, weight).abs() * BF16 + 1e-30


def batches(limit: int) -> list[int]:
    return [1, 3, limit, limit + 1, 70]


@pytest.mark.parametrize("batch", batches(INT8_LARGEST_BATCH))
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 192), (37, 48), (64, 576)])
def test_builtin_int8(batch, outputs, inputs):
    weight = random_weight(Scheme(8), outputs, inputs)
    assert BuiltinInt8.supports(weight.scheme, outputs, inputs)
    x = torch.randn(batch, inputs).bfloat16()
    # A small batch multiplies by the scale at the end, once per output; a large one rounds every weight to bf16.
    per_product = BF16 if batch > INT8_LARGEST_BATCH else 2 * FP32
    error = (BuiltinInt8(weight)(x).double() - exact(x, weight)).abs()
    assert (error <= allowed(x, weight, per_product)).all()


def test_builtin_int8_is_not_given_rows_that_it_reads_past():
    # torch 2.13 returned garbage for 40 inputs and crashed for 33
    assert not BuiltinInt8.supports(Scheme(8), 64, 40)
    assert not BuiltinInt8.supports(Scheme(8), 48, 33)


@pytest.mark.parametrize("batch", batches(INT4_LARGEST_BATCH))
@pytest.mark.parametrize(
    "scheme",
    [Scheme(4, 32), Scheme(4, 64, False), Scheme(4, -1), Scheme(4, -1, False), Scheme(3, 96, False), Scheme(2, 32)],
    ids=str,
)
@pytest.mark.parametrize("outputs", [128, 48, 32], ids=["N128", "N48", "N32"])
def test_builtin_int4(batch, scheme, outputs):
    weight = random_weight(scheme, outputs)
    assert BuiltinInt4.supports(scheme, outputs, 192)
    x = torch.randn(batch, 192).bfloat16()
    error = (BuiltinInt4(weight)(x).double() - exact(x, weight)).abs()
    # Beyond rounding each weight to bf16, the offset zero_point * scale is rounded, and then added to code * scale,
    # whose magnitude is at most 8 scale: three roundings of numbers of that size for each |x|.
    largest = weight.scale.double().repeat_interleave(192 // weight.scale.shape[1], dim=1) * 8
    offsets = 0.0 if scheme.symmetric else (x.double().abs() @ largest.T) * 3 * BF16
    assert (error <= allowed(x, weight, BF16) + offsets).all()


def test_builtin_int4_large_batches_use_the_same_packed_weight():
    kernel = BuiltinInt4(random_weight(Scheme(4, 64)))
    assert kernel.block in (32, 64)
    assert {name for name, _ in kernel.named_buffers()} == {"packed", "scale_and_offset"}
    assert kernel.packed.nbytes == 128 * 192 // 2


@pytest.mark.parametrize(
    "scheme",
    [Scheme(8), Scheme(8, 32, False), Scheme(5, 32), Scheme(4, 32), Scheme(3, 64, False), Scheme(8, 32, True, "int8")],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantizing_is_the_reference_itself(scheme, dtype):
    weight = random_weight(scheme, dtype=dtype)
    x = torch.randn(5, 192).to(dtype)
    kernel = Dequantized(weight)
    assert torch.equal(kernel.weight(dtype), dequantize(weight, dtype))
    assert torch.equal(kernel(x), reference_linear(x, weight))


@pytest.mark.parametrize("integer_product", [True, False])
@pytest.mark.parametrize("batch", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dynamic_int8(integer_product, batch, dtype):
    if integer_product and not cpu_multiplies_int8_exactly():
        pytest.skip("this CPU has no exact int8 product")
    weight = random_weight(Scheme(8, activations="int8"), 96, 1100)
    x = torch.randn(batch, 1100).to(dtype)
    codes, scale = quantize_tokens(x)
    expected = (codes.double() * scale.double()) @ dequantized64(weight).T
    error = (DynamicInt8(weight, integer_product)(x).double() - expected).abs()
    # The integer sum is exact: only the conversion of the sum, the two scales and the output are rounded.
    assert (error <= expected.abs() * (4 * FP32 + (BF16 if dtype == torch.bfloat16 else 0)) + 1e-30).all()


def test_the_float_product_of_int8_is_exact_at_its_extremes():
    tokens = torch.full((2, 4097), -128, dtype=torch.int8)
    codes = torch.full((3, 4097), -128, dtype=torch.int8)
    codes[0, 0] = 127
    assert exact_product(tokens, codes).tolist() == [[4096 * 16384.0 - 128 * 127, 4097 * 16384.0, 4097 * 16384.0]] * 2


def test_token_scales_are_the_library_s():
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    torch.manual_seed(3)
    x = torch.randn(1, 7, 33) * torch.logspace(-6, 3, 7).view(1, 7, 1)
    x[0, 2] = 0
    args = QuantizationArgs(num_bits=8, symmetric=True, dynamic=True, strategy="token")
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    codes, ours = quantize_tokens(x[0])
    assert torch.equal(ours, scale[0])
    assert torch.equal(codes * ours, fake_quantize(x, scale, zero_point, args)[0])


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 5), half=st.integers(1, 40), bits=st.integers(2, 4), seed=st.integers(0, 2**31))
def test_halves_reverse(rows, half, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (rows, 2 * half), generator=generator, dtype=torch.int8)
    assert torch.equal(unpack_halves(pack_halves(codes)), codes)


@pytest.fixture
def only_torch(monkeypatch):
    """As on a machine where our own kernels cannot be built."""
    monkeypatch.setattr(choose, "library", lambda: None)


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize(
    ("scheme", "dtype", "kernel"),
    [
        (Scheme(8), torch.bfloat16, "torch-int8"),
        (Scheme(8), torch.float32, "dequantize"),
        (Scheme(4, 64, False), torch.bfloat16, "torch-int4"),
        (Scheme(4, 64, False), torch.float32, "dequantize"),
        (Scheme(4, 16), torch.bfloat16, "dequantize"),
        (Scheme(6, 64), torch.bfloat16, "dequantize"),
        (Scheme(4, 64, True, "int8"), torch.bfloat16, "dequantize"),
    ],
    ids=str,
)
def test_the_chosen_kernel(scheme, dtype, kernel):
    assert choose_kernel(random_weight(scheme), CPU, dtype).name == kernel


@pytest.mark.usefixtures("only_torch")
def test_a_weight_that_torch_s_kernel_would_misread_is_dequantized():
    weight = random_weight(Scheme(8), 64, 40)
    assert choose_kernel(weight, CPU, torch.bfloat16).name == "dequantize"


@pytest.mark.skipif(library() is None, reason="needs AVX2 and a compiler")
@pytest.mark.parametrize(
    ("scheme", "dtype", "kernel"),
    [
        (Scheme(8), torch.bfloat16, "native-int8"),
        (Scheme(8), torch.float32, "dequantize"),
        (Scheme(3, 32, False), torch.bfloat16, "native-int4"),
        (Scheme(8, activations="int8"), torch.float32, "native-int8-dynamic"),
        (Scheme(6, 64), torch.bfloat16, "dequantize"),
    ],
    ids=str,
)
def test_the_chosen_native_kernel(scheme, dtype, kernel):
    assert choose_kernel(random_weight(scheme), CPU, dtype).name == kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("scheme", "inputs"),
    [
        (Scheme(8), 90),
        (Scheme(4, 64, False), 192),
        (Scheme(4, 48), 96),
        (Scheme(3, -1), 40),
        (Scheme(6, 64), 192),
        (Scheme(4, 12), 96),
    ],
    ids=str,
)
def test_under_a8_every_kernel_rounds_the_inputs_as_the_reference_does(scheme, inputs, dtype, monkeypatch):
    weight = random_weight(scheme, 37, inputs)
    x = (torch.randn(5, inputs) * torch.logspace(-2, 2, 5)[:, None]).to(dtype)
    reference = reference_linear(x.double(), weight, "a8")
    assert not torch.equal(reference, exact(x, weight))
    rounding = BF16 if dtype == torch.bfloat16 else FP32
    digits = rounded_inputs(x.double(), scheme, "a8")
    # Nothing is rounded twice but what the kernel without native code keeps in the dtype: inputs, weights and result.
    bound = digits.abs() @ dequantized64(weight).abs().T * (2 * rounding + inputs * FP32) * 1.01
    bound += reference.abs() * rounding + 1e-30
    kernels = [choose_kernel(weight, CPU, dtype, "a8")]
    monkeypatch.setattr(choose, "library", lambda: None)
    kernels.append(choose_kernel(weight, CPU, dtype, "a8"))
    for kernel in kernels:
        assert kernel.name.endswith("-a8")
        assert ((kernel(x).double() - reference).abs() <= bound).all()


def test_int8_activations_of_the_scheme_are_a8_already():
    weight = random_weight(Scheme(8, activations="int8"))
    x = torch.randn(5, 192).bfloat16()
    kernels = [choose_kernel(weight, CPU, torch.bfloat16, compute) for compute in ("a16", "a8")]
    assert kernels[0].name == kernels[1].name
    assert torch.equal(kernels[0](x), kernels[1](x))
    assert QuantizedLinear(weight, None, CPU, torch.bfloat16).compute == "a8"


@pytest.mark.usefixtures("only_torch")
def test_a_scale_that_bf16_does_not_hold_is_not_rounded_to_it():
    weight = random_weight(Scheme(8), dtype=torch.float32)
    assert choose_kernel(weight, CPU, torch.bfloat16).name == "dequantize"


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 64), Scheme(8, activations="int8")], ids=str)
def test_a_quantized_linear_keeps_leading_dimensions_and_adds_its_bias(scheme):
    weight = random_weight(scheme)
    bias = torch.nn.Parameter(torch.randn(128).bfloat16(), requires_grad=False)
    layer = QuantizedLinear(weight, bias, CPU, torch.bfloat16)
    x = torch.randn(2, 3, 192).bfloat16()
    assert layer(x).shape == (2, 3, 128)
    assert torch.equal(layer(x)[1, 2], layer.kernel(x[1])[2] + bias)
    assert layer(x[:, :0]).shape == (2, 0, 128)
