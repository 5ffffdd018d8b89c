"""The paged KV cache's memory: one tensor, [layers, 2, blocks, block_size, kv_heads, head_dim].

The one idea: a token's slot is block * block_size + offset, in every layer alike, so a step needs one slot per token
and one block table per request.
"""

from dataclasses import dataclass

import torch

from eval.errors import EvalError

CPU_DEFAULT_BYTES = 2 * 2**30
GPU_DEFAULT_SHARE = 0.6

KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class KVGeometry:
    """What one token keeps per model: [layers, 2, kv_heads, head_dim] values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return self.num_layers * 2 * block_size * self.num_kv_heads * self.head_dim * dtype.itemsize


def choose_num_blocks(
    geometry: KVGeometry,
    block_size: int,
    dtype: torch.dtype,
    max_num_seqs: int,
    max_total_tokens: int,
    device: torch.device,
    kv_cache_bytes: int | None,
) -> int:
    """Enough blocks for `max_num_seqs` requests of `max_total_tokens` each, within `kv_cache_bytes`. Without a limit:
    2 GiB on a CPU (whose pages cost nothing until they are written), 60 % of the free memory on a GPU. Raises
    EvalError when the limit holds not even one block."""
    if kv_cache_bytes is None:
        kv_cache_bytes = CPU_DEFAULT_BYTES
        if device.type == "cuda":
            kv_cache_bytes = int(GPU_DEFAULT_SHARE * torch.cuda.mem_get_info(device)[0])
    block_bytes = geometry.block_bytes(block_size, dtype)
    if kv_cache_bytes < block_bytes:
        raise EvalError(f"kv_cache_bytes is {kv_cache_bytes}: one KV block of this model takes {block_bytes} bytes")
    wanted = max_num_seqs * -(-max_total_tokens // block_size)
    return min(wanted, kv_cache_bytes // block_bytes)


def allocate_kv(
    geometry: KVGeometry, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[layers, 2, blocks, block_size, kv_heads, head_dim], uninitialised: no slot is read before it is written."""
    shape = (geometry.num_layers, 2, num_blocks, block_size, geometry.num_kv_heads, geometry.head_dim)
    return torch.empty(shape, dtype=dtype, device=device)
