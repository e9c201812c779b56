"""Names of a checkpoint's tensors, by role; each family fills them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol


@dataclass(frozen=True)
class ExpertNames:
    """Tensors of a layer's experts in one layout, whole names; "" where there is none.

    {} is an expert's number; a name without it is of all experts, stacked: (E, rows, columns).
    Where gate and up have one name, its rows are gate's, then up's.
    """

    router: str
    gate: str
    up: str
    down: str
    router_bias: str = ""
    selection_bias: str = ""
    gate_bias: str = ""
    up_bias: str = ""
    down_bias: str = ""
    shared_gate: str = ""
    shared_up: str = ""
    shared_down: str = ""
    shared_router: str = ""  # (d,) or (1, d): its product's sigmoid weighs the shared expert
    router_scale: str = ""  # (d,), of the router's input
    expert_scale: str = ""  # (E,), of experts' weights
    predictor: tuple[str, ...] = ()  # fc1 and fc2 of each expert
    alternates: bool = False  # rows of the tensor of gate and up are gate, up, gate, up, ...
    is_transposed: bool = False  # (E, columns, rows) instead

    def below(self, prefix: str) -> ExpertNames:
        """Return the names with `prefix` before each."""
        return _below(self, prefix)


class NamedTensors(Protocol):
    """A checkpoint, as far as it tells layouts apart."""

    def has(self, name: str) -> bool:
        """Whether it has a tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""


def layout_in(layouts: Sequence[ExpertNames], tensors: NamedTensors) -> ExpertNames | None:
    """Return the layout that a checkpoint has, None for no experts.

    Two that differ only in `is_transposed` are told apart by gate's and down's shapes.
    """
    for one in layouts:
        gate, down = one.gate.format(0), one.down.format(0)
        if not (tensors.has(gate) and tensors.has(down)):
            continue
        if not any(replace(one, is_transposed=not one.is_transposed) == other for other in layouts):
            return one
        hidden = tensors.shape(gate)[1 if one.is_transposed else 2]
        if hidden == tensors.shape(down)[2 if one.is_transposed else 1]:
            return one
    return None


def _below(names: Any, prefix: str) -> Any:
    def full(name: Any) -> Any:
        if isinstance(name, tuple):
            return tuple(full(each) for each in name)
        return prefix + name if isinstance(name, str) and name else name

    return replace(names, **{f.name: full(getattr(names, f.name)) for f in fields(names)})


@dataclass(frozen=True)
class RecurrentNames:
    """A recurrent layer's modules, without ".weight"; decay, step_bias, skip are whole names.

    decay: A_log, the logarithm of minus the rate
    """

    inputs: tuple[str, ...]  # q | k | v, z; or one fused module
    conv: str
    out: str
    gates: tuple[str, ...] = ()  # b, a; or one fused module; none: they are rows of `inputs`
    decay: str = ""
    step_bias: str = ""
    norm: str = ""
    skip: str = ""

    def below(self, prefix: str) -> RecurrentNames:
        """Return the names with `prefix` before each."""
        return _below(self, prefix)


@dataclass(frozen=True)
class LayerNames:
    """Modules of one layer, without ".weight" and ".bias"; "" where there is none."""

    norm: str
    qkv: tuple[str, ...]  # q, k, v; or one fused module
    out: str
    ffn_norm: str
    gate: str
    up: str  # gate's name where one module holds both
    down: str
    attention_norm: str = ""  # of attention's output
    ffn_output_norm: str = ""
    pair_norm: str = ""  # of the sum of two FFNs' outputs
    q_norm: str = ""
    k_norm: str = ""
    v_norm: str = ""  # "" also for one without weights
    # Multi-head latent attention: what widens the query's vector, and the keys' and values': one
    # module, or each head's keys transposed and its values, (H, rank, size) and (H, size, rank).
    q_b: str = ""
    kv_b: str = ""
    k_b: str = ""
    v_b: str = ""
    # PowerInfer's predictors, in checkpoints that have them.
    predictor: tuple[str, ...] = ("mlp.predictor.fc1", "mlp.predictor.fc2")

    recurrent: RecurrentNames | None = None  # of layers that have it in place of qkv and out
    # Tensors without ".weight", but in GGUF files.
    sinks: str = ""
    output_scale: str = ""
    per_layer_gate: str = ""
    per_layer_projection: str = ""
    per_layer_norm: str = ""
    # Layouts of a mixture's FFN: a checkpoint has one of them. gate, up, down are dense layers'.
    experts: tuple[ExpertNames, ...] = ()

    def below(self, prefix: str) -> LayerNames:
        """Return the names with `prefix` before each."""
        experts = tuple(names.below(prefix) for names in self.experts)
        recurrent = self.recurrent and self.recurrent.below(prefix)
        plain = replace(self, experts=(), recurrent=None)
        return replace(_below(plain, prefix), experts=experts, recurrent=recurrent)


@dataclass(frozen=True)
class DraftNames:
    """Modules of a layer that drafts (multi-token prediction); {} is its number, after the others.

    layer: what the names of the layer itself begin with; "": as other layers'. Checkpoints without
    `output_norm`, `tokens` or `head` share those of the model.
    """

    layer: str = ""
    projection: str = "layers.{}.eh_proj"  # of [token's embedding, hidden state]
    token_norm: str = "layers.{}.enorm"
    hidden_norm: str = "layers.{}.hnorm"
    output_norm: str = "layers.{}.shared_head.norm"
    tokens: str = "layers.{}.embed_tokens"
    head: str = "layers.{}.shared_head.head"


@dataclass(frozen=True)
class TensorNames:
    """Modules of the whole model, without a checkpoint's prefix; "" where there is none."""

    tokens: str
    layers: str  # prefix of layer {}
    layer: LayerNames
    final_norm: str
    positions: str = ""
    project_in: str = ""
    project_out: str = ""
    head: str = "lm_head"
    # Of layers' own embeddings, for all layers together.
    per_layer_tokens: str = ""
    per_layer_context: str = ""
    per_layer_context_norm: str = ""
    # Of the config's layers that are one of the checkpoint: fields of `layer` that are others.
    parts: tuple[Mapping[str, Any], ...] = ({},)
    # The same in some layers, by number.
    layer_changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    # Of each layer the checkpoint's two that hold its attention and its FFN; empty: one holds both.
    blocks: tuple[tuple[int, int], ...] = ()
    draft: DraftNames = DraftNames()

    def of_layer(self, layer_id: int) -> LayerNames:
        """Return the names of layer `layer_id`."""
        own = self.within_layer(layer_id)
        first, second = (own.below(self.layers.format(block)) for block in self.blocks_of(layer_id))
        return replace(first, **{role: getattr(second, role) for role in FFN_ROLES})

    def within_layer(self, layer_id: int) -> LayerNames:
        """Return the names of layer `layer_id`, without what they begin with."""
        changes = {
            **self.parts[layer_id % len(self.parts)],
            **self.layer_changes.get(layer_id, {}),
        }
        return replace(self.layer, **changes)

    def blocks_of(self, layer_id: int) -> tuple[int, int]:
        """Return which of the checkpoint's layers hold attention and FFN of layer `layer_id`."""
        return self.blocks[layer_id] if self.blocks else (layer_id // len(self.parts),) * 2

    def of_draft(self, layer_id: int) -> TensorNames:
        """Return the names of the model of one layer that `ModelConfig.draft_layer` is."""
        own = {name: text.format(layer_id) for name, text in vars(self.draft).items()}
        return replace(
            self,
            layers=own["layer"] or self.layers.format(layer_id),
            final_norm=own["output_norm"],
            tokens=own["tokens"],
            head=own["head"],
            draft=DraftNames(**own),
            parts=({},),
            layer_changes={},
            blocks=(),
        )

    def with_layer(self, **changes: Any) -> TensorNames:
        """Return the names with some of a layer's replaced."""
        return replace(self, layer=replace(self.layer, **changes))


FFN_ROLES = (
    *("ffn_norm", "gate", "up", "down", "ffn_output_norm", "pair_norm"),
    *("predictor", "experts"),
)
LLAMA_NAMES = TensorNames(
    tokens="embed_tokens",
    layers="layers.{}.",
    layer=LayerNames(
        norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        ffn_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        q_norm="self_attn.q_norm",  # of families with qk_norm
        k_norm="self_attn.k_norm",
    ),
    final_norm="norm",
)


# Of GGUF files.
_GGUF = ExpertNames(
    router="ffn_gate_inp.weight",
    gate="ffn_gate_exps.weight",
    up="ffn_up_exps.weight",
    down="ffn_down_exps.weight",
    router_bias="ffn_gate_inp.bias",
    selection_bias="exp_probs_b.bias",
    gate_bias="ffn_gate_exps.bias",
    up_bias="ffn_up_exps.bias",
    down_bias="ffn_down_exps.bias",
    shared_gate="ffn_gate_shexp.weight",
    shared_up="ffn_up_shexp.weight",
    shared_down="ffn_down_shexp.weight",
    shared_router="ffn_gate_inp_shexp.weight",
    router_scale="ffn_gate_inp.scale",
    expert_scale="ffn_down_exps.scale",
)
# Three tensors; gate and up in one; one an expert, as before April 2024.
GGUF_EXPERTS = (
    _GGUF,
    replace(_GGUF, gate="ffn_gate_up_exps.weight", up="ffn_gate_up_exps.weight"),
    replace(_GGUF, gate="ffn_gate.{}.weight", up="ffn_up.{}.weight", down="ffn_down.{}.weight"),
)
# What they call each role; where a family's converter differs: `GgufArchitecture.names`.
GGUF_NAMES = TensorNames(
    tokens="token_embd",
    layers="blk.{}.",
    final_norm="output_norm",
    head="output",
    per_layer_tokens="per_layer_token_embd",
    per_layer_context="per_layer_model_proj",
    per_layer_context_norm="per_layer_proj_norm",
    draft=DraftNames(
        projection="blk.{}.nextn.eh_proj",
        token_norm="blk.{}.nextn.enorm",
        hidden_norm="blk.{}.nextn.hnorm",
        output_norm="blk.{}.nextn.shared_head_norm",
        tokens="blk.{}.nextn.embed_tokens",
        head="blk.{}.nextn.shared_head_head",
    ),
    layer=LayerNames(
        norm="attn_norm",
        qkv=("attn_q", "attn_k", "attn_v"),
        out="attn_output",
        ffn_norm="ffn_norm",
        gate="ffn_gate",
        up="ffn_up",
        down="ffn_down",
        attention_norm="post_attention_norm",
        ffn_output_norm="post_ffw_norm",
        pair_norm="post_ffw_norm",
        q_norm="attn_q_norm",
        k_norm="attn_k_norm",
        q_b="attn_q_b",
        kv_b="attn_kv_b",
        k_b="attn_k_b",
        v_b="attn_v_b",
        predictor=("fc1", "fc2"),
        recurrent=RecurrentNames(
            inputs=("attn_qkv", "attn_gate"),
            gates=("ssm_beta", "ssm_alpha"),
            conv="ssm_conv1d",
            decay="ssm_a",
            step_bias="ssm_dt.bias",
            norm="ssm_norm",
            out="ssm_out",
            skip="ssm_d",
        ),
        sinks="attn_sinks",
        output_scale="layer_output_scale",
        per_layer_gate="inp_gate",
        per_layer_projection="proj",
        per_layer_norm="post_norm",
        experts=GGUF_EXPERTS,
    ),
)
