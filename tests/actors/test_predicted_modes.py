"""Modes in which a predictor chooses the neurons: what is computed is what was chosen."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.messages import THRESHOLD
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.numba_kernels.loops.mailbox import ALL_NEURONS, NUM_IDS, read_selection
from hotcold.predictors.predictor import NeuronPredictor, PredictorInput
from hotcold.predictors.stacked import AnyLayer
from tests.actors.batching import mode_of, random_predictor
from tests.actors.in_process import InProcessSystem, PythonExchange
from tests.predictor_layers import column_layer, constant_layer, linear_layer
from tests.tiny_checkpoint import Tiny, TinyCheckpoint

# Biases; parallel layers without a gate; fatrelu of a gate.
VARIANTS = ["opt-postnorm", "falcon-relu", "prosparse"]
# First matrix and, neuron by neuron, the last, as transformers names them.
_LLAMAS = ("mlp.gate_proj", "mlp.down_proj")
NAMES = {
    **dict.fromkeys(("llama", "sparsellama"), _LLAMAS),
    "opt": ("fc1", "fc2"),
    "falcon": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}


def layer_tensors(path: Path, config: ModelConfig, name: str) -> list[np.ndarray]:
    """The tensor of that name of every layer, in order, as float32."""
    tensors = load_file(path / "model.safetensors")
    found = {key: tensor for key, tensor in tensors.items() if key.endswith(name)}
    layers = sorted(found, key=lambda key: int(next(p for p in key.split(".") if p.isdigit())))
    assert len(layers) in (0, config.num_layers)
    return [found[key].float().numpy() for key in layers]


def for_services(
    system: InProcessSystem,
    layers: Sequence[AnyLayer | None],
    input_name: PredictorInput = "ffn_input",
) -> NeuronPredictor:
    sizes = np.array([[ids.size for ids in system.shards()]] * system.config.num_layers)
    return NeuronPredictor(list(layers), sizes, input_name)


def oracles(system: InProcessSystem, quiet: Sequence[int] = ()) -> list[AnyLayer]:
    """For each layer, in the order of the services' shards: the pre-activation itself.

    Neurons `quiet` are kept quiet.
    """
    order = np.concatenate(system.shards())
    name = NAMES[system.config.family][0]
    gates = layer_tensors(system.path, system.config, f"{name}.weight")
    biases = layer_tensors(system.path, system.config, f"{name}.bias")
    if not biases:
        biases = [np.zeros(system.config.ffn_size, np.float32)] * len(gates)
    is_quiet = np.isin(order, quiet)
    return [
        linear_layer(g[order], np.where(is_quiet, np.inf, -b[order]))
        for g, b in zip(gates, biases, strict=True)
    ]


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(("kind", "num_threads"), [("sign", 3), ("lowrank", 2)])
def test_helpers_change_no_bit(tiny: Tiny, num_threads: int, kind: str) -> None:
    checkpoint = tiny("llama-relu")
    with InProcessSystem(checkpoint.path, 2, 1) as system:
        predictor = random_predictor(system, kind)
        sizes = [1, 5, KERNEL_TOKENS]
        expected = system.logits("exact", checkpoint.ids, sizes, predictor=predictor)
        predictor.start_helpers(system.exchange.buffers, 0, num_threads)
        engine, first = system.engine("exact", predictor), 0
        for count in sizes:
            ids = checkpoint.ids[first : first + count].tolist()
            places = range(first, first + len(ids))
            found = engine.step(ids, places, [0] * len(ids), len(ids))
            np.testing.assert_array_equal(found, expected[first : first + len(ids)])
            first += len(ids)
        predictor.close()
        assert engine.times.parts["predictor"] > 0


def test_each_step_has_a_mode_of_its_own(tiny: Tiny) -> None:
    """On one engine, in any order, as engines of one mode each."""
    checkpoint, at = tiny("llama-relu"), 8
    with InProcessSystem(checkpoint.path, 2, 2, has_down_norms=True) as system:
        modes = [mode_of(system, name) for name in ("dense", "exact", "sign", "lowrank", THRESHOLD)]
        ids = checkpoint.ids.tolist()
        system.logits("dense", checkpoint.ids[:at], [at])
        engine, alone = system.engine("dense"), {}
        for mode in modes:
            one = Engine(system.config, engine.embedding, system.exchange, system.topology, mode)
            alone[mode.name] = one.step(ids[at : at + 1], [at], [0]).copy()
        assert len({logits.tobytes() for logits in alone.values()}) >= 4  # exact may equal dense
        for mode in [*modes, *modes[::2], *modes[::-1]]:
            found = engine.step(ids[at : at + 1], [at], [0], mode=mode)
            np.testing.assert_array_equal(found, alone[mode.name])


@pytest.mark.parametrize(("place", "variant"), [*enumerate(VARIANTS)])
def test_an_oracle_changes_nothing(tiny: Tiny, place: int, variant: str) -> None:
    """In every family, whoever has the neurons."""
    checkpoint = tiny(variant)
    with InProcessSystem(checkpoint.path, 1 + place % 3, 2, copying=place % 2 == 1) as system:
        for mode, sizes in (("sign", [KERNEL_TOKENS]), ("lowrank", [3, 1, 5]), ("sign", [1])):
            predictor = for_services(system, oracles(system))
            found = system.logits(mode, checkpoint.ids, sizes, predictor=predictor)
            assert_close(found, checkpoint.logits)
        num_chosen = system.exchange.buffers.requests[1:, NUM_IDS].sum()
        assert 0.2 < num_chosen / system.config.ffn_size < 0.8
        assert system.python_answers == []


def silenced(tiny: Tiny, variant: str, quiet: Sequence[int], path: Path) -> TinyCheckpoint:
    """The model whose `quiet` neurons, ids in every layer, add nothing."""
    shutil.copytree(tiny(variant).path, path)
    config = read_config(path)
    tensors = load_file(path / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith(f"{NAMES[config.family][1]}.weight"):
            tensor[:, list(quiet)] = 0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return TinyCheckpoint(path)


@pytest.mark.parametrize(
    ("variant", "idle"),
    [("llama-relu", [1]), ("opt-prenorm", [0, 2]), ("llama-mlp-bias", [0, 1, 2])],
)
def test_services_for_which_nothing_is_chosen(
    tiny: Tiny, tmp_path: Path, variant: str, idle: list[int]
) -> None:
    """Their partials are zero, except for the bias that belongs to no neuron; other ones do all."""
    checkpoint = tiny(variant)
    with InProcessSystem(checkpoint.path, 3, 1) as system:
        shards = system.shards()
        chosen = np.concatenate([np.full(ids.size, s not in idle) for s, ids in enumerate(shards)])
        quiet = [int(n) for s in idle for n in shards[s]]
        expected = silenced(tiny, variant, quiet, tmp_path / "m").logits
        layer = constant_layer(chosen, system.config.hidden_size)
        predictor = for_services(system, [layer] * system.config.num_layers)
        for sizes in ([1], [3, 8]):
            found = system.logits("sign", checkpoint.ids, sizes, predictor=predictor)
            assert_close(found, expected)
        counts = system.exchange.buffers.requests[system.topology.cpu_services, NUM_IDS]
        assert counts.tolist() == [0 if s in idle else shards[s].size for s in range(3)]


def test_long_prompts_run_dense(tiny: Tiny) -> None:
    """A predictor that chooses nothing is not asked there."""
    checkpoint = tiny("llama-relu")
    with InProcessSystem(checkpoint.path, 2, 1) as system:
        nothing = constant_layer(np.zeros(system.config.ffn_size, bool), system.config.hidden_size)
        predictor = for_services(system, [nothing] * system.config.num_layers)
        ids, num_tokens = checkpoint.ids[: KERNEL_TOKENS + 1], KERNEL_TOKENS + 1
        found = system.logits("sign", ids, [num_tokens], predictor=predictor)
        assert_close(found, checkpoint.logits[:num_tokens])
        short = system.logits("sign", ids, [KERNEL_TOKENS], predictor=predictor)
        assert np.abs(short - found).max() > 0.1 * np.abs(found).max()


class Recording(PythonExchange):
    """Keeps which rows service 1 was asked for last in a list, for each token."""

    listed: list[list[int]]

    def request(self, services: Sequence[int]) -> int:
        """See Exchange."""
        if 1 in services and self.buffers.requests[1, NUM_IDS] != ALL_NEURONS:
            selection, tokens = read_selection.py_func(self.buffers, 1), range(SHORT)
            wanted = [selection.token_masks >> np.uint32(t) & np.uint32(1) > 0 for t in tokens]
            self.listed = [selection.ids[each].tolist() for each in wanted]
        return super().request(services)


SHORT = 6  # tokens


@pytest.mark.parametrize(
    ("variant", "input_name"), [("falcon-relu", "ffn_input"), ("llama-relu", "residual")]
)
def test_what_the_predictor_is_given(tiny: Tiny, variant: str, input_name: PredictorInput) -> None:
    """The FFN's input, or the stream before its norm; in parallel layers that is the layer's.

    Of one layer at a time, whose neurons are chosen by signs of the input's numbers.
    """
    checkpoint = tiny(variant)
    expected = ffn_inputs(checkpoint, input_name)
    with InProcessSystem(checkpoint.path) as system:
        config, width = system.config, system.config.hidden_size
        recording = Recording(system.exchange)
        system.exchange = recording
        assert config.ffn_size >= width
        columns = np.arange(config.ffn_size) % width
        for at in range(config.num_layers):
            layers: list[AnyLayer | None] = [None] * config.num_layers
            layers[at] = column_layer(columns, width)
            predictor = for_services(system, layers, input_name)
            system.logits("sign", checkpoint.ids[:SHORT], [SHORT], predictor=predictor)
            numbers = expected[at][:SHORT, columns]
            is_clear = np.abs(numbers) > 1e-4 * np.abs(numbers).max()
            found = np.zeros(numbers.shape, bool)
            for t, listed in enumerate(recording.listed):
                found[t, listed] = True
            assert is_clear.mean() > 0.9
            np.testing.assert_array_equal(found[is_clear], (numbers > 0)[is_clear])
        system.exchange = recording.inner


def ffn_inputs(checkpoint: TinyCheckpoint, input_name: str) -> list[np.ndarray]:
    """By transformers: what goes into each layer's FFN, or into the norm before it."""
    model, family = checkpoint._model(), read_config(checkpoint.path).family
    if input_name == "ffn_input":
        wanted = NAMES[family][0]
    else:
        wanted = "post_attention_layernorm" if family == "llama" else "input_layernorm"
    found: list[np.ndarray] = []
    for name, module in model.named_modules():
        if name.endswith(wanted):
            module.register_forward_pre_hook(lambda _, x: found.append(x[0][0].numpy()))
    with torch.no_grad():
        model(torch.from_numpy(checkpoint.ids)[None])
    return found
