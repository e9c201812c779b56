"""A bundle file: header and tables, read within bounds, checked against the model and its bytes."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.bundles.geometry import BLOCK_BYTES, BundleGeometry
from hotcold.model.config.weight_formats import numpy_dtype
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.model.weights.down_outputs import column_lengths
from hotcold.numba_kernels.load.convert import row_lengths
from hotcold.numba_kernels.storage.neuron_file import bundle_checksums

_MAGIC = b"hotcold bundles\n"
_HEAD = len(_MAGIC) + 8  # magic, then length and CRC-32 of the facts, JSON, that follow
_MAKE_AGAIN = "make it again with `hotcold pack`"
_READ_BYTES = 16 << 20
_NORM_ERROR = 1e-5  # CPUs round differently


@dataclass(frozen=True, eq=False)
class BundleFile:
    """The tables of a bundle file; bundles of all layers are numbered one after another.

    order[l] says which neuron of layer l each bundle is; those of a mixture are in the order of
    neurons.
    Shapes:  order L times (bundles of the layer,); checksums (bundles, 2), of a bundle's two parts;
             norms (bundles, K), the lengths of its neurons' down rows
    Dtypes:  order int32, checksums uint32, norms float32
    """

    path: Path
    geometry: BundleGeometry
    order: list[np.ndarray]
    checksums: np.ndarray
    norms: np.ndarray
    order_name: str  # the origin of the order: a profile's digest, or "checkpoint"

    def places(self) -> list[np.ndarray]:
        """Return, for each layer, the place of each of its bundles: int32."""
        return [np.argsort(layer).astype(np.int32) for layer in self.order]


def bundle_path(model_path: str | Path, geometry: BundleGeometry) -> Path:
    """Return the path of a model's bundle file."""
    return artifact_path(model_path, geometry.file_name)


def _facts_of(geometry: BundleGeometry) -> dict[str, Any]:
    """Of models without experts as files had them before there were mixtures."""
    facts = asdict(geometry) | {"layer_bundles": list(geometry.layer_bundles)}
    names = "blocks", "num_outputs", "slot_neuron_bytes", "more_bytes"
    blocks = [facts.pop(name) for name in names]
    if geometry.has_outputs:  # too many for a header
        return facts | {"blocks": zlib.crc32(json.dumps(blocks).encode())}
    if geometry.is_mixture:
        return facts
    del facts["layer_bundles"], facts["bundle_neurons"], facts["is_mixture"]
    return facts | {
        "num_layers": geometry.num_layers,
        "num_neurons": geometry.num_bundles // geometry.num_layers,
    }


def header_block(
    geometry: BundleGeometry, identity: ModelIdentity, order_name: str, tables_crc: int | None
) -> bytes:
    """Return the file's first block; without `tables_crc` the file is marked as incomplete."""
    facts = {
        "geometry": _facts_of(geometry),
        **identity.facts(),
        "order_name": order_name,
        "tables_crc": tables_crc,
    }
    text = json.dumps(facts, sort_keys=True).encode()
    head = np.array([len(text), zlib.crc32(text)], "<u4").tobytes()
    block = _MAGIC + head + text
    if len(block) > BLOCK_BYTES:
        raise ValueError(f"a header of {len(block)} bytes")
    return block.ljust(BLOCK_BYTES, b"\0")


def header_facts(block: bytes) -> dict[str, Any] | None:
    """Return the facts of a header; None for a damaged one."""
    if not block.startswith(_MAGIC) or len(block) < BLOCK_BYTES:
        return None
    length, crc = (int(word) for word in np.frombuffer(block[len(_MAGIC) : _HEAD], "<u4"))
    text = block[_HEAD : _HEAD + length]
    if length > BLOCK_BYTES - _HEAD or zlib.crc32(text) != crc:
        return None
    facts = json.loads(text)
    return facts if isinstance(facts, dict) else None


def read_bundle_file(path: Path, geometry: BundleGeometry, identity: ModelIdentity) -> BundleFile:
    """Read header and tables of a bundle file of the model `identity`.

    Errors:  ArtifactError where it is missing, incomplete, damaged, or of another model, format or
             version
    """
    try:
        with path.open("rb") as stream:
            return _read(path, stream, geometry, identity)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: there is no bundle file; {_MAKE_AGAIN}") from None
    except OSError as problem:
        raise ArtifactError(f"{path}: cannot be read ({problem.strerror})") from None


def _read(path: Path, stream: Any, geometry: BundleGeometry, identity: ModelIdentity) -> BundleFile:
    facts = header_facts(stream.read(BLOCK_BYTES))
    if facts is None:
        raise ArtifactError(f"{path}: is no bundle file, or a damaged one; {_MAKE_AGAIN}")
    identity.require_own(path, facts, _MAKE_AGAIN)
    if facts.get("geometry") != _facts_of(geometry):
        raise ArtifactError(f"{path}: holds rows of another format or version; {_MAKE_AGAIN}")
    size = os.fstat(stream.fileno()).st_size
    if facts.get("tables_crc") is None or size != geometry.file_bytes:
        raise ArtifactError(
            f"{path}: is not whole, {size} of {geometry.file_bytes} bytes; {_MAKE_AGAIN}"
        )
    stream.seek(geometry.order_start)
    tables = stream.read(geometry.done_start - geometry.order_start)
    if zlib.crc32(tables) != facts["tables_crc"]:
        raise ArtifactError(f"{path}: its tables are damaged; {_MAKE_AGAIN}")
    count, firsts = geometry.num_bundles, geometry.layer_firsts
    order = np.split(np.frombuffer(tables, "<i4", count), firsts[1:-1])
    start = geometry.checksums_start - geometry.order_start
    checksums = np.frombuffer(tables, "<u4", 2 * count, start).reshape(count, 2)
    num_norms, start = count * geometry.bundle_neurons, geometry.norms_start - geometry.order_start
    norms = np.frombuffer(tables, "<f4", num_norms, start).reshape(count, geometry.bundle_neurons)
    if not all((np.sort(layer) == np.arange(layer.size)).all() for layer in order):
        raise ArtifactError(f"{path}: does not hold each neuron once; {_MAKE_AGAIN}")
    if geometry.is_mixture and any((np.diff(layer) < 0).any() for layer in order):
        raise ArtifactError(f"{path}: experts are not in their order; {_MAKE_AGAIN}")
    return BundleFile(path, geometry, order, checksums, norms, str(facts["order_name"]))


def tables_crc(descriptor: int, geometry: BundleGeometry) -> int:
    """Return the CRC-32 of the file's order, checksums and norms."""
    size = geometry.done_start - geometry.order_start
    return zlib.crc32(os.pread(descriptor, size, geometry.order_start))


def damaged_bundles(
    file: BundleFile, on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> list[tuple[int, int]]:
    """Read all bundles; return (layer, its entry in `order`) where checksums or norms differ.

    Errors:  OSError
    """
    geometry, found = file.geometry, []
    done, firsts = 0, geometry.layer_firsts
    with file.path.open("rb", buffering=0) as stream:
        for layer, block, first, last, place in _read_together(geometry):
            parts = geometry.part_bytes(layer, block)
            bundles = np.zeros((last - first, sum(parts)), np.uint8)
            _fill(stream.fileno(), bundles, place)
            checksums = np.empty((last - first, 2), np.uint32)
            bundle_checksums(bundles, parts[0], checksums)
            own = slice(firsts[layer] + first, firsts[layer] + last)
            wrong = (checksums != file.checksums[own]).any(axis=1)
            if not (geometry.has_outputs and wrong.any()):  # a norm is of several bundles
                norms = _norms(geometry, layer, block, bundles)
                wrong |= ~np.isclose(norms, file.norms[own], _NORM_ERROR, 0).all(axis=1)
            found += [(layer, int(n)) for n in file.order[layer][first:last][wrong]]
            done += bundles.nbytes
            on_bytes(done, geometry.data_bytes)
    return found


def _read_together(geometry: BundleGeometry) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield layer, block, first and last of some of its bundles in the layer, their first byte.

    All of a block's where down is a row an output.
    """
    for layer, blocks in enumerate(geometry.blocks):
        begin = 0
        for number, (block, (place, _)) in enumerate(
            zip(blocks, geometry.block_spans(layer), strict=True)
        ):
            size, count = sum(geometry.part_bytes(layer, number)), block.num_bundles
            at_once = count if geometry.has_outputs else _READ_BYTES // size
            for first in range(0, count, max(1, at_once)):
                last = min(first + max(1, at_once), count)
                yield layer, number, begin + first, begin + last, place + first * size
            begin += count


def _norms(geometry: BundleGeometry, layer: int, block: int, bundles: np.ndarray) -> np.ndarray:
    """Norms of the neurons of bundles (N, bundle bytes) uint8 of `_read_together`: (N, K)."""
    own, count = geometry.blocks[layer][block], geometry.bundle_neurons
    begin, (_, up, down) = geometry.part_bytes(layer, block)[0], own.row_bytes
    if not geometry.has_outputs:
        begin += count * up
    rows = bundles[:, begin : begin + (own.outputs or count) * down]
    matrix = np.ascontiguousarray(rows).reshape(-1, down).view(numpy_dtype(own.formats[2]))
    lengths = column_lengths(matrix) if geometry.has_outputs else row_lengths(matrix)
    norms = np.zeros((len(bundles), count), np.float32)
    norms.reshape(-1)[: lengths.size] = lengths
    return norms


def _fill(descriptor: int, into: np.ndarray, place: int) -> None:
    """Read until `into` is full or the file ends."""
    view, done = into.reshape(-1).data, 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], place + done)
        if count == 0:
            return
        done += count
    os.posix_fadvise(descriptor, place, done, os.POSIX_FADV_DONTNEED)
