"""Our compiled CPU kernels compute what the reference does; where they cannot be built it is said and torch serves."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.kernels import native
from quantize.kernels.native import NativeDynamicInt8, NativeInt4, NativeInt8, by_lanes, interleave
from quantize.kernels.reference import quantize_groups, quantize_tokens, reference_linear
from quantize.native_build import load_native
from quantize.scheme import QuantizedWeight, Scheme, dequantize, quantize_rtn

BF16 = 2.0**-8
FP32 = 2.0**-24


@pytest.fixture(scope="module")
def native_home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module", autouse=True, params=["", "avx2"], ids=["widest", "avx2"])
def _built(request, native_home):
    """Built once for each in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTGATE_HOME", str(native_home))
        patch.setenv("QUANTGATE_NATIVE", request.param)
        load_native.cache_clear()
        if native.library() is None:
            pytest.skip("no AVX2, or no compiler")
        yield
    load_native.cache_clear()


def random_weight(scheme: Scheme, outputs: int, inputs: int, dtype=torch.bfloat16) -> QuantizedWeight:
    torch.manual_seed(outputs + inputs)
    return quantize_rtn((torch.randn(outputs, inputs) * 0.1 + 0.05).to(dtype), scheme)


def assert_within_digits(kernel, x: torch.Tensor, weight: QuantizedWeight) -> None:
    """A token's input is off by half a step of its two digits, which is its group's largest input over 32639 (and a
    little for the float32 division that finds the digits); products and sums within a group are exact, the groups' sums
    are float32, and the result is rounded to bf16. One digit is off by nothing: it is the reference's own."""
    exact = reference_linear(x.double(), weight, "a16" if kernel.digits == 2 else "a8")
    inputs = x.shape[1]
    scale = weight.scale.double().repeat_interleave(inputs // weight.scale.shape[1], dim=1)
    zero = torch.zeros(()) if weight.zero_point is None else weight.zero_point.double()
    values = (weight.codes.double() - zero.repeat_interleave(inputs // zero.shape[1], 1)) if zero.ndim else weight.codes
    padded = torch.nn.functional.pad(x.double().abs(), (0, -inputs % kernel.digit_group))
    largest = padded.view(len(x), -1, kernel.digit_group).amax(dim=2).repeat_interleave(kernel.digit_group, 1)
    step = largest[:, :inputs] / 32639 if kernel.digits == 2 else torch.zeros(len(x), inputs, dtype=torch.float64)
    magnitude = (values.double().abs() * scale).T
    allowed = 0.51 * step @ magnitude + x.double().abs() @ magnitude * (inputs + 4) * FP32
    assert ((kernel(x).double() - exact).abs() <= allowed * (1 + BF16) + exact.abs() * BF16 + 1e-30).all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 11, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (80, 576), (37, 34), (5, 2)])
@pytest.mark.parametrize("digits", [1, 2])
def test_int8(tokens, outputs, inputs, digits):
    weight = random_weight(Scheme(8), outputs, inputs)
    assert NativeInt8.supports(weight.scheme, inputs)
    assert_within_digits(NativeInt8(weight, digits), torch.randn(tokens, inputs).bfloat16(), weight)


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
@pytest.mark.parametrize("digits", [1, 2])
def test_int4(tokens, scheme, outputs, inputs, scale_dtype, digits):
    weight = random_weight(scheme, outputs, inputs, scale_dtype)
    assert NativeInt4.supports(scheme, inputs)
    assert_within_digits(NativeInt4(weight, digits), torch.randn(tokens, inputs).bfloat16(), weight)


@settings(deadline=None, max_examples=50)
@given(
    inputs=st.integers(1, 100),
    group=st.sampled_from([8, 24, 32]),
    seed=st.integers(0, 99),
    exponent=st.integers(-30, 30),
)
def test_one_digit_is_off_by_half_a_step_of_its_group(inputs, group, seed, exponent):
    x = (torch.randn(3, inputs, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).bfloat16()
    x[1] = 0
    digits, scale = quantize_groups(x, group)
    assert scale.shape == (3, -(-inputs // group))
    for k in range(0, inputs, group):
        of_group = x[:, k : k + group].double()
        largest = of_group.abs().amax(dim=1, keepdim=True)
        rounded = digits[:, k : k + group].double() * scale[:, k // group : k // group + 1].double()
        assert ((of_group - rounded).abs() <= largest / 254 * (1 + 512 * FP32)).all()


def test_the_largest_input_of_a_group_stands_for_itself():
    """What makes one digit coarse for its neighbours keeps it exact, wherever it stands and whatever its sign."""
    x = torch.tensor([[0.0, -8.0, 3.0, 5.0]]).bfloat16()
    digits, scale = quantize_groups(x, 2)
    assert digits.tolist() == [[0, -127, 76, 127]]  # 3 * 127 / 5 = 76.2
    assert torch.equal(scale, torch.tensor([[8.0, 5.0]]) / 127)


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
        NativeInt8(random_weight(Scheme(8), 80, 192), digits=1),
        NativeInt4(random_weight(Scheme(4, 64, False), 80, 192), digits=1),
        NativeDynamicInt8(random_weight(Scheme(8, activations="int8"), 80, 192)),
    ):
        together = kernel(x)
        for size in (1, 2, 5, 8):
            assert torch.equal(torch.cat([kernel(part) for part in x.split(size)]), together)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_avx2_gives_the_bits_of_avx512(tokens, monkeypatch):
    if not native.has_avx512():
        pytest.skip("no AVX-512 BF16 and VNNI, or not asked")
    kernels = [
        NativeInt8(random_weight(Scheme(8), 83, 190)),
        NativeInt8(random_weight(Scheme(8), 83, 190), digits=1),
        NativeInt4(random_weight(Scheme(4, 32, False), 83, 192)),
        NativeInt4(random_weight(Scheme(4, -1), 83, 192, torch.float32), digits=1),
        NativeDynamicInt8(random_weight(Scheme(8, activations="int8"), 83, 190)),
    ]
    inputs = [torch.randn(tokens, 192 if "int4" in kernel.name else 190).bfloat16() for kernel in kernels]
    expected = [kernel(x) for kernel, x in zip(kernels, inputs, strict=True)]
    monkeypatch.setenv("QUANTGATE_NATIVE", "avx2")
    load_native.cache_clear()
    found = [kernel(x) for kernel, x in zip(kernels, inputs, strict=True)]
    load_native.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible_wherever_it_stands(value):
    for kernel in (
        NativeInt8(random_weight(Scheme(8), 37, 90)),
        NativeInt4(random_weight(Scheme(4, -1, False), 37, 96)),
        NativeInt4(random_weight(Scheme(4, 24), 37, 96)),
        NativeInt8(random_weight(Scheme(8), 37, 90), digits=1),
        NativeInt4(random_weight(Scheme(4, 48), 37, 96), digits=1),
        NativeDynamicInt8(random_weight(Scheme(8, activations="int8"), 37, 90)),
    ):
        for place in (0, 5, 17, 31, 40, 63, 64, 89):
            x = torch.randn(2, 90 if "int8" in kernel.name else 96).bfloat16()
            x[1, place] = value
            found = kernel(x)
            assert found[0].isfinite().all()
            assert not found[1].isfinite().any()


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("size", [1e-30, 1e-35, 1e-37, 1e-39])
def test_the_smallest_inputs_are_zeros_at_worst(size, digits):
    """The inverse of their digits' scale would not be finite."""
    weight = random_weight(Scheme(8), 37, 90)
    x = (torch.rand(3, 90) * size).bfloat16()
    error = (NativeInt8(weight, digits)(x).double() - reference_linear(x.double(), weight)).abs()
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


def test_threads_do_not_change_a_bit():
    before = torch.get_num_threads()
    x = torch.randn(300, 576).bfloat16()
    kernels = [NativeInt8(random_weight(Scheme(8), 200, 576), n) for n in (1, 2)]
    kernels += [NativeInt4(random_weight(Scheme(4, 64, False), 200, 576), n) for n in (1, 2)]
    try:
        torch.set_num_threads(1)
        expected = [kernel(x) for kernel in kernels]
        for count in (2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(kernel(x), once) for kernel, once in zip(kernels, expected, strict=True))
    finally:
        torch.set_num_threads(before)


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
    assert choose_kernel(weight, torch.device("cpu"), torch.bfloat16, "a8").name == "dequantize-a8"
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
        NativeInt8(random_weight(Scheme(8), 40, 96), digits=1),
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
        kernel.digits,
        kernel.digit_group,
        kernel.spread,
    )
    torch.library.opcheck(torch.ops.quantgate.native_int4.default, (x, 40, *arguments))
    kernel = NativeInt8(random_weight(Scheme(8), 40, 96))
    torch.library.opcheck(torch.ops.quantgate.native_int8.default, (x, 40, kernel.codes, kernel.scale, 2, 64))
    kernel = NativeDynamicInt8(random_weight(Scheme(8, activations="int8"), 40, 96))
    arguments = (x, 40, kernel.codes, kernel.scale, kernel.sums)
    torch.library.opcheck(torch.ops.quantgate.native_dynamic_int8.default, arguments)
