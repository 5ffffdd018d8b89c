"""Paged attention in C++ for the CPU: `paged_attention.cpp` behind the backend interface.

The one idea: what is equal in every layer of a step (its tables) or in every step of a layer (its shape) is written
into a C struct once, so that a call passes pointers and nothing else.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch

from eval.engine.attention import StepContext
from eval.engine.kv_cache import KVCache
from quantize.native_build import load_native

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KV_DTYPES = DTYPES | {torch.int8: 3}
SOURCE = Path(__file__).parent / "paged_attention.cpp"


class Tables(ctypes.Structure):
    _fields_ = (
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_requests", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class Shape(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
    )


class Cache(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    )


def tables_of(step: StepContext) -> Tables:
    """What is equal in every layer of a step; its pointers are good as long as the step lives."""
    return Tables(
        step.query_starts.data_ptr(),
        step.context_lens.data_ptr(),
        step.block_tables.data_ptr(),
        step.slot_mapping.data_ptr(),
        step.block_tables.stride(0),
        step.context_lens.shape[0],
        step.slot_mapping.shape[0],
        step.kv.block_size,
        torch.get_num_threads(),
    )


def caches_of(kv: KVCache) -> list[Cache]:
    """Where each layer's keys and values lie, and their scales."""
    return [
        Cache(*(part.data_ptr() for tensor in kv.tensors for part in tensor[layer])) for layer in range(len(kv.blocks))
    ]


def native_library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where this machine cannot build it."""
    library = load_native(SOURCE)
    if library is not None:
        stride, pointer = ctypes.c_int64, ctypes.c_void_p
        rows = (pointer, stride, stride)
        library.paged_attention.argtypes = (pointer, pointer, pointer, *rows, *rows, *rows, pointer)
        library.paged_attention.restype = None
    return library


def supports(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel has this case; asked before it is built."""
    padded = -(-head_dim // 16)
    known = dtype in DTYPES and kv_dtype in KV_DTYPES
    return device.type == "cpu" and known and (padded <= 8 or padded in (12, 16))


class NativeAttention:
    """The kernel with float32 accumulation over keys and values of any of KV_DTYPES."""

    name = "native-cpu"

    def __init__(self, library: ctypes.CDLL):
        self._paged_attention = library.paged_attention
        self._step = Tables()
        self._current: StepContext | None = None
        self._shapes: dict[tuple[Any, ...], Shape] = {}
        self._layers: list[Cache] = []
        self._kv: KVCache | None = None

    def attend(
        self,
        step: StepContext,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        if step is not self._current:
            self._begin(step)
        shape_key = (query.shape[1], key.shape[1], query.shape[2], scaling, window, softcap, query.dtype, step.kv.dtype)
        shape = self._shapes.get(shape_key)
        if shape is None:
            shape = self._shapes[shape_key] = Shape(
                *shape_key[:3], window or 0, scaling, softcap or 0.0, DTYPES[query.dtype], KV_DTYPES[step.kv.dtype]
            )
        output = torch.empty(query.shape, dtype=query.dtype)
        q, k, v = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (query, key, value))
        self._paged_attention(
            ctypes.byref(self._step),
            ctypes.byref(shape),
            ctypes.byref(self._layers[layer]),
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            output.data_ptr(),
        )
        return output

    def _begin(self, step: StepContext) -> None:
        self._current = step
        if step.kv is not self._kv:
            self._kv = step.kv
            self._layers = caches_of(step.kv)
        self._step = tables_of(step)
