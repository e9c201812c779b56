"""A random model's tensors, each drawn alone: no layer is computed to know what its neurons see.

A token's hidden state is a sum of parts whose sizes are known at any depth:

    h = c * common + t * topic + rest

`common` is one direction for all tokens, `topic` one of a few orthogonal to it, and the rest is
noise, of an embedding and of what layers added. Matrices read the rest alone, and what they add has
mean 0. A gate's row n reads `common`, too: its output is q[n] + z with z normal of deviation 1, so
its neuron fires at the rate Phi(q[n]), and rates follow a power law. Where LayerNorms have a bias,
`common` is that bias. Routers and the head read topics, so text keeps to a topic for some twenty
tokens, and to some of the experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch.nn import functional

from hotcold.model.config.activations import activated, activated_up
from hotcold.model.config.families import FAMILIES, tensor_names
from hotcold.model.config.families.tensor_names import ExpertNames, LayerNames
from hotcold.model.config.layer_spec import FfnSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.sparsity import power_law_rates
from hotcold.model.synthetic.random_source import RandomSource, normal_quantiles
from hotcold.model.synthetic.routing import STAYING, fit_routing
from hotcold.model.synthetic.shape import SyntheticShape

_COMMON_SHARE, _TOPIC_SHARE = 0.5, 0.15  # of an embedding's energy
_NUM_TOPICS = 32
_LOW_RANK = 64  # of what a predictor can learn of gates
_LOW_RANK_SHARE = 0.8  # of the variance of their outputs
# What all FFNs add has this deviation, against 1 of an embedding, and so has what attention adds
# where it sees one token. With a tied head it is large: embeddings alone would say a b a b a b.
_UPDATES_RMS, _TIED_UPDATES_RMS = 0.4, 1.0
_BIAS_RMS = 0.1  # of what the bias is added to
_POSITIONS_RMS = 0.3
_ROUTER_RMS = 1.5  # of a token's logits of experts
# Deviation of logits, times sqrt(2 ln n): above 1 few of n tokens have most of the probability.
_PEAKED = 1.2
_PREDICTOR_SHIFT = 0.5  # deviations by which a predictor favours neurons


class RandomTensor(NamedTuple):
    """A tensor of the checkpoint, float32 once it is drawn."""

    name: str
    shape: tuple[int, ...]
    draw: Callable[[], torch.Tensor]


class _Sizes(NamedTuple):
    """What a layer's matrices read, after its norm."""

    common: float  # along the common direction, the same for all tokens
    topic: float  # along that of a token's topic
    rest: float  # deviation along any other


class RandomModel:
    """A model's tensors by `seed`; each is the same whichever others are drawn."""

    def __init__(self, config: ModelConfig, shape: SyntheticShape, seed: int) -> None:
        self.config, self.names = config, tensor_names(config)
        self._source = RandomSource(seed)
        hidden, num_topics, rank = config.hidden_size, 0, _LOW_RANK
        self.routing = None
        if config.experts is not None:
            num_topics = max(2, min(_NUM_TOPICS, hidden // 8, config.vocab_size // 8))
            router, generator = config.experts.router, self._source.generator("routing")
            self.routing = fit_routing(
                router.num_experts, router.num_chosen, num_topics, shape.skew, shape.kept, generator
            )
            if config.experts.has_predictors:
                rank = hidden // 8 - 1  # fc1 has hidden / 4 rows, as TurboSparse's
        rank = max(1, min(rank, hidden // 8))
        columns = self._source.normal("directions", (hidden, 1 + num_topics + rank))
        directions = torch.linalg.qr(columns).Q.T.contiguous()
        self._structure, self._factors = directions[:-rank], directions[-rank:]
        self._common, self._topics = directions[0], directions[1:-rank]
        self._common_share = 0.0 if config.norm_bias else _COMMON_SHARE
        self._topic_share = _TOPIC_SHARE if num_topics else 0.0
        updates = _TIED_UPDATES_RMS if config.tied_embeddings else _UPDATES_RMS
        self._update_rms = updates * config.num_layers**-0.5
        tokens_of_topic = max(2.0, config.vocab_size / max(1, num_topics))
        self._logits_rms = _PEAKED * (2 * math.log(tokens_of_topic)) ** 0.5
        self._ends_shape = config.vocab_size, hidden  # of embedding and head
        self._fit_neurons(config.layers[0].ffn, shape.density)

    def tensors(self) -> Iterator[RandomTensor]:
        """All tensors, by their names in a checkpoint."""
        prefix = FAMILIES[self.config.family].prefixes[0]
        for tensor in self._body():
            yield tensor._replace(name=prefix + tensor.name)
        if not self.config.tied_embeddings:
            yield RandomTensor(f"{self.names.head}.weight", self._ends_shape, self.head)

    def _body(self) -> Iterator[RandomTensor]:
        config, names, hidden = self.config, self.names, self.config.hidden_size
        yield RandomTensor(f"{names.tokens}.weight", self._ends_shape, self.embedding)
        if names.positions:
            shape = config.max_positions + config.position_offset, hidden
            yield self._normal(f"{names.positions}.weight", shape, _POSITIONS_RMS)
        for layer in range(config.num_layers):
            yield from self.layer(layer)
        scale = torch.ones(hidden)
        if config.tied_embeddings:  # signs, so that a token's logits do not favour that token
            scale = self._source.normal("signs", (hidden,)).sign()
            scale *= self._logits_rms * hidden**-0.5
        yield from self._norm(names.final_norm, scale, torch.zeros(hidden))

    def layer(self, layer: int) -> Iterator[RandomTensor]:
        """The tensors of one layer, without a checkpoint's prefix in their names."""
        config, spec, names = self.config, self.config.layers[layer], self.names.of_layer(layer)
        hidden, width, rms = config.hidden_size, spec.attention.heads_size, self._update_rms
        for name in filter(None, (names.norm, names.ffn_norm)):
            yield from self._norm(name, torch.ones(hidden), self._common * hidden**0.5)
        if config.qk_norm:
            yield _vector(f"{names.q_norm}.weight", torch.ones(spec.vectors["q_norm_weight"]))
            yield _vector(f"{names.k_norm}.weight", torch.ones(spec.vectors["k_norm_weight"]))
        for name, rows in zip(names.qkv, spec.input_sizes, strict=True):
            draw = partial(self._reading_rest, layer, rows, name)
            yield RandomTensor(f"{name}.weight", (rows, hidden), draw)
            if config.attention_bias:
                yield self._normal(f"{name}.bias", (rows,), _BIAS_RMS)
        yield self._normal(f"{names.out}.weight", (hidden, width), rms * width**-0.5)
        if config.out_bias:
            yield self._normal(f"{names.out}.bias", (hidden,), _BIAS_RMS * rms)
        if config.has_sinks:
            yield self._normal(names.sinks, (config.num_heads,))
        ffn_names, router = _ffn_names(names, spec.ffn), spec.ffn.router
        if router is not None:
            experts, name = router.num_experts, ffn_names.router
            draw = partial(self._router, layer, experts, name)
            yield RandomTensor(name, (experts, hidden), draw)
            if router.has_bias:
                yield self._normal(ffn_names.router_bias, (experts,), _BIAS_RMS)
        yield from self._ffn(layer, spec.ffn, ffn_names)

    def embedding(self) -> torch.Tensor:
        """Draw embeddings (V, D), of deviation 1; token v is of topic v % M."""
        hidden, shares = self.config.hidden_size, self._common_share + self._topic_share
        rows = self._source.normal("tokens", self._ends_shape, (1 - shares) ** 0.5)
        self._without_structure(rows)
        rows += self._common * (self._common_share * hidden) ** 0.5
        return self._with_topics(rows, (self._topic_share * hidden) ** 0.5)

    def head(self) -> torch.Tensor:
        """Draw a head (V, D) whose tokens keep the topic of the one before, STAYING of them.

        The largest logit of a topic's tokens has a Gumbel distribution of scale _PEAKED.
        """
        end = self.config.num_layers
        rows = self._reading_rest(end, self.config.vocab_size, "head").mul_(self._logits_rms)
        if not self._topic_share:
            return rows
        odds = STAYING / (1 - STAYING) * (len(self._topics) - 1)
        return self._with_topics(rows, _PEAKED * math.log(odds) / self._sizes(end).topic)

    def _sizes(self, layer: int) -> _Sizes:
        """What `layer` reads, and the head if it is the number of layers.

        Attention's means over long texts add little, and do not count.
        """
        hidden = self.config.hidden_size
        if self.config.norm_bias:
            return _Sizes(hidden**0.5, 0.0, 1.0)
        added = layer * self._update_rms**2
        scale = (1 + added) ** -0.5
        return _Sizes(
            scale * (self._common_share * hidden) ** 0.5,
            scale * (self._topic_share * hidden) ** 0.5,
            scale * (1 - self._common_share - self._topic_share + added) ** 0.5,
        )

    def _fit_neurons(self, spec: FfnSpec, density: float) -> None:
        """Find a block's quantiles q, and the means and the energy of its activations."""
        if spec.activation_fn == "drelu":  # half of up . x is negative
            density *= 2
        rates = power_law_rates(spec.block_sizes[0], density)
        self._quantiles = torch.special.ndtri(torch.from_numpy(rates)).float()
        fn, threshold, z = spec.activation_fn, spec.activation_threshold, normal_quantiles(64)
        gates = activated(fn, self._quantiles[:, None] + z, threshold)
        ups = activated_up(fn, z, threshold) if spec.has_gate else torch.ones(1)
        self._means = gates.mean(dim=1) * ups.mean()
        all_energy = gates.square().mean(dim=1).sum() * ups.square().mean()
        self._energy = float(all_energy - self._means.square().sum())

    def _ffn(self, layer: int, spec: FfnSpec, names: ExpertNames) -> Iterator[RandomTensor]:
        """The tensors of all blocks; a stacked tensor has rows of gate and up in turn."""
        size, hidden, rank = spec.block_sizes[0], self.config.hidden_size, len(self._factors)
        chosen = 1 if spec.router is None else spec.router.num_chosen
        rms = self._update_rms * chosen**0.5  # experts' outputs are averaged
        gate, up = partial(self._gate, layer), partial(self._reading_rest, layer, size)
        down = partial(self._down, rms)
        keys = [f"{layer}.{block}" for block in range(len(spec.block_sizes))]
        stack: tuple[int, ...] = ()
        width = size
        if names.is_transposed:
            stack, width = (len(keys),), 2 * size

            def gates_and_ups() -> torch.Tensor:
                pairs = (torch.stack([gate(key), up(key)], dim=1) for key in keys)
                return torch.stack([pair.flatten(0, 1).T for pair in pairs])

            def downs() -> torch.Tensor:
                return torch.stack([down(key).T for key in keys])

            yield RandomTensor(names.gate, (*stack, hidden, width), gates_and_ups)
            yield RandomTensor(names.down, (*stack, size, hidden), downs)
        else:
            fc1, fc2 = names.predictor or ("", "")
            kinds: list[tuple[str, tuple[int, int], Callable[[str], torch.Tensor]]] = [
                (names.gate, (size, hidden), gate),
                (names.up, (size, hidden), up),
                (names.down, (hidden, size), down),
                (fc1, (2 * rank + 2, hidden), self._predictor_inputs),
                (fc2, (size, 2 * rank + 2), partial(self._predictor_outputs, layer)),
            ]
            for (block, key), (name, shape, draw) in product(enumerate(keys), kinds):
                if name:
                    yield RandomTensor(name.format(block), shape, partial(draw, key))
        if spec.has_biases:
            yield self._normal(names.gate_bias, (*stack, width), _BIAS_RMS)
            yield self._normal(names.down_bias, (*stack, hidden), _BIAS_RMS * rms)

    def _router(self, layer: int, experts: int, key: str) -> torch.Tensor:
        """Rows (E, D) whose logits are those of `fit_routing`, scaled to _ROUTER_RMS."""
        assert self.routing is not None
        mix, sizes = self.routing, self._sizes(layer)
        own = normal_quantiles(experts)[self._source.permutation(key, experts)] * mix.popularity
        of_topics = self._source.normal(f"{key} topics", (experts, len(self._topics)))
        rows = self._reading_rest(layer, experts, key) * (1 - mix.by_topic) ** 0.5
        rows.addr_(own, self._common, alpha=1 / sizes.common)
        rows += of_topics @ self._topics * (mix.by_topic**0.5 / sizes.topic)
        return rows * _ROUTER_RMS * (1 + mix.popularity**2) ** -0.5

    def _reading_rest(self, layer: int, num_rows: int, key: str) -> torch.Tensor:
        """Rows (n, D) that see the rest alone, with outputs of deviation 1."""
        hidden = self.config.hidden_size
        std = hidden**-0.5 / self._sizes(layer).rest
        return self._without_structure(self._source.normal(key, (num_rows, hidden), std))

    def _gate(self, layer: int, key: str) -> torch.Tensor:
        """Rows (I, D): q[n] of the common direction, a low-rank part of the rest, and noise."""
        sizes, size = self._sizes(layer), len(self._quantiles)
        rows = self._reading_rest(layer, size, f"{key} gate").mul_((1 - _LOW_RANK_SHARE) ** 0.5)
        rows.addmm_(self._low_rank(key), self._factors, alpha=1 / sizes.rest)
        return rows.addr_(self._quantiles[self._order(key)], self._common, alpha=1 / sizes.common)

    def _low_rank(self, key: str) -> torch.Tensor:
        """What neurons have of each factor, (I, R): all have as much of them together."""
        shape = len(self._quantiles), len(self._factors)
        parts = self._source.normal(f"{key} factors", shape)
        return functional.normalize(parts, dim=1) * _LOW_RANK_SHARE**0.5

    def _order(self, key: str) -> torch.Tensor:
        """Which of the quantiles each neuron of a block has."""
        return self._source.permutation(key, len(self._quantiles))

    def _down(self, output_rms: float, key: str) -> torch.Tensor:
        """Rows (D, I), orthogonal to the neurons' means, with outputs of deviation `output_rms`."""
        means, std = self._means[self._order(key)], output_rms * self._energy**-0.5
        rows = self._source.normal(f"{key} down", (self.config.hidden_size, len(means)), std)
        direction = functional.normalize(means, dim=0)
        return rows.addr_(rows @ direction, direction, alpha=-1)

    def _predictor_inputs(self, key: str) -> torch.Tensor:
        """fc1 (2 R + 2, D): a factor p is relu(p) - relu(-p); what is common is above 0, twice."""
        return torch.cat([self._factors, -self._factors, *[self._common[None]] * 2])

    def _predictor_outputs(self, layer: int, key: str) -> torch.Tensor:
        """fc2 (I, 2 R + 2): a gate's rows without noise, and a little more of what is common."""
        sizes, parts = self._sizes(layer), self._low_rank(key)
        half = (self._quantiles[self._order(key), None] + _PREDICTOR_SHIFT) / (2 * sizes.common)
        return torch.cat([parts / sizes.rest, -parts / sizes.rest, half, half], dim=1)

    def _normal(self, name: str, shape: tuple[int, ...], std: float = 1.0) -> RandomTensor:
        return RandomTensor(name, shape, partial(self._source.normal, name, shape, std))

    def _norm(self, name: str, weight: torch.Tensor, bias: torch.Tensor) -> Iterator[RandomTensor]:
        yield _vector(f"{name}.weight", weight)
        if self.config.norm_bias:
            yield _vector(f"{name}.bias", bias)

    def _without_structure(self, rows: torch.Tensor) -> torch.Tensor:
        """Make `rows` (N, D) orthogonal to the common direction and to topics, in place."""
        return rows.addmm_(rows @ self._structure.T, self._structure, alpha=-1)

    def _with_topics(self, rows: torch.Tensor, size: float) -> torch.Tensor:
        """Add `size` times its topic's direction to each token's row, in place."""
        for topic, direction in enumerate(self._topics):
            rows[topic :: len(self._topics)] += size * direction
        return rows


def _vector(name: str, values: torch.Tensor) -> RandomTensor:
    return RandomTensor(name, tuple(values.shape), lambda: values)


def _ffn_names(names: LayerNames, spec: FfnSpec) -> ExpertNames:
    """Return the tensors of a mixture's experts, or of a dense layer's one block."""
    if spec.router is not None:
        return names.experts[0]
    return ExpertNames(
        router="",
        gate=f"{names.gate}.weight",
        up=names.up and f"{names.up}.weight",
        down=f"{names.down}.weight",
        gate_bias=f"{names.gate}.bias",
        down_bias=f"{names.down}.bias",
    )
