"""Makes a bundle file from a checkpoint, layer by layer; a stopped run can be continued."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.model.bundles.bundle_file import bundle_path, header_block, header_facts, tables_crc
from hotcold.model.bundles.geometry import BLOCK_BYTES, BundleGeometry
from hotcold.model.byte_sizes import size_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import ARTIFACTS, place_to_write
from hotcold.model.files.atomic_write import part_of, remove_old_parts, sync_folder
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.down_outputs import down_lengths, read_down_outputs
from hotcold.model.weights.ffn import ffn_layers, read_gates
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.block_rows import BlockRows
from hotcold.numba_kernels.load.convert import row_lengths
from hotcold.numba_kernels.storage.neuron_file import bundle_checksums

OnBytes = Callable[[int, int], None]  # bytes written, and in all
_WRITE_BYTES = 16 << 20  # at once
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system that has none


def write_bundles(
    model_path: Path,
    config: ModelConfig,
    order: Sequence[np.ndarray] | np.ndarray,
    order_name: str,
    weight_dtype: str = "",
    on_bytes: OnBytes = lambda written, total: None,
    accept_existing: bool = False,
) -> Path:
    """Write the model's bundle file atomically; return its path.

    `config` has the dtypes that matrices are loaded in; order[l] int32 is the order of layer l's
    bundles, ascending in a mixture. Layers that a stopped run with the same
    arguments has written are kept. An existing file is replaced; with `accept_existing` it is
    returned, and a process that is writing it is waited for. On a file system without locks a
    process writes a file of its own, and a stopped run leaves none.
    Errors:  ArtifactError where it cannot be written; CheckpointError, UsageError of the weights
    """
    geometry, identity = BundleGeometry.of(config), ModelIdentity.of(model_path)
    path = bundle_path(model_path, geometry)
    if not (accept_existing and path.exists()):
        path = place_to_write(model_path, path)
    part, own = path.with_name(f"{path.name}.part"), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_part(part, path, waits=accept_existing)
        if descriptor < 0:
            remove_old_parts(path)  # of killed runs
            part = own = part_of(path)
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as problem:
        raise ArtifactError(
            f"{path}: cannot be written ({problem.strerror}); name another folder in {ARTIFACTS}"
        ) from None
    try:
        if accept_existing and path.exists():
            part.unlink()
            return path
        header = header_block(geometry, identity, order_name, None)
        done = _begin(descriptor, part, geometry, header, order)
        _write_layers(descriptor, model_path, config, geometry, order, done, weight_dtype, on_bytes)
        whole = header_block(geometry, identity, order_name, tables_crc(descriptor, geometry))
        os.pwrite(descriptor, whole, 0)
        os.fsync(descriptor)
        part.replace(path)
        sync_folder(path.parent)
    except OSError as problem:
        raise ArtifactError(
            f"{path}: cannot be written ({problem.strerror}); run the same again once that is "
            "mended, it goes on"
        ) from None
    finally:
        os.close(descriptor)
        if own is not None:
            own.unlink(missing_ok=True)
    return path


def _open_part(part: Path, path: Path, waits: bool) -> int:
    """Open and lock the unfinished file; -1 where the file system has no locks.

    Errors:  ArtifactError where another process has it locked, unless `waits`; OSError
    """
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            # Another process may have finished and renamed it meanwhile.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(part), os.fstat(descriptor)):
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            text = f"{path}: another process is making it; wait for that one"
            raise ArtifactError(text) from None
        except OSError as problem:
            is_new = not os.fstat(descriptor).st_size
            os.close(descriptor)
            if problem.errno not in _NO_LOCKS:
                raise
            if is_new:
                part.unlink(missing_ok=True)
            return -1
        os.close(descriptor)


def _begin(
    descriptor: int,
    part: Path,
    geometry: BundleGeometry,
    header: bytes,
    order: Sequence[np.ndarray] | np.ndarray,
) -> np.ndarray:
    """Return which layers of the unfinished file are complete; start anew after other arguments."""
    num_layers = geometry.num_layers
    size = os.fstat(descriptor).st_size
    table = np.concatenate(order).astype("<i4").tobytes()
    found = os.pread(descriptor, BLOCK_BYTES, 0)
    goes_on = header_facts(found) is not None and found == header
    if goes_on and os.pread(descriptor, len(table), geometry.order_start) == table:
        done = os.pread(descriptor, num_layers, geometry.done_start)
        return np.frombuffer(done.ljust(num_layers, b"\0"), np.uint8) == 1
    free = shutil.disk_usage(part.parent).free + size
    if geometry.file_bytes > free:
        with suppress(OSError):
            part.unlink()
        raise ArtifactError(
            f"{part.parent}: the bundle file takes {size_text(geometry.file_bytes)}, and "
            f"{size_text(free)} are free there; make room, or use a smaller --dtype"
        )
    try:
        os.ftruncate(descriptor, 0)
        os.fsync(descriptor)  # no bytes of an earlier file may pass for this one's
        os.ftruncate(descriptor, geometry.file_bytes)
    except OSError:  # an incomplete start is of no use
        part.unlink(missing_ok=True)
        raise
    _write_all(descriptor, table, geometry.order_start)
    os.fsync(descriptor)  # the header is written after the order it stands for
    _write_all(descriptor, header, 0)
    return np.zeros(num_layers, bool)


def _write_layers(
    descriptor: int,
    model_path: Path,
    config: ModelConfig,
    geometry: BundleGeometry,
    order: Sequence[np.ndarray] | np.ndarray,
    done: np.ndarray,
    weight_dtype: str,
    on_bytes: OnBytes,
) -> None:
    missing = np.flatnonzero(~done).tolist()
    written = sum([geometry.span(layer)[1] for layer in np.flatnonzero(done).tolist()])
    neurons = [ids.astype(np.int32) for ids in order]
    if geometry.is_mixture:
        neurons = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
    with TensorReader(Checkpoint(model_path), None, requested_dtype(weight_dtype)) as reader:
        for layer in missing:
            own = _Layer.read(reader, geometry, config, layer, neurons)
            table = int(geometry.layer_firsts[layer])
            for bundles, checksums, norms, (first, place) in own.bundles():
                _write_all(descriptor, bundles, place)
                at = geometry.checksums_start + (table + first) * 8
                _write_all(descriptor, checksums, at)
                at = geometry.norms_start + (table + first) * geometry.bundle_neurons * 4
                _write_all(descriptor, norms, at)
                written += bundles.nbytes
                on_bytes(written, geometry.file_bytes)
            os.fdatasync(descriptor)  # the layer is on the disk before its flag is
            os.posix_fadvise(descriptor, *geometry.span(layer), os.POSIX_FADV_DONTNEED)
            _write_all(descriptor, b"\1", geometry.done_start + layer)


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer on its way into bundles: its matrices by block, and all neurons' norms."""

    geometry: BundleGeometry
    number: int
    sizes: Sequence[int]
    matrices: list[tuple[np.ndarray, ...]]  # gate, up and down of each block
    norms: np.ndarray

    @classmethod
    def read(
        cls,
        reader: TensorReader,
        geometry: BundleGeometry,
        config: ModelConfig,
        layer: int,
        neurons: Sequence[np.ndarray],
    ) -> _Layer:
        sizes = config.layers[layer].ffn.block_sizes
        if geometry.has_outputs:
            none = np.empty(0, np.int32)
            alone = [neurons[at] if at == layer else none for at in range(config.num_layers)]
            (weights,) = ffn_layers(reader, config, neurons, [layer], has_matrices=False)
            down = read_down_outputs(reader, config, alone)
            roles = *read_gates(reader, config, weights), down
            blocks = [tuple(_block(role, layer, n) for role in roles) for n in range(len(sizes))]
            return cls(geometry, layer, sizes, blocks, down_lengths(down))
        (weights,) = ffn_layers(reader, config, neurons, [layer])
        ends = np.cumsum(sizes)[:-1]
        of_roles = (
            np.split(rows, ends) if len(rows) else [rows] * len(sizes)
            for rows in (weights.gate, weights.up, weights.down)
        )
        blocks = [*zip(*of_roles, strict=True)]
        return cls(geometry, layer, sizes, blocks, row_lengths(weights.down))

    def bundles(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]]:
        """Yield some bundles, their checksums and norms, the first one's number and place.

        Shapes:  bundles (N, bytes) uint8; the number is within the layer, the place in the file
        """
        geometry, count, neuron, number = self.geometry, self.geometry.bundle_neurons, 0, 0
        spans = geometry.block_spans(self.number)
        for block, (size, (place, _)) in enumerate(zip(self.sizes, spans, strict=True)):
            own = geometry.blocks[self.number][block]
            parts = geometry.part_bytes(self.number, block)
            lengths = np.zeros((own.num_bundles, count), "<f4")
            lengths.reshape(-1)[:size] = self.norms[neuron : neuron + size]
            step = max(1, _WRITE_BYTES // sum(parts))
            for first in range(0, own.num_bundles, step):
                last = min(first + step, own.num_bundles)
                found = np.zeros((last - first, sum(parts)), np.uint8)
                self._fill(found, block, first, parts[0])
                checksums = np.empty((last - first, 2), "<u4")
                bundle_checksums(found, parts[0], checksums)
                at = number + first, place + first * sum(parts)
                yield found, checksums, lengths[first:last], at
            neuron, number = neuron + size, number + own.num_bundles

    def _fill(self, bundles: np.ndarray, block: int, first: int, second_part: int) -> None:
        """Write rows of a block into its bundles number `first`, first + 1 and so on."""
        own, count = self.geometry.blocks[self.number][block], self.geometry.bundle_neurons
        gate, up, _ = own.row_bytes
        places = 0, second_part, second_part + count * up
        if own.outputs:
            places = 0, count * gate, second_part
        numbers = count, count, own.outputs or count
        for rows, at, number in zip(self.matrices[block], places, numbers, strict=True):
            if not len(rows):
                continue
            found = rows[first * number : (first + len(bundles)) * number]
            placed = np.zeros((len(bundles) * number, rows.shape[1] * rows.itemsize), np.uint8)
            placed[: len(found)] = found.view(np.uint8).reshape(len(found), placed.shape[1])
            placed = placed.reshape(len(bundles), -1)
            bundles[:, at : at + placed.shape[1]] = placed


def _block(rows: BlockRows, layer: int, block: int) -> np.ndarray:
    """A block's matrix; without rows where the role has no blocks."""
    return rows.matrix(layer, block) if rows.places.shape[1] else rows.arrays[0].reshape(0, 1)


def _write_all(descriptor: int, content: bytes | np.ndarray, place: int) -> None:
    array = content if isinstance(content, np.ndarray) else np.frombuffer(content, np.uint8)
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], place + done)
