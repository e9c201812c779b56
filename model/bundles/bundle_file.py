"""A bundle file: its header and tables, read within bounds and held against the model."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.bundles.geometry import BLOCK_BYTES, BundleGeometry
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, artifact_path

_MAGIC = b"hotcold bundles\n"
_HEAD = len(_MAGIC) + 8  # then the length and the CRC-32 of the facts, JSON
_MAKE_AGAIN = "make it again with `hotcold pack`"


@dataclass(frozen=True, eq=False)
class BundleFile:
    """An open question answered: which neuron is where, and what its parts add up to.

    order (L, N) int32: neuron ids by their places; by places too sums (L, N, 2) uint32, and norms
    (L, N) float32, the lengths of down rows
    """

    path: Path
    geometry: BundleGeometry
    order: np.ndarray
    sums: np.ndarray
    norms: np.ndarray
    order_name: str  # what the order follows: a profile's digest, or "checkpoint"

    def places(self) -> np.ndarray:
        """The place of each neuron: (L, N) int32."""
        places = np.empty_like(self.order)
        own = np.arange(self.geometry.num_neurons, dtype=np.int32)
        np.put_along_axis(places, self.order, np.broadcast_to(own, places.shape), axis=1)
        return places


def bundle_path(model_path: str | Path, geometry: BundleGeometry) -> Path:
    """Where a model's bundle file lies."""
    return artifact_path(model_path, geometry.file_name)


def header_block(
    geometry: BundleGeometry, identity: ModelIdentity, order_name: str, tables_crc: int | None
) -> bytes:
    """The file's first block; without `tables_crc` it says that the file is not whole yet."""
    facts = {
        "geometry": asdict(geometry),
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
    """What a header says; None where it is no header, or a damaged one."""
    if not block.startswith(_MAGIC) or len(block) < BLOCK_BYTES:
        return None
    length, crc = (int(word) for word in np.frombuffer(block[len(_MAGIC) : _HEAD], "<u4"))
    text = block[_HEAD : _HEAD + length]
    if length > BLOCK_BYTES - _HEAD or zlib.crc32(text) != crc:
        return None
    facts = json.loads(text)
    return facts if isinstance(facts, dict) else None


def read_bundle_file(path: Path, geometry: BundleGeometry, identity: ModelIdentity) -> BundleFile:
    """Read header and tables of the file that was made from the model `identity`.

    Errors:  ArtifactError where it is missing, torn, damaged, of another model, format or version
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
    if facts.get("geometry") != asdict(geometry):
        raise ArtifactError(f"{path}: holds rows of another format or version; {_MAKE_AGAIN}")
    size = os.fstat(stream.fileno()).st_size
    if facts.get("tables_crc") is None or size != geometry.file_bytes:
        raise ArtifactError(
            f"{path}: is not whole, {size} of {geometry.file_bytes} bytes; {_MAKE_AGAIN}"
        )
    tables = _tables(stream, geometry)
    if zlib.crc32(tables) != facts["tables_crc"]:
        raise ArtifactError(f"{path}: its tables are damaged; {_MAKE_AGAIN}")
    shape = geometry.num_layers, geometry.num_neurons
    order = np.frombuffer(tables, "<i4", shape[0] * shape[1]).reshape(shape)
    sums = np.frombuffer(tables, "<u4", 2 * order.size, geometry.sums_start - geometry.order_start)
    norms = np.frombuffer(tables, "<f4", order.size, geometry.norms_start - geometry.order_start)
    if not (np.sort(order, axis=1) == np.arange(shape[1])).all():
        raise ArtifactError(f"{path}: does not hold each neuron once; {_MAKE_AGAIN}")
    name = str(facts["order_name"])
    return BundleFile(path, geometry, order, sums.reshape(*shape, 2), norms.reshape(shape), name)


def _tables(stream: Any, geometry: BundleGeometry) -> bytes:
    stream.seek(geometry.order_start)
    return bytes(stream.read(geometry.done_start - geometry.order_start))


def tables_crc(descriptor: int, geometry: BundleGeometry) -> int:
    """CRC-32 of the order, sums and norms that are in the file."""
    size = geometry.done_start - geometry.order_start
    return zlib.crc32(os.pread(descriptor, size, geometry.order_start))
