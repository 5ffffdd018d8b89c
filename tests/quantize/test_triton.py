"""Our Triton kernels compute what the reference does (here in Triton's interpreter), and compile for real GPUs."""

import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from quantize.kernels.choose import in_triton
from quantize.kernels.reference import quantize_tokens, reference_linear
from quantize.kernels.triton import dynamic_int8, launch, weight_only
from quantize.kernels.triton.dynamic_int8 import TritonDynamicInt8, quantize_on_device
from quantize.kernels.triton.launch import splits_for
from quantize.kernels.triton.weight_only import UNPACK_BF16, UNPACK_FP16, TritonWeightOnly, pack_nibbles
from quantize.scheme import QuantizedWeight, Scheme, dequantize, quantize_rtn
from tests.triton_for_gpu import Case, compile_elsewhere

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="these tensors lie on the CPU")

FP32 = 2.0**-24
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SMALLEST = {torch.bfloat16: 1e-30, torch.float16: 2.0**-25, torch.float32: 1e-30}


def random_weight(scheme: Scheme, outputs: int, inputs: int, dtype=torch.bfloat16) -> QuantizedWeight:
    torch.manual_seed(outputs + inputs)
    return quantize_rtn((torch.randn(outputs, inputs) * 0.1 + 0.05).to(dtype), scheme)


def assert_within_float32_sums(kernel, x: torch.Tensor, weight: QuantizedWeight) -> None:
    """No factor is rounded, so an output is a sum of K exact products. Added within groups, then (after one rounded
    product with the scale) over groups and splits, each term is rounded at most K + 8 times by 2^-24 of a partial sum,
    none of which exceeds the sum of all magnitudes; then the result is rounded once to the dtype of x. Twice that, for
    the second-order terms."""
    exact = reference_linear(x.double(), weight)
    magnitude = x.double().abs() @ dequantize(weight, torch.float64).abs().T
    allowed = magnitude * 2 * (x.shape[1] + 8) * FP32 + exact.abs() * ROUNDING[x.dtype] + SMALLEST[x.dtype]
    assert ((kernel(x).double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("tokens", [1, 16, 33, 64])
@pytest.mark.parametrize(
    ("scheme", "outputs", "inputs"),
    [
        (Scheme(4, 32), 70, 96),
        (Scheme(4, 32, False), 33, 672),
        (Scheme(4, 64), 64, 192),
        (Scheme(4, 64, False), 5, 64),
        (Scheme(4, 128), 129, 1024),
        (Scheme(4, 128, False), 16, 384),
        (Scheme(4, 96), 20, 288),
        (Scheme(4, -1), 37, 101),
        (Scheme(4, -1, False), 66, 300),
        (Scheme(3, 64, False), 48, 192),
        (Scheme(2, 32), 31, 64),
        (Scheme(8), 65, 577),
        (Scheme(8), 130, 1536),
        (Scheme(8, 32, False), 33, 96),
        (Scheme(8, 128), 16, 384),
        (Scheme(6, 64, False), 7, 128),
    ],
    ids=str,
)
def test_small_batches(tokens, scheme, outputs, inputs):
    weight = random_weight(scheme, outputs, inputs)
    assert TritonWeightOnly.supports(scheme)
    kernel = TritonWeightOnly(weight)
    for dtype in (torch.bfloat16, torch.float16):
        assert_within_float32_sums(kernel, torch.randn(tokens, inputs).to(dtype), weight)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scales_are_used_as_stored(scale_dtype):
    weight = random_weight(Scheme(4, 32, False), 40, 128, scale_dtype)
    kernel = TritonWeightOnly(weight)
    assert kernel.scale.dtype == scale_dtype
    assert_within_float32_sums(kernel, torch.randn(4, 128).bfloat16(), weight)


@pytest.mark.parametrize("scheme", [Scheme(4, 32, False), Scheme(4, -1), Scheme(8), Scheme(8, 64, False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_batches_multiply_the_very_weight_that_the_reference_does(scheme, dtype):
    weight = random_weight(scheme, 70, 192)
    x = torch.randn(65, 192).to(dtype)
    assert torch.equal(TritonWeightOnly(weight)(x), reference_linear(x, weight))


def test_nothing_and_rows_that_are_not_contiguous():
    kernels = (
        TritonWeightOnly(random_weight(Scheme(4, 32), 48, 64)),
        TritonDynamicInt8(random_weight(Scheme(8, activations="int8"), 48, 64)),
    )
    x = torch.randn(64, 6).bfloat16().T
    for kernel in kernels:
        assert kernel(x[:0]).shape == (0, 48)
        assert torch.equal(kernel(x), kernel(x.contiguous()))


def test_int4_takes_half_a_byte_per_weight():
    kernel = TritonWeightOnly(random_weight(Scheme(4, 128), 64, 256))
    assert kernel.codes.nbytes == 64 * 256 // 2
    assert kernel.scale.nbytes == 64 * 2 * 2


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (80, 577), (37, 31), (16, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dynamic_int8(tokens, outputs, inputs, dtype):
    weight = random_weight(Scheme(8, activations="int8"), outputs, inputs)
    x = (torch.randn(tokens, inputs) * torch.logspace(-3, 3, tokens)[:, None]).to(dtype)
    x[-1] = 0
    codes, scale = quantize_tokens(x)
    exact = (codes.double() * scale.double()) @ dequantize(weight, torch.float64).T
    error = (TritonDynamicInt8(weight)(x).double() - exact).abs()
    # The integer sum is exact: only its conversion, the two scales and the output are rounded.
    assert (error <= exact.abs() * (4 * FP32 + ROUNDING[dtype]) + SMALLEST[dtype]).all()


def test_tokens_are_quantized_exactly_as_the_reference_does():
    x = torch.randn(9, 5000) * torch.logspace(-20, 4, 9)[:, None]
    x[3] = 0
    x[4, :256] = torch.arange(256) / 2  # ties between two codes
    x[4, 256:] = 0
    codes, scale = quantize_on_device(x, 5056)
    expected_codes, expected_scale = quantize_tokens(x)
    assert torch.equal(codes[:, :5000], expected_codes)
    assert not codes[:, 5000:].any()
    assert torch.equal(scale, expected_scale.squeeze(1))


@given(programs=st.integers(1, 2000), steps=st.integers(1, 300), available=st.integers(1, 200))
def test_no_part_of_a_split_is_empty_and_none_is_lost(programs, steps, available):
    splits = splits_for(programs, steps, available)
    each = -(-steps // splits)
    assert 1 <= splits <= steps
    assert (splits - 1) * each < steps <= splits * each


def test_a_gpu_gets_our_kernel_where_it_has_the_case():
    def name(scheme: Scheme, dtype=torch.bfloat16) -> str | None:
        kernel = in_triton(random_weight(scheme, 32, 96), dtype)
        return kernel and kernel.name

    assert name(Scheme(4, 32)) == "triton-int4"
    assert name(Scheme(8), torch.float16) == "triton-int8"
    assert name(Scheme(8, activations="int8"), torch.float32) == "triton-int8-dynamic"
    assert name(Scheme(4, 32), torch.float32) is None
    assert name(Scheme(4, 24)) is None


def linears() -> Iterator[tuple[torch.nn.Module, str, tuple]]:
    four = TritonWeightOnly(random_weight(Scheme(4, 32, False), 40, 96))
    yield four, "triton_weight_only", (four.codes, four.scale, four.zero_point, four.half_bytes, four.block)
    eight = TritonWeightOnly(random_weight(Scheme(8), 40, 96))
    yield eight, "triton_weight_only", (eight.codes, eight.scale, None, eight.half_bytes, eight.block)
    dynamic = TritonDynamicInt8(random_weight(Scheme(8, activations="int8"), 40, 96))
    yield dynamic, "triton_dynamic_int8", (dynamic.codes, dynamic.scale)


def test_the_operators_keep_their_promises_to_torch():
    x = torch.randn(3, 96).bfloat16()
    for _, name, arguments in linears():
        torch.library.opcheck(getattr(torch.ops.quantgate, name).default, (x, *arguments))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_sees_one_graph(backend):
    x = torch.randn(3, 96).bfloat16()
    for kernel, _, _ in linears():
        compiled = torch.compile(kernel, fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), kernel(x))


def run_ptx(text: str, register: int) -> list[int]:
    """The four output registers of `_UNPACK` for an input register, instruction by instruction as the PTX manual
    defines them."""
    kind, bits = (torch.bfloat16, torch.bfloat16) if "bf16x2" in text else (torch.float16, torch.float16)
    registers = {"$4": register}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    def pair(word: int) -> torch.Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16).view(bits).double()

    for line in text.strip("{}\n").splitlines():
        operation, *operands = re.findall(r"[^\s,;]+", line)
        if operation == ".reg":
            continue
        target, (a, *rest) = operands[0], [value(operand) for operand in operands[1:]]
        if operation == "prmt.b32":
            eight = a.to_bytes(4, "little") + rest[0].to_bytes(4, "little")
            result = int.from_bytes(bytes(eight[rest[1] >> 4 * index & 7] for index in range(4)), "little")
        elif operation == "lop3.b32":
            b, c, table = rest
            result = sum(
                (table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)) & 1) << bit for bit in range(32)
            )
        elif operation == "shr.u32":
            result = a >> rest[0]
        elif operation == "mov.b32":
            result = a
        else:
            assert operation.startswith("fma.rn")
            low, high = (pair(a) * pair(rest[0]) + pair(rest[1])).to(kind).view(torch.int16).tolist()
            result = (low & 0xFFFF) | (high & 0xFFFF) << 16
        registers[target] = result
    return [registers[f"${index}"] for index in range(4)]


@pytest.mark.parametrize(("text", "dtype"), [(UNPACK_BF16, torch.bfloat16), (UNPACK_FP16, torch.float16)], ids=str)
def test_the_assembly_unpacks_every_pair_of_nibbles(text, dtype):
    """What the GPU runs in the place of the interpreter's shifts."""
    codes = torch.tensor([[low, high] for low in range(-8, 8) for high in range(-8, 8)], dtype=torch.int8)
    packed = pack_nibbles(codes, 2).flatten()
    for start in range(0, 256, 4):
        register = int.from_bytes(packed[start : start + 4].numpy().tobytes(), "little")
        words = torch.tensor(run_ptx(text.value, register), dtype=torch.int64).to(torch.uint32)
        low, high = words.view(dtype).view(2, 4)
        assert torch.equal(low, codes[start : start + 4, 0].to(dtype))
        assert torch.equal(high, codes[start : start + 4, 1].to(dtype))


def gpu_cases() -> Iterator[Case]:
    sizes = dict.fromkeys(("outputs", "inputs", "row_bytes", "group_bytes", "half"), "i32")
    pointers = {"codes": "*i8", "scale": "*bf16", "zero_point": "*i8"}
    counts = dict.fromkeys(("tokens", "steps", "steps_per_split"), "i32")
    for dtype, kind, nibbles, block, has_zero in (
        (tl.bfloat16, "*bf16", True, 16, False),
        (tl.bfloat16, "*bf16", True, 64, True),
        (tl.bfloat16, "*bf16", False, 128, False),
        (tl.float16, "*fp16", True, 64, True),
    ):
        shape = {"DOT": dtype, "NIBBLES": nibbles, "INTERPRET": False, "BLOCK_N": 64, "BLOCK_K": block}
        shape |= {"HAS_ZERO": True} if has_zero else {"HAS_ZERO": False, "zero_point": None}
        types = {"x": kind, "out": "*fp32", **pointers, **sizes, **counts}
        yield Case(weight_only._weight_only, types, {**shape, "BLOCK_M": 16}, tuple(sizes))
    types = {"out": "*fp16", **pointers, **sizes}
    yield Case(weight_only._dequantize, types, shape, tuple(sizes))
    types = {"x": "*bf16", "codes": "*i8", "scale": "*fp32", "inputs": "i32", "padded_inputs": "i32"}
    yield Case(dynamic_int8._quantize_tokens, types, {"BLOCK": 4096}, ("inputs", "padded_inputs"))
    types = {"tokens_codes": "*i8", "codes": "*i8", "out": "*i32", "padded_outputs": "i32", "padded_inputs": "i32"}
    types |= dict.fromkeys(("tokens", "steps", "steps_per_split"), "i32")
    shape = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}
    yield Case(dynamic_int8._int8_product, types, shape, ("padded_outputs", "padded_inputs"))
    types = {"row_scale": "*fp32", "column_scale": "*fp32", "out": "*bf16"}
    types |= dict.fromkeys(("rows", "columns", "partial_columns"), "i32")
    shape = {"SPLITS": 4, "SCALED": True, "BLOCK": 512}
    yield Case(launch._finish, {"partial": "*i32", **types}, shape)
    shape = {"SPLITS": 4, "SCALED": False, "BLOCK": 512, "row_scale": None, "column_scale": None}
    yield Case(launch._finish, {"partial": "*fp32", **types}, shape)


def test_every_kernel_compiles_for_ampere_and_hopper_without_spilling(tmp_path):
    results = list(compile_elsewhere("tests.quantize.test_triton:gpu_cases", tmp_path))
    assert {result["gpu"] for result in results} == {"sm_80", "sm_90"}
    assert all(result["stack"] == "0" for result in results)
    multiplied = {result["kernel"] for result in results if int(result["products"]) > 0}
    assert multiplied == {"_weight_only", "_int8_product"}
