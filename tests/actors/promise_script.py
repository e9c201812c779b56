"""A user's process with a system whose neurons are on storage; prints what it may take of memory.

python -m tests.actors.promise_script MODEL NUM_RESTS
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.setup.account import account
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.preflight import SystemOptions, read_model
from hotcold.actors.system import System
from hotcold.model.bundles.bundle_file import bundle_path
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.sampling import SamplingParams

_PROMPTS = (1, 9, 40)  # tokens: a token, some at once, matrix products


def main(model: Path, num_up_downs: int) -> None:
    """Start it, answer requests, tell what its plan counts."""
    config = read_model(model)
    file = bundle_path(model, BundleGeometry.of(config))
    options = SystemOptions(num_threads=2, context_length=128)
    system = choose_system(model, config, options)
    num_neurons = config.num_neurons
    system = replace(system, storage=NeuronStorage(str(file), num_neurons, num_up_downs))
    draw = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=4, temperature=0.8, ignore_eos=True)
    with System.start(system) as running:
        for size in _PROMPTS:
            ids = draw.integers(0, config.vocab_size, size).tolist()
            running.complete(GenerateRequest(sampling, prompt_ids=ids))
    print(json.dumps({"promised_bytes": account(system, config).total_bytes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
