"""Systems that keep a share of a model's neurons on storage, however small the model is.

    python -m benchmarks.stored_system 0.5 serve MODEL --port 8000

runs a command of hotcold whose system is one of these. `--cpu-memory` alone leaves what fits in
memory, and of a model below some 600 MB the processes of a system with storage take more than half
of its neurons would save.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.setup.preflight import in_memory, read_model
from hotcold.actors.setup.storage import has_bundles, pack_model
from hotcold.actors.system import System
from hotcold.jobs.cli import run
from hotcold.model.bundles.bundle_file import bundle_path
from hotcold.model.bundles.geometry import BundleGeometry


def on_storage(system: SystemConfig, resident: float) -> SystemConfig:
    """The system with that share of its neurons in memory, and all of them in a bundle file."""
    path = Path(system.model_path)
    system, config = in_memory(path, system, read_model(path))
    if not has_bundles(path, config):
        pack_model(path, config)
    kept = int(resident * config.num_neurons)
    file = bundle_path(path, BundleGeometry.of(config))
    return replace(system, storage=NeuronStorage(str(file), kept, kept))


def _starting(start: Callable[..., System], resident: float) -> Callable[..., System]:
    def stored(system: SystemConfig, **options: Any) -> System:
        return start(on_storage(system, resident), **options)

    return stored


if __name__ == "__main__":
    share = float(sys.argv.pop(1))
    System.start = _starting(System.start, share)  # type: ignore[method-assign]
    run()
