"""One GPU through CuPy: memory, copies, graphs, events and matrix products of one service.

Work goes to one stream, in order; copies that run ahead of it go to a second one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from hotcold.cuda_kernels.device import DeviceMemoryError
from hotcold.cuda_kernels.kernels import (
    CLAMPED_SILU,
    DRELU,
    FATRELU,
    GELU,
    GELU_TANH,
    RELU,
    RELU2,
    SILU,
    CudaKernels,
)

_SMI_S = 20.0
_LEAST_CONTEXT_BYTES, _MOST_CONTEXT_BYTES = 128 << 20, 1 << 30  # with cuBLAS, of any GPU
_MAPPED = 2  # cudaHostRegisterMapped: kernels may use the memory
# Constants of cublas_api.h, which CuPy does not export.
_OP_N, _OP_T, _COMPUTE_32F, _GEMM_DEFAULT = 0, 1, 68, -1
# By codes of functions, of g = gate . x and a threshold h; factors of f = up . x.
_CUT_OFF = "(g <= h ? 0.0f : g)"
_EXPRESSIONS = {
    RELU: _CUT_OFF,
    FATRELU: _CUT_OFF,
    DRELU: _CUT_OFF,
    RELU2: "(g <= 0 ? 0.0f : g * g)",
    SILU: "(g / (1.0f + expf(-g)))",
    GELU: "(0.5f * g * (1.0f + erff(g * 0.70710678118654752f)))",
    GELU_TANH: "(0.5f * g * (1.0f + tanhf(0.79788456f * (g + 0.044715f * g * g * g))))",
    CLAMPED_SILU: "((g > h ? h : g) / (1.0f + expf(-1.702f * (g > h ? h : g))))",
}
_FACTORS = {
    DRELU: "(f <= 0 ? 0.0f : f)",
    CLAMPED_SILU: "((f > h ? h : f < -h ? -h : f) + 1.0f)",
}
# The nearest bfloat16, ties to even; a NaN stays one.
_TO_BFLOAT16 = """
unsigned int bits = __float_as_uint(x);
y = (bits & 0x7fffffffu) > 0x7f800000u ? (short)0x7fc0
                                       : (short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
"""


class CupyDevice:
    """The first GPU that this process sees, as a `Device` of `actors.attention.cuda.device`."""

    def __init__(self) -> None:
        """Open it. Errors: RuntimeError, in one line, where it cannot be used."""
        try:
            import cupy
            from cupy.cuda import runtime
        except Exception as problem:  # a CuPy for another CUDA fails in many ways
            raise RuntimeError(f"CuPy cannot be imported: {_line(problem)}") from problem
        self.xp = cupy
        self._runtime = runtime
        try:
            self.name = runtime.getDeviceProperties(0)["name"].decode()
            free_before = _free_bytes_of(runtime.deviceGetPCIBusId(0))
            runtime.setDevice(0)
            free_at_first = _free_at_first(free_before, *runtime.memGetInfo())
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._copies = cupy.cuda.Stream(non_blocking=True)
            self._blas = self._open_blas()
            self.kernels = CudaKernels()
            used = int(free_at_first - runtime.memGetInfo()[0])  # by others, too, meanwhile
            self._context_bytes = min(max(used, _LEAST_CONTEXT_BYTES), _MOST_CONTEXT_BYTES)
        except Exception as problem:  # CuPy's and CUDA's errors have no common base
            raise RuntimeError(f"the GPU cannot be used: {_line(problem)}") from problem
        self._pool = cupy.get_default_memory_pool()
        self._functions: dict[tuple[int, bool], Any] = {}

    def _open_blas(self) -> Any:
        from cupy.cuda import cublas

        return cublas.create()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        try:
            return self.xp.empty(shape, dtype)
        except Exception as problem:
            if self._is_memory_error(problem):
                raise DeviceMemoryError(_line(problem)) from problem
            raise

    def upload(self, target: Any, source: np.ndarray) -> None:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"{source.shape} {source.dtype} for {target.shape} {target.dtype}")
        if source.nbytes == 0:
            return
        source = np.ascontiguousarray(source)
        if target.flags.c_contiguous:
            self._copy_in(target, source, self._stream)
        else:
            row_bytes = source.strides[0]
            self._runtime.memcpy2DAsync(
                target.data.ptr,
                target.strides[0],
                source.ctypes.data,
                row_bytes,
                row_bytes,
                source.shape[0],
                self._runtime.memcpyHostToDevice,
                self._stream.ptr,
            )
        self._stream.synchronize()

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        num_items = int(np.prod(shape))
        memory = self.xp.cuda.alloc_pinned_memory(max(1, num_items * np.dtype(dtype).itemsize))
        items: np.ndarray = np.frombuffer(memory, dtype, num_items)  # it holds the memory
        return items.reshape(shape)

    def register(self, address: int, num_bytes: int) -> str:
        try:
            self._runtime.hostRegister(address, num_bytes, _MAPPED)
        except Exception as problem:
            return _line(problem)
        return ""

    def mapped(self, array: np.ndarray) -> Any:
        if array.nbytes == 0:
            return self.xp.empty(array.shape, array.dtype)
        at = self._runtime.pointerGetAttributes(array.ctypes.data).devicePointer
        cuda = self.xp.cuda
        memory = cuda.UnownedMemory(at, array.nbytes, array, 0)
        return self.xp.ndarray(array.shape, array.dtype, cuda.MemoryPointer(memory, 0))

    def unregister(self, address: int) -> None:
        self._stream.synchronize()
        self._copies.synchronize()
        self._runtime.hostUnregister(address)

    def copy_in(self, target: Any, source: np.ndarray) -> None:
        self._copy_in(target, source, self._stream)

    def _copy_in(self, target: Any, source: np.ndarray, stream: Any) -> None:
        if source.nbytes:
            kind = self._runtime.memcpyHostToDevice
            self._runtime.memcpyAsync(
                target.data.ptr, source.ctypes.data, source.nbytes, kind, stream.ptr
            )

    def copy_out(self, target: np.ndarray, source: Any) -> None:
        kind, to, start = self._runtime.memcpyDeviceToHost, target.ctypes.data, source.data.ptr
        if target.ndim == 1:
            self._runtime.memcpyAsync(to, start, target.nbytes, kind, self._stream.ptr)
            return
        height, width_bytes = target.shape[0], target.shape[1] * target.itemsize
        self._runtime.memcpy2DAsync(
            to,
            target.strides[0],
            start,
            source.strides[0],
            width_bytes,
            height,
            kind,
            self._stream.ptr,
        )

    def stream(self) -> Any:
        return self._stream

    def capture(self, work: Callable[[], None]) -> Any:
        with self._stream:
            self._stream.begin_capture()
            try:
                work()
            except BaseException:
                self._end_failed_capture()
                raise
            return self._stream.end_capture()

    def _end_failed_capture(self) -> None:
        with suppress(Exception):  # the first error is raised
            self._stream.end_capture()

    def launch(self, graph: Any) -> None:
        graph.launch(self._stream)

    def record(self, *, spin: bool) -> Any:
        event = self.xp.cuda.Event(block=not spin, disable_timing=True)
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        event.synchronize()

    def record_copies(self) -> Any:
        event = self.xp.cuda.Event(block=True, disable_timing=True)
        event.record(self._copies)
        return event

    def copy_ahead(self, target: Any, source: np.ndarray) -> None:
        self._copy_in(target, source, self._copies)

    def follow_copies(self) -> None:
        self._stream.wait_event(self.record_copies())

    def hold_copies(self, event: Any) -> None:
        self._copies.wait_event(event)

    def multiply(self, a: Any, b: Any, out: Any, *, b_has_rows: bool, add: bool) -> None:
        # cuBLAS is column-major, so it computes out^T = b a^T.
        from cupy.cuda import cublas

        runtime = self._runtime
        kinds = {
            "float32": runtime.CUDA_R_32F,
            "uint16": runtime.CUDA_R_16F,
            "int16": runtime.CUDA_R_16BF,
        }
        kind, size = kinds[a.dtype.name], a.dtype.itemsize
        one, beta = np.float32(1).reshape(1), np.float32(1 if add else 0).reshape(1)
        (*several, num_tokens, depth), num_out = a.shape, out.shape[-1]
        if 0 in (*several, num_tokens, depth, num_out):
            return
        sizes = self._blas, _OP_T if b_has_rows else _OP_N, _OP_N, num_out, num_tokens, depth
        (b_place, a_place), out_place = (
            ((x.data.ptr, kind, x.strides[-2] // size) for x in (b, a)),
            (out.data.ptr, runtime.CUDA_R_32F, out.strides[-2] // 4),
        )
        how = _COMPUTE_32F, _GEMM_DEFAULT
        with self._stream:
            if not several:
                cublas.gemmEx(
                    *sizes, one.ctypes.data, *b_place, *a_place, beta.ctypes.data, *out_place, *how
                )
                return
            steps = b.strides[0] // size, a.strides[0] // size, out.strides[0] // 4
            cublas.gemmStridedBatchedEx(
                *sizes, one.ctypes.data, *b_place, steps[0], *a_place, steps[1],
                beta.ctypes.data, *out_place, steps[2], *several, *how,
            )  # fmt: skip

    def narrow(self, x: Any, dtype: Any) -> Any:
        kind = np.dtype(dtype)
        if kind == np.float32:
            return x
        if kind == np.uint16:
            return x.astype(np.float16).view(np.uint16)
        out = self.xp.empty(x.shape, np.int16)
        name = "hotcold_to_bfloat16"
        self.xp.ElementwiseKernel("float32 x", "int16 y", _TO_BFLOAT16, name)(x, out)
        return out

    def activate(self, function: Any, gates: Any, factors: Any | None) -> None:
        code = function.code
        key = code, factors is not None
        if key not in self._functions:
            inputs = "float32 x, float32 h" + (", float32 f" if key[1] else "")
            factor = f" * {_FACTORS.get(code, 'f')}" if key[1] else ""
            self._functions[key] = self.xp.ElementwiseKernel(
                inputs,
                "float32 y",
                f"float g = x; y = {_EXPRESSIONS[code]}{factor};",
                f"hotcold_activate_{code}_{int(key[1])}",
            )
        arrays = (gates,) if factors is None else (gates, factors)
        self._functions[key](arrays[0], np.float32(function.threshold), *arrays[1:], gates)

    def mark(self) -> Any:
        event = self.xp.cuda.Event()
        event.record(self._stream)
        return event

    def elapsed_ms(self, first: Any, last: Any) -> float:
        return float(self.xp.cuda.get_elapsed_time(first, last))

    def used_bytes(self) -> int:
        # Of the device's free memory, other programs take their part at any time.
        return self._context_bytes + int(self._pool.total_bytes())

    def free_bytes(self) -> int:
        """What the device's driver says is free now."""
        return int(self._runtime.memGetInfo()[0])

    def limit(self, num_bytes: int) -> None:
        self._pool.set_limit(size=max(1, num_bytes))

    def release(self) -> None:
        self._stream.synchronize()
        self._pool.free_all_blocks()

    def explain(self, error: BaseException) -> str:
        kinds = ("CUDARuntimeError", "CUDADriverError", "CUBLASError")
        if self._is_memory_error(error) or type(error).__name__ not in kinds:
            return ""
        return _line(error)

    def _is_memory_error(self, error: BaseException) -> bool:
        text = str(error)
        return isinstance(error, MemoryError) or any(
            mark in text
            for mark in (
                "cudaErrorMemoryAllocation",
                "CUDA_ERROR_OUT_OF_MEMORY",
                "CUBLAS_STATUS_ALLOC_FAILED",
            )
        )


def _free_bytes_of(bus_id: str) -> int | None:
    """Free bytes before this process allocates any, by nvidia-smi; None where that fails.

    CUDA itself would allocate a few hundred MiB before it answers.
    """
    query = ["nvidia-smi", f"--id={bus_id}", "--query-gpu=memory.free"]
    try:
        found = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SMI_S,
            check=True,
        )
        return int(found.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _free_at_first(free_before: int | None, free: int, total: int) -> int:
    """Free bytes before this process allocated any.

    `free_before` is of the whole card, which says nothing about a MIG instance.
    """
    return free if free_before is None or free_before > total else free_before


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
