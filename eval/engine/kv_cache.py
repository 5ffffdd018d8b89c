"""The paged KV cache's memory: one tensor, [layers, 2, blocks, block_size, kv_heads, head_dim], and int8's scales.

The one idea: a token's slot is block * block_size + offset, in every layer alike, so a step needs one slot per token
and one block table per request.

int8 is symmetric per token and kv head: a key or value x is kept as round(x / s) with s = max|x| / 127, in float32
beside the blocks, so that no element is off by more than s / 2 and 64 elements take 68 bytes. Attention over such a
cache is then off, in each element, by at most max(s of the values) / 2 + tanh(e / 2) * (the range of that element over
the values that the query sees), with e = scaling * |query|_1 * max(s of the keys) / 2: no score moves by more than e
(soft-capping moves it less), and so the weights' total variation by no more than tanh(e / 2).
"""

import math
from dataclasses import dataclass

import torch

from eval.engine import huge_pages
from eval.errors import EvalError

CPU_DEFAULT_BYTES = 2 * 2**30
GPU_DEFAULT_SHARE = 0.6

MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = MODEL_DTYPES | {"int8": torch.int8}
LARGEST_CODE = 127


@dataclass(frozen=True)
class KVGeometry:
    """What one token keeps per model: [layers, 2, kv_heads, head_dim] values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        row_bytes = self.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == torch.int8 else 0)
        return self.num_layers * 2 * block_size * self.num_kv_heads * row_bytes


def choose_num_blocks(
    block_bytes: int,
    block_size: int,
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
    if kv_cache_bytes < block_bytes:
        raise EvalError(f"kv_cache_bytes is {kv_cache_bytes}: one KV block of this model takes {block_bytes} bytes")
    wanted = max_num_seqs * -(-max_total_tokens // block_size)
    return min(wanted, kv_cache_bytes // block_bytes)


@dataclass(frozen=True)
class KVCache:
    """`blocks` [layers, 2, blocks, block_size, kv_heads, head_dim]; `scales` [layers, 2, blocks, block_size, kv_heads],
    float32, where the blocks are int8, else None."""

    blocks: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, geometry: KVGeometry, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """Uninitialised: no slot is read before it is written. On a CPU in huge pages, since attention reads short rows
        that lie all over the cache."""
        rows = (geometry.num_layers, 2, num_blocks, block_size, geometry.num_kv_heads)
        shape = (*rows, geometry.head_dim)
        if device.type == "cpu":
            memory = huge_pages.region(math.prod(shape) * dtype.itemsize)
            blocks = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
        else:
            blocks = torch.empty(shape, dtype=dtype, device=device)
        return cls(blocks, torch.empty(rows, device=device) if dtype == torch.int8 else None)

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def block_size(self) -> int:
        return self.blocks.shape[3]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that is kept per slot; the first three axes are layer, key or value, block."""
        return (self.blocks,) if self.scales is None else (self.blocks, self.scales)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep key and value [slots, kv_heads, head_dim], rounded to the cache's dtype, in `slots` of a layer."""
        for which, rows in enumerate((key, value)):
            if self.scales is None:
                self.blocks[layer, which].flatten(0, 1)[slots] = rows.to(self.dtype)
            else:
                codes, scales = quantize_rows(rows)
                self.blocks[layer, which].flatten(0, 1)[slots] = codes
                self.scales[layer, which].flatten(0, 1)[slots] = scales

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer's `slots` as attention sees them: [slots, kv_heads, head_dim] in float32."""
        keys, values = (rows[slots].float() for rows in self.blocks[layer].flatten(1, 2))
        if self.scales is None:
            return keys, values
        key_scales, value_scales = (scales[slots].unsqueeze(-1) for scales in self.scales[layer].flatten(1, 2))
        return keys * key_scales, values * value_scales


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [..., head_dim] and float32 scales [...]: rows = codes * scales, to half a scale. A row that is not
    finite gets a scale that is not."""
    rows = rows.float()
    scales = rows.abs().amax(dim=-1) / LARGEST_CODE
    codes = (rows / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)).round()
    return codes.nan_to_num().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8), scales
