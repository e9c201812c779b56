"""The bundle file of a model larger than memory, made before its system starts."""

from __future__ import annotations

from pathlib import Path

from actors.protocol.messages import SystemConfig
from actors.setup.storage import has_bundles, pack_model
from jobs.support.console import progress_bar, stderr_console
from model.bundles.bundle_file import bundle_path
from model.bundles.geometry import BundleGeometry
from model.config.build import read_config
from model.config.model_config import ModelConfig
from model.files.checkpoint import Checkpoint
from model.weights.check import stored_config


def make_bundles(path: Path, config: ModelConfig, weight_dtype: str) -> Path:
    """Write the file with a progress bar, after saying where and how large it will be.

    `config` has the dtypes that matrices are loaded in. Errors: HotcoldError
    """
    geometry = BundleGeometry.of(config)
    place = bundle_path(path, geometry)
    stderr_console().print(
        f"writing the model's neurons to {place}, {geometry.file_bytes / 1e9:.2f} GB",
        markup=False,
        soft_wrap=True,
    )
    with progress_bar(place.name) as on_bytes:
        return pack_model(path, config, weight_dtype, on_bytes)


def require_bundles(system: SystemConfig) -> None:
    """Make what the system will read its neurons from, unless it is there; say what stays there.

    Errors:  HotcoldError
    """
    if system.storage is None:
        return
    path = Path(system.model_path)
    config = stored_config(Checkpoint(path), read_config(path), system.weight_dtype)
    kept, geometry = system.storage.kept_bytes(config), BundleGeometry.of(config)
    total = geometry.num_layers * geometry.num_neurons * geometry.slot_bytes
    stderr_console().print(
        f"{kept / 1e9:.2f} of {total / 1e9:.2f} GB of neurons in memory, the others are read "
        f"from {system.storage.path}",
        markup=False,
        soft_wrap=True,
    )
    if not has_bundles(path, config):
        make_bundles(path, config, system.weight_dtype)
