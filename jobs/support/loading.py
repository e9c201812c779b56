"""Starting a system with a progress bar, once the file of its offloaded neurons is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hotcold.actors.protocol.messages import LoadProgress, SystemConfig
from hotcold.actors.setup.account import expected_gpu
from hotcold.actors.setup.drafting import draft_note
from hotcold.actors.setup.shards import served_config
from hotcold.actors.setup.storage import has_bundles, pack_model
from hotcold.actors.setup.storage_shares import bytes_in_memory
from hotcold.jobs.support.console import loading_bar, progress_bar, tell
from hotcold.model.bundles.bundle_file import bundle_path
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.byte_sizes import size_text
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact_places import place_to_write
from hotcold.numba_kernels.own_cache import tell_if_full

if TYPE_CHECKING:
    from hotcold.actors.system import System


@contextmanager
def running_system(
    system: SystemConfig,
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
    others: Sequence[SystemConfig] = (),
) -> Iterator[System]:
    """A started system, ended at the exit, with a progress bar on standard error.

    `on_progress` is called too; `others` may be started beside it later.
    Errors:  HotcoldError
    """
    from hotcold.actors.system import System  # imports Ray

    if note := draft_note(system):
        tell(note, err=True)
    tell_if_full()  # before minutes go by
    require_bundles(system)
    with loading_bar() as bar:

        def show(progress: LoadProgress) -> None:
            on_progress(progress)
            bar(progress)

        running = System.start(system, on_progress=show, others=others)
    tell_if_full()  # it may be since
    with running:
        yield running


def make_bundles(path: Path, config: ModelConfig, weight_dtype: str) -> Path:
    """Write the bundle file with a progress bar, and print its path and size.

    `config` has the formats that matrices are loaded in. Errors: HotcoldError
    """
    geometry = BundleGeometry.of(config)
    place = place_to_write(path, bundle_path(path, geometry))
    size = size_text(geometry.file_bytes)
    tell(f"writing the model's neurons to {place}, {size}", err=True)
    with progress_bar(place.name) as on_bytes:
        return pack_model(path, config, weight_dtype, on_bytes)


def require_bundles(system: SystemConfig) -> None:
    """Write the system's bundle file unless it exists; print how many neurons it holds.

    Errors:  HotcoldError
    """
    if system.storage is None:
        return
    path = Path(system.model_path)
    config = served_config(system, read_config(path))
    share, geometry = expected_gpu(system, config), BundleGeometry.of(config)
    kept = bytes_in_memory(config, system.storage)
    total = config.num_neurons * geometry.neuron_bytes
    num_hot = max(0, share.num_hot_neurons)
    on_gpu = f", about {size_text(num_hot * geometry.neuron_bytes)} on the GPU" if num_hot else ""
    tell(
        f"{size_text(kept)} of {size_text(total)} of neurons in memory{on_gpu}, the others are "
        f"read from {system.storage.path}",
        err=True,
    )
    if not has_bundles(path, config):
        make_bundles(path, config, system.weight_dtype)
