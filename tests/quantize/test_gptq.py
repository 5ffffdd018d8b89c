"""GPTQ against the slow way of saying the same thing, and what it does with Hessians that are not nice."""

import pytest
import torch

from quantize.gram import output_error
from quantize.methods.gptq import compensate, compensate_columns, gptq, inverse_factor, rounding_costs
from quantize.methods.search import search_grid
from quantize.scheme import Grid, Scheme, dequantize, quantize_rtn


def inputs_of(seed: int, tokens: int = 400, width: int = 96) -> torch.Tensor:
    """Correlated activations [tokens, K] with a few large channels."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) / width**0.5 + torch.eye(width)
    activations = torch.randn(tokens, width, generator=generator) @ mixing
    activations[:, ::17] *= 8
    return activations


def problem(seed: int, outputs: int = 40, width: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] and the second moments [K, K] of its inputs."""
    activations = inputs_of(seed, width=width)
    weight = torch.randn(outputs, width, generator=torch.Generator().manual_seed(seed + 100))
    return weight, activations.T @ activations / len(activations)


def column_by_column(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, order: list[int]) -> torch.Tensor:
    """Optimal brain surgery as the paper derives it, float64, with the inverse of the remaining Hessian computed anew
    for every column: no Cholesky, no blocks. Returns the codes."""
    weight, hessian = weight.double().clone(), hessian.double()
    scale, zero_point = (part.double().expand_as(weight) for part in grid.spread(weight.shape[1]))
    codes = torch.zeros_like(weight)
    for position, column in enumerate(order):
        rest = order[position:]
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        code = (weight[:, column] / scale[:, column]).round() + zero_point[:, column]
        codes[:, column] = code.clamp(grid.scheme.lowest, grid.scheme.highest)
        error = weight[:, column] - (codes[:, column] - zero_point[:, column]) * scale[:, column]
        weight[:, rest] -= error[:, None] * inverse[0][None, :] / inverse[0, 0]
    return codes.to(torch.int8)


def expected_codes(weight: torch.Tensor, gram: torch.Tensor, scheme: Scheme, order: torch.Tensor) -> torch.Tensor:
    upper = inverse_factor(gram, gram.diagonal(), 0.01, order)
    grid, _ = search_grid(weight, rounding_costs(upper, order), scheme, torch.float32)
    hessian = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram))
    return column_by_column(weight, hessian, grid, order.tolist())


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 32, symmetric=False), Scheme(3, 16), Scheme(8)], ids=str)
def test_blocked_cholesky_gives_the_codes_of_the_plain_algorithm(scheme, act_order):
    weight, gram = problem(0)
    result = gptq(weight, gram, scheme, torch.float32, damp=0.01, act_order=act_order)
    order = torch.argsort(gram.diagonal(), descending=True, stable=True) if act_order else torch.arange(len(gram))
    # Float32 against float64: a weight between two codes may fall on the other side, and moves the rest of its row.
    assert (result.quantized.codes != expected_codes(weight, gram, scheme, order)).float().mean() < 0.01


def test_more_columns_than_a_block_are_compensated_across_blocks():
    weight, gram = problem(1, outputs=16, width=320)
    result = gptq(weight, gram, Scheme(4, 32), torch.float32)
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    assert (result.quantized.codes != expected_codes(weight, gram, Scheme(4, 32), order)).float().mean() < 0.02


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(3, 64, symmetric=False), Scheme(8)], ids=str)
@pytest.mark.parametrize("outputs", [1, 64, 70])
def test_native_code_gives_the_codes_of_the_plain_loop(scheme, outputs):
    weight, gram = problem(2, outputs=outputs, width=320)
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    upper = inverse_factor(gram, gram.diagonal(), 0.01, order)
    grid, _ = search_grid(weight, rounding_costs(upper, order), scheme, torch.bfloat16)
    ours, plain = compensate(weight, upper, grid, order), compensate_columns(weight, upper, grid, order)
    assert (ours != plain).float().mean() < 0.01
    assert torch.equal(ours, compensate(weight, upper, grid, order))


def test_the_cost_of_a_rounding_error_is_the_remaining_curvature_of_its_column():
    """1 / U[i, i]² is 1 / [H⁻¹]ᵢᵢ of the columns not yet rounded, as optimal brain surgery has it."""
    _, gram = problem(8)
    order = torch.argsort(gram.diagonal(), descending=True)
    costs = rounding_costs(inverse_factor(gram, gram.diagonal(), 0.01, order), order)
    hessian = (gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram))).double()
    for position in (0, 40, 95):
        rest = order[position:]
        remaining = 1 / torch.linalg.inv(hessian[rest][:, rest])[0, 0]
        torch.testing.assert_close(costs[order[position]].double(), remaining, rtol=1e-3, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_output_error_is_far_below_rounding_to_nearest(seed):
    weight, gram = problem(seed)
    scheme = Scheme(4, 32)
    ours = output_error(weight - dequantize(gptq(weight, gram, scheme, torch.float32).quantized), gram).sum()
    plain = output_error(weight - dequantize(quantize_rtn(weight, scheme)), gram).sum()
    assert ours < 0.6 * plain


def test_inputs_without_correlation_leave_nothing_to_compensate():
    weight, _ = problem(2)
    scheme = Scheme(4, 32)
    result = gptq(weight, torch.eye(96), scheme, torch.float32)
    grid, _ = search_grid(weight, torch.ones(96), scheme, torch.float32)
    nearest = (weight / grid.spread(96)[0]).round().clamp(-8, 7).to(torch.int8)
    assert torch.equal(result.quantized.codes, nearest)


def test_the_searched_grid_never_rounds_worse_than_the_plain_one():
    weight, gram = problem(3)
    importance = gram.diagonal()
    for scheme in (Scheme(4, 32), Scheme(3, 32, symmetric=False)):
        grid, clipped = search_grid(weight, importance, scheme, torch.bfloat16)
        plain = quantize_rtn(weight, scheme, torch.bfloat16)

        def error(scale, zero_point, scheme=scheme):
            points, zeros = Grid(scale, zero_point, scheme).spread(96)
            codes = ((weight / points).round() + zeros).clamp(scheme.lowest, scheme.highest)
            return (((codes - zeros) * points - weight).square() * importance).sum()

        assert error(grid.scale, grid.zero_point) <= error(plain.scale, plain.zero_point)
        assert clipped.shape == grid.scale.shape


def test_a_dead_column_keeps_its_weights_and_is_counted():
    activations = inputs_of(4)
    activations[:, [3, 50]] = 0
    gram = activations.T @ activations / len(activations)
    weight = problem(4)[0]
    result = gptq(weight, gram, Scheme(4, 32), torch.float32)
    back = dequantize(result.quantized)
    assert result.dead_columns == 2
    assert result.fallback is None
    step = result.quantized.scale.repeat_interleave(32, 1)
    inside = (result.quantized.codes > -8) & (result.quantized.codes < 7)
    error = (back - weight).abs() / step
    assert (error[:, [3, 50]][inside[:, [3, 50]]] <= 0.5001).all()


def test_damping_climbs_until_the_factorization_succeeds():
    weight, _ = problem(5)
    rank_one = torch.outer(torch.linspace(1, 2, 96), torch.linspace(1, 2, 96))
    rank_one[0, 5] = rank_one[5, 0] = 2.3  # inconsistent by a little, as summation in another order leaves it
    assert inverse_factor(rank_one, rank_one.diagonal(), 1e-6, torch.arange(96)) is None
    result = gptq(weight, rank_one, Scheme(4, 32), torch.float32, damp=0.01)
    assert result.fallback is None
    assert result.damp > 0.01


@pytest.mark.parametrize(
    ("gram", "reason"),
    [
        (torch.zeros(96, 96), "no calibration input reached it"),
        (torch.full((96, 96), float("nan")), "not finite"),
        (torch.eye(96) + 50 * (torch.ones(96, 96).triu(1) + torch.ones(96, 96).tril(-1)), "Cholesky failed"),
    ],
    ids=["zeros", "nan", "indefinite"],
)
def test_a_hopeless_hessian_falls_back_to_nearest_and_says_so(gram, reason):
    weight, _ = problem(6)
    result = gptq(weight, gram, Scheme(4, 32), torch.float32)
    assert reason in result.fallback
    assert (dequantize(result.quantized) - weight).abs().max() < 1.0


def test_scales_are_stored_in_the_checkpoints_dtype_and_codes_in_the_schemes_range():
    weight, gram = problem(7)
    for scheme in (Scheme(3, 32), Scheme(4, 32, symmetric=False), Scheme(8)):
        quantized = gptq(weight, gram, scheme, torch.bfloat16).quantized
        assert quantized.scale.dtype is torch.bfloat16
        assert quantized.codes.min() >= scheme.lowest
        assert quantized.codes.max() <= scheme.highest
