"""One pytorch_model*.bin file, with the interface of SafetensorsFile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.errors import CheckpointError, first_line, refuse_pointer_file
from hotcold.model.files.safetensors_file import TensorEntry, WeightFile
from hotcold.numba_kernels.formats import FLOAT_FORMATS

_FORMAT_NAMES = {f"torch.{kind.name}": kind.short.upper() for kind in FLOAT_FORMATS.values()}


class TorchFile(WeightFile):
    """The tensors of a file written by torch.save; nothing in it is executed.

    Errors:  CheckpointError where it is damaged or holds anything but tensors
    """

    def __init__(self, path: Path):
        self.path, self.paths = path, (path,)
        self._tensors = _load(path)
        self.entries = {
            name: TensorEntry(
                _FORMAT_NAMES.get(str(tensor.dtype), str(tensor.dtype)),
                tuple(tensor.shape),
                0,
                tensor.nbytes,
            )
            for name, tensor in self._tensors.items()
        }

    def array(self, name: str) -> np.ndarray:
        """Return a view of the tensor's bits: float32, uint16 (float16) or int16 (bfloat16)."""
        import torch

        tensor = self._tensors[name].detach().contiguous()
        if tensor.dtype == torch.float32:
            return tensor.numpy()
        bits = tensor.view(torch.int16).numpy()
        return bits.view(np.uint16) if tensor.dtype == torch.float16 else bits

    def stored_bytes(self, name: str) -> np.ndarray:
        """Return the tensor's bytes, whatever its format: uint8."""
        import torch

        items: np.ndarray = self._tensors[name].detach().reshape(-1).view(torch.uint8).numpy()
        return items


def _load(path: Path) -> dict[str, Any]:
    import torch

    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of torch before 1.6 are not zip archives and cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # a damaged pickle fails in any way
        refuse_pointer_file(path, CheckpointError)
        reason = first_line(problem, 80)
        raise CheckpointError(
            f"{path}: torch cannot load it ({reason}); download it again"
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str)
        and isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        for name, tensor in content.items()
    ):
        raise CheckpointError(f"{path}: holds other things than tensors; use a safetensors model")
    return content
