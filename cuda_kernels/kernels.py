"""The kernels of csrc/ as methods, each one launch or a few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from hotcold.cuda_kernels.launch import NULL, Argument, CupyLauncher, Launcher, record
from hotcold.cuda_kernels.matrix import ITEM_BYTES, DeviceMatrix
from hotcold.cuda_kernels.neurons import (
    DeviceLowRank,
    DeviceNeurons,
    DevicePredictor,
    DeviceRouter,
    DeviceSigns,
    LayerResidual,
    PredictorScratch,
    SharedMemory,
)
from hotcold.cuda_kernels.sizes import (
    RUN_PARTS,
    SPLIT_POSITIONS,
    THREADS,
    WARP,
    FfnLayout,
    attention_lanes,
    attention_queries,
    ceil_div,
    down_columns_a_thread,
    down_tiles,
    ffn_scratch_items,
    has_whole_pieces,
    product_rows_a_block,
    product_tiles,
)
from hotcold.cuda_kernels.source import Entry
from hotcold.numba_kernels.formats import QUANT_GROUP

RMS_NORM, LAYER_NORM = 0, 1  # as in numba_kernels.decode.norm
# as in numba_kernels.checks
RELU, SILU, GELU, GELU_TANH, RELU2, FATRELU, DRELU, CLAMPED_SILU = range(8)
INPUT_PLANES = 3  # as in numba_kernels.ir.bit_ir
MAX_TOKENS = 32
MAX_EXPERTS = 1024  # of a router
_NORM_THREADS = _GIVING_THREADS = 512
_PLANE_LANES = 256
_MAX_HEAD_DIM = 256
_WARPS = THREADS // WARP

_NORM = Entry("norm", "NORM_TOKENS")
_SOFTCAP = Entry("softcap", "SOFTCAP")
_QUANTIZE = Entry("quantize", "QUANTIZE_VECTORS")
_MERGE_SPLITS = Entry("attention", "MERGE_SPLITS")
_SUM_PARTS = Entry("sum_parts", "SUM_PARTS")
_CHOOSE_EXPERTS = Entry("router", "CHOOSE_EXPERTS")
_GIVE_INPUT = Entry("share", "GIVE_INPUT")
_AWAIT_OUTPUTS = Entry("share", "AWAIT_OUTPUTS")
_ADD_OUTPUTS = Entry("share", "ADD_OUTPUTS")
_PACK_PLANES = Entry("predict", "PACK_PLANES")
_SCORE_NEURONS = Entry("predict", "SCORE_NEURONS")
_COUNT_MASKS = Entry("predict", "COUNT_MASKS")
_LIST_NEURONS = Entry("predict", "LIST_NEURONS")


class Layer(NamedTuple):
    """A layer as kernels see it; its arrays are on the device.

    struct: () of LAYER_NUMBERS, an argument of launches; numbers: the same as Python's, by name
    vectors: a `LayerVectors` of (size,) arrays; rope_table (P, 2, half), or (0, 2, 0) without rope,
    of keys; query_table of queries, mostly the same
    """

    struct: np.ndarray
    numbers: Any
    vectors: Any
    rope_table: Any
    query_table: Any

    @classmethod
    def of(cls, record: Any, vectors: Any, rope_table: Any, query_table: Any = None) -> Layer:
        """A layer with a record of LAYER_NUMBERS; queries have keys' table where none is given."""
        query_table = rope_table if query_table is None else query_table
        struct = np.array(record)
        named = zip(struct.dtype.names or (), struct.item(), strict=True)
        return cls(struct, SimpleNamespace(**dict(named)), vectors, rope_table, query_table)


class PagedCache(NamedTuple):
    """A layer's keys and values, and where a step's tokens stand in them.

    Shapes:  keys, values (M, KV, 64, dim); positions, slots (T,); page_tables (slots, pages)
    Dtypes:  keys, values float32 or uint16 (float16 bits); the others int32
    """

    keys: Any
    values: Any
    positions: Any
    slots: Any
    page_tables: Any


class CudaKernels:
    """The kernels of the current device for a step of 1 <= T <= 32 tokens.

    Every method only puts work on the current stream: it waits for nothing and allocates nothing,
    so that it can be captured in a CUDA graph. The first call of each kind compiles its kernel and
    may allocate work space (quantized activations, 40 bytes a number), so it must precede a
    capture. Only one stream may use an instance at a time. Arrays are on the device, C-contiguous,
    float32 where nothing else is said. A token's results are bit-equal whatever its batch-mates.
    Errors:  ValueError for too many tokens and for shapes that kernels do not support
    """

    def __init__(self, launcher: Launcher | None = None) -> None:
        """Without a launcher CuPy's, which is imported now. Errors: ImportError."""
        self._launcher = CupyLauncher() if launcher is None else launcher
        self._quantized: dict[int, Any] = {}  # by width: work space
        self._ready: dict[int, tuple[Any, ...]] = {}  # by width: whose numbers are there already

    def begin(self) -> None:
        """Begin a graph, or what may become one: it quantizes all that it reads itself."""
        self._ready.clear()

    def norm(
        self,
        layer: Layer,
        x: Any,
        weight: Any,
        bias: Any,
        out: Any,
        residual: Any = None,
        reader: DeviceMatrix | None = None,
    ) -> Any:
        """out[t] = the layer's kind of norm of x[t]; x[t] itself without weights. Returns out.

        With `residual` out[t] = residual[t] + residual_scale * norm. Where `reader`, which reads
        `out` next, is quantized, so is `out`.
        Shapes:  x, out (T, d), may be one array; residual (T, d), another; weight (d,) or (0,),
                 bias (d,) or (0,)
        """
        arguments = (
            layer.struct, np.int32(layer.numbers.norm_kind), self._at(x), self._at(weight),
            self._at(bias), np.int32(x.shape[1]), np.int64(x.shape[1]), self._at(residual),
            self._at(out), self._quantized_for(reader, out),
        )  # fmt: skip
        self._launcher.launch(_NORM, (x.shape[0], 1, 1), _NORM_THREADS, arguments)
        return out

    def norm_parts(self, layer: Layer, x: Any, first: int, last: int, weight: Any) -> None:
        """RMSNorm, in place, of each `size` numbers of x[t, first:last].

        Shapes:  x (T, d), weight (size,), last - first a multiple of size
        """
        width, row_items = weight.shape[0], x.shape[1]
        at = self._at(x) + np.uint64(4 * first)
        arguments = (
            layer.struct, np.int32(RMS_NORM), at, self._at(weight), NULL, np.int32(width),
            np.int64(row_items), NULL, at, record(**_NOWHERE),
        )  # fmt: skip
        grid = (x.shape[0], (last - first) // width, 1)
        self._launcher.launch(_NORM, grid, _NORM_THREADS, arguments)

    def softcap(self, x: Any, cap: float) -> None:
        """x = cap * tanh(x / cap), in place."""
        arguments = self._at(x), np.int64(x.size), np.float32(cap)
        self._launcher.launch(_SOFTCAP, (ceil_div(x.size, THREADS), 1, 1), THREADS, arguments)

    def gemv(
        self, weights: DeviceMatrix, bias: Any, x: Any, out: Any, residual: Any = None
    ) -> None:
        """out[t, n] = weights[n] . x[t] + bias[n] [+ residual[t, n]].

        Shapes:  weights (N, d), bias (N,) or (0,), x (T, d); out, residual (T, N), may be one array
        """
        num_tokens, num_rows = _checked_tokens(x), weights.num_rows
        if num_rows == 0:
            return
        vectors, at = self._input(weights.format, x), self._at(weights.data)
        is_vector = has_whole_pieces(weights, at, *vectors["x"])
        tiles = product_tiles(num_tokens, is_vector)
        entry = _entry("gemv", "GEMV", weights.format, is_vector, tiles.tokens)
        matrix = record(
            weights=at,
            bias=self._at(bias),
            row_bytes=np.int64(weights.row_bytes),
            num_rows=np.int64(num_rows),
        )
        arguments = (
            matrix, vectors, np.int32(tiles.num_tiles), self._at(residual), self._at(out),
        )  # fmt: skip
        grid = ceil_div(num_rows, product_rows_a_block(weights.format, tiles))
        self._launcher.launch(entry, (grid, 1, 1), THREADS, arguments)

    def rope_store(self, layer: Layer, qkv: Any, cache: PagedCache) -> None:
        """Rotate query and key heads in place, write keys and values of this layer to the cache.

        Shapes:  qkv (T, (H + 2 KV) * dim); rope tables (P, 2, half), or (0, 2, 0) for none:
                 2 * half items of a head are rotated
        """
        numbers, table = layer.numbers, layer.rope_table
        arguments: tuple[Argument, ...] = (
            layer.struct, self._at(qkv), self._at(layer.query_table), self._at(table),
            np.int32(table.shape[2]),
            *self._places(cache), self._at(cache.keys), self._at(cache.values),
        )  # fmt: skip
        entry = Entry("rope", "ROPE_STORE", (_cache_format(cache.keys),))
        all_heads = numbers.num_heads + 2 * numbers.num_kv_heads
        pairs = all_heads * ceil_div(numbers.head_dim, 2)
        self._launcher.launch(
            entry, (ceil_div(pairs, THREADS), qkv.shape[0], 1), THREADS, arguments
        )

    def decode_attention(
        self,
        layer: Layer,
        qkv: Any,
        cache: PagedCache,
        max_length: int,
        scratch: Any,
        out: Any,
        reader: DeviceMatrix | None = None,
    ) -> None:
        """Each token's heads attend to the positions up to its own, grouped-query.

        With a window only to the last of them; with a softcap scores become
        softcap * tanh(score / softcap); the layer's sinks join the softmax. Positions are below
        `max_length`. scratch: `attention_scratch_items`; reader: as of `norm`.
        Shapes:  qkv as in `rope_store`; out (T, H * dim); dim <= 256
        """
        numbers, num_tokens = layer.numbers, qkv.shape[0]
        num_heads, num_kv_heads = numbers.num_heads, numbers.num_kv_heads
        head_dim, group = numbers.head_dim, num_heads // num_kv_heads
        if not 0 < head_dim <= _MAX_HEAD_DIM:
            raise ValueError(f"heads of {head_dim} numbers; at most {_MAX_HEAD_DIM} are computed")
        at = self._at(qkv), self._at(cache.keys), self._at(cache.values)
        is_vector = head_dim % 8 == 0 and not any(address % 16 for address in at)
        queries, num_splits = attention_queries(group), ceil_div(max_length, SPLIT_POSITIONS)
        entry = Entry(
            "attention",
            "ATTEND_SPLITS",
            (_cache_format(cache.keys), _flag(is_vector), attention_lanes(head_dim), queries),
        )
        arguments: tuple[Argument, ...] = (
            layer.struct, *at, *self._places(cache), np.int32(num_splits), self._at(scratch),
        )  # fmt: skip
        grid = (num_kv_heads * ceil_div(group, queries), num_tokens, num_splits)
        self._launcher.launch(entry, grid, THREADS, arguments)
        reader = None if head_dim % QUANT_GROUP else reader
        merged = (
            layer.struct, self._at(scratch), self._at(layer.vectors.sinks),
            self._at(cache.positions), np.int32(num_splits), self._at(out),
            self._quantized_for(reader, out),
        )  # fmt: skip
        self._launcher.launch(_MERGE_SPLITS, (num_heads, num_tokens, 1), THREADS, merged)

    def weigh_positions(
        self, layer: Layer, products: Any, positions: Any, first: int, out: Any
    ) -> None:
        """What values weigh, of tokens' products with keys of positions from `first` on.

        Window, softcap and sinks as of `decode_attention`; 0 of positions that a token does not
        see.
        Shapes:  products, out (KV, T * heads of a key-value head, P), positions (T,)
        Dtypes:  out float32 or uint16 (float16 bits)
        """
        kv_heads, rows, length = products.shape
        arguments: tuple[Argument, ...] = (
            layer.struct, self._at(products), self._at(layer.vectors.sinks), self._at(positions),
            np.int32(rows), np.int32(first), np.int32(length), self._at(out),
        )  # fmt: skip
        entry = Entry("attention", "WEIGH_POSITIONS", (_cache_format(out),))
        self._launcher.launch(entry, (rows, kv_heads, 1), THREADS, arguments)

    def _places(self, cache: PagedCache) -> tuple[Argument, ...]:
        """positions, slots, page_tables, pages_a_slot, page_positions."""
        return (
            self._at(cache.positions), self._at(cache.slots), self._at(cache.page_tables),
            np.int32(cache.page_tables.shape[1]), np.int32(cache.keys.shape[2]),
        )  # fmt: skip

    def route(
        self, layer: Layer, router: DeviceRouter, x: Any, ffn_input: Any, scratch: Any, weights: Any
    ) -> None:
        """weights[t, b] = what block b weighs for token t: 0 of experts that are not chosen.

        As `numba_kernels.decode.router.route_tokens`; the router reads x, the shared expert's gate
        ffn_input. scratch: `router_scratch_items`.
        Shapes:  x, ffn_input (T, d); weights (T, B), the layer's blocks first
        """
        num_tokens, num_experts = _checked_tokens(x), router.rows.num_rows
        if num_experts > MAX_EXPERTS:
            raise ValueError(f"{num_experts} experts; routers choose among {MAX_EXPERTS} at most")
        logits = scratch[: num_tokens * num_experts].reshape(num_tokens, num_experts)
        self.gemv(router.rows, router.bias, x, logits)
        shared = None
        if router.shared is not None:
            shared = scratch[logits.size : logits.size + num_tokens].reshape(num_tokens, 1)
            self.gemv(router.shared, router.bias[:0], ffn_input, shared)
        scores = record(
            logits=self._at(logits),
            selection_bias=self._at(router.selection_bias),
            shared=self._at(shared),
        )
        arguments = layer.struct, scores, np.int32(weights.shape[1]), self._at(weights)
        self._launcher.launch(_CHOOSE_EXPERTS, (num_tokens, 1, 1), THREADS, arguments)

    def router_scratch_items(self, num_tokens: int, num_experts: int) -> int:
        """float32 items that `route` needs as scratch."""
        return num_tokens * (num_experts + 1)

    def hot_ffn(
        self,
        neurons: DeviceNeurons,
        x: Any,
        function: Any,
        thresholds: Any,
        scratch: Any,
        out: Any,
        num_fired: Any,
        block_weights: Any = None,
        residual: LayerResidual | None = None,
        masks: Any = None,
    ) -> None:
        """The FFN of the hot neurons, those on the device, without the layer's down bias.

        With `residual` out is the layer's output, added up as the driver does it, the down bias
        too; not finite where x is not. Without its ffn_residual out is what the driver norms.

        out[t] = sum over n of fn(gate[n] . x[t] + bias) (up[n] . x[t] + bias) weight[t, n] down[n]

        function, thresholds: `Activation` and `Thresholds` of numba_kernels; drelu applies relu to
        both factors. weight: of the neuron's block, 0 where the token does not choose it; 1 without
        `block_weights`. A neuron whose block no token chooses costs nothing; one whose gate passes
        for none its gate row;
        one that only fails the product threshold also its up row. num_fired is set to the number of
        neurons that fire for any token, and of up rows read. scratch: `ffn_scratch_items`.
        masks: of `predict`, of these neurons: others than a token wants count as not firing.
        Shapes:  x, out (T, d); num_fired (2,) int32; block_weights (T, B) float32; masks (N,)
                 uint32; there may be no neurons
        """
        layout = FfnLayout(_checked_tokens(x), neurons.num_neurons, neurons.gate.width)
        if layout.num_neurons:
            vectors = self._input(neurons.gate.format, x)
            rule = record(
                threshold=np.float32(function.threshold),
                gate_threshold=np.float32(thresholds.gate),
                product_threshold=np.float32(thresholds.product),
                code=np.int32(function.code),
            )
            places = self._places_of(scratch, layout)
            self._gates(neurons, vectors, rule, block_weights, masks, places)
            self._down(neurons.down, layout, self._places_of(scratch, layout))
        cells, places = layout.num_tokens * layout.width, self._places_of(scratch, layout)
        sums = record(
            partials=places.partials,
            fired_counts=places.fired_counts,
            cells=np.int64(cells),
            num_partials=np.int32(layout.num_partials),
            run_partials=np.int32(RUN_PARTS // layout.parts_a_block),
            num_parts=np.int32(layout.num_parts),
        )
        ffn_residual, bias, scale = residual or LayerResidual(None, None, 1.0)
        added_to = record(
            ffn_residual=self._at(ffn_residual),
            input=NULL if residual is None else self._at(x),
            bias=self._at(bias),
            block_weights=self._at(block_weights),
            scale=np.float32(scale),
            width=np.int32(layout.width),
            num_blocks=np.int32(0 if bias is None else bias.shape[0]),
        )
        arguments = sums, added_to, self._at(out), self._at(num_fired)
        self._launcher.launch(_SUM_PARTS, (ceil_div(cells, WARP), 1, 1), THREADS, arguments)

    def _gates(
        self,
        neurons: DeviceNeurons,
        vectors: np.ndarray,
        rule: np.ndarray,
        block_weights: Any,
        masks: Any,
        places: _FfnPlaces,
    ) -> None:
        gate, up = neurons.gate, neurons.up
        at = self._at(gate.data), self._at(None if up is None else up.data)
        is_vector = has_whole_pieces(gate, *at, *vectors["x"])
        tiles = product_tiles(int(vectors["num_tokens"][0]), is_vector)
        rows = record(
            gate=at[0],
            up=at[1],
            gate_bias=self._at(neurons.gate_bias),
            up_bias=self._at(neurons.up_bias),
            down_norms=self._at(neurons.down_norms),
            starts=self._at(neurons.starts),
            row_bytes=np.int64(gate.row_bytes),
            num_neurons=np.int32(neurons.num_neurons),
            num_blocks=np.int32(max(1, neurons.starts.size - 1)),
        )
        arguments = (
            rows, vectors, rule, self._at(block_weights), self._at(masks),
            np.int32(tiles.num_tiles), places.h, places.is_fired,
        )  # fmt: skip
        entry = _entry("gates", "GATES", gate.format, is_vector, tiles.tokens)
        grid = ceil_div(neurons.num_neurons, product_rows_a_block(gate.format, tiles))
        self._launcher.launch(entry, (grid, 1, 1), THREADS, arguments)

    def _down(self, down: DeviceMatrix, layout: FfnLayout, places: _FfnPlaces) -> None:
        at = self._at(down.data)
        is_vector = has_whole_pieces(down, at, places.partials)
        tiles = down_tiles(down.format, layout.num_tokens, is_vector)
        rows = record(
            down=at,
            is_fired=places.is_fired,
            h=places.h,
            row_bytes=np.int64(down.row_bytes),
            num_neurons=np.int32(layout.num_neurons),
            width=np.int32(layout.width),
            num_tokens=np.int32(layout.num_tokens),
        )
        parts = record(
            part_size=np.int32(layout.part_size),
            parts_a_block=np.int32(layout.parts_a_block),
            tiles=np.int32(tiles.num_tiles),
        )
        arguments = rows, parts, places.partials, places.fired_counts
        columns = down_columns_a_thread(down.format, is_vector) * THREADS // tiles.num_tiles
        grid = (ceil_div(layout.width, columns), layout.num_partials, 1)
        entry = _entry("down", "DOWN_PARTS", down.format, is_vector, tiles.tokens)
        self._launcher.launch(entry, grid, THREADS, arguments)

    def attention_scratch_items(
        self, num_tokens: int, num_heads: int, head_dim: int, max_length: int
    ) -> int:
        """float32 items that `decode_attention` needs as scratch."""
        return num_tokens * num_heads * ceil_div(max_length, SPLIT_POSITIONS) * (head_dim + 2)

    def ffn_scratch_items(self, num_tokens: int, num_neurons: int, width: int) -> int:
        """float32 items that `hot_ffn` needs as scratch."""
        return ffn_scratch_items(num_tokens, num_neurons, width)

    def predict(
        self,
        predictor: DevicePredictor,
        x: Any,
        num_own: int,
        scratch: PredictorScratch,
        num_listed: Any,
    ) -> None:
        """scratch.masks[n]: bit t where neuron n is expected to fire for x[t].

        As numba_kernels.decode.predict, to the bit. num_listed (1,) int32 is set to the number of
        the first `num_own` neurons, the device's, that have a mask.
        Shapes:  x (T, d)
        """
        if isinstance(predictor, DeviceLowRank):
            self._score_lowrank(predictor, x, scratch)
        else:
            self._score_signs(predictor, x, scratch)
        counted = self._at(scratch.masks), np.int32(num_own), self._at(num_listed)
        self._launcher.launch(_COUNT_MASKS, (1, 1, 1), _PLANE_LANES, counted)

    def _score_signs(self, predictor: DeviceSigns, x: Any, scratch: PredictorScratch) -> None:
        num_tokens, width = x.shape
        words = scratch.planes.size // scratch.units.size // INPUT_PLANES
        bits = predictor.bits

        def given() -> np.ndarray:  # addresses are asked for each launch
            return record(
                x=self._at(x),
                center=self._at(predictor.center),
                scale=self._at(predictor.scale),
                planes=self._at(scratch.planes),
                units=self._at(scratch.units),
                width=np.int32(width),
                words=np.int32(words),
                num_tokens=np.int32(num_tokens),
            )

        self._launcher.launch(_PACK_PLANES, (num_tokens, 1, 1), _PLANE_LANES, (given(),))
        rows = record(
            bits=self._at(bits),
            thresholds=self._at(predictor.thresholds),
            num_neurons=np.int32(bits.shape[0]),
            num_planes=np.int32(bits.shape[1] // words),
        )
        grid = ceil_div(bits.shape[0], _WARPS), 1, 1
        masks = self._at(scratch.masks)
        self._launcher.launch(_SCORE_NEURONS, grid, THREADS, (rows, given(), masks))

    def _score_lowrank(self, predictor: DeviceLowRank, x: Any, scratch: PredictorScratch) -> None:
        (num_tokens, width), (size, num_neurons) = x.shape, predictor.up.shape
        kind = "INT8" if predictor.up.dtype == np.int8 else "HALF"

        def given() -> np.ndarray:
            return record(
                down=self._at(predictor.down),
                up=self._at(predictor.up),
                scales=self._at(predictor.scales),
                thresholds=self._at(predictor.thresholds),
                size=np.int32(size),
                width=np.int32(width),
                num_neurons=np.int32(num_neurons),
                num_tokens=np.int32(num_tokens),
            )

        hidden_of, masks_of = (
            Entry("predict", macro, (kind,)) for macro in ("LOWRANK_HIDDEN", "LOWRANK_MASKS")
        )
        arguments = given(), self._at(x), self._at(scratch.hidden)
        grid = ceil_div(size, _WARPS), num_tokens, 1
        self._launcher.launch(hidden_of, grid, THREADS, arguments)
        arguments = given(), self._at(scratch.hidden), self._at(scratch.masks)
        grid = ceil_div(num_neurons, THREADS), 1, 1
        self._launcher.launch(masks_of, grid, THREADS, arguments)

    def list_neurons(
        self, predictor: DevicePredictor, scratch: PredictorScratch, shared: SharedMemory
    ) -> None:
        """CPU services get the lists of their neurons that have a mask.

        As `select_kernel` of numba_kernels.decode.predict.
        """
        lists = record(
            ids=self._at(shared.active_ids),
            masks=self._at(shared.active_masks),
            cells=self._at(shared.cells),
            row_items=np.int64(shared.active_ids.shape[1]),
            cell_words=np.int32(shared.cell_words),
            length=np.int32(shared.length),
            stopped=np.int32(shared.stopped),
        )
        at = self._at(scratch.masks), self._at(predictor.bounds), self._at(shared.told)
        grid = predictor.bounds.shape[0] - 1, 1, 1
        self._launcher.launch(_LIST_NEURONS, grid, _PLANE_LANES, (*at, lists))

    def give_input(
        self, layer: int, shared: SharedMemory, x: Any = None, weights: Any = None
    ) -> None:
        """CPU services get a layer's FFN input, and what its blocks weigh if it has experts.

        Without x that the device needs nothing of them in this layer.
        Shapes:  x (T, d), weights (T, B); of tokens that the host has room for
        """

        def vectors(source: Any, target: Any) -> np.ndarray:
            count = 0 if source is None else min(source.size, target.size)
            at = (NULL, NULL) if count == 0 else (self._at(source), self._at(target))
            return record(source=at[0], target=at[1], count=np.int64(count))

        arguments = (
            vectors(x, shared.ffn_input), vectors(weights, shared.block_weights),
            self._at(shared.told), np.int32(layer), self._at(shared.cells[shared.given :]),
            self._at(shared.cells[shared.stopped :]),
        )  # fmt: skip
        self._launcher.launch(_GIVE_INPUT, (1, 1, 1), _GIVING_THREADS, arguments)

    def await_outputs(self, layer: int, shared: SharedMemory) -> None:
        """Wait for CPU services' partial outputs of a layer, or until somebody has stopped them."""
        bells = record(
            cells=self._at(shared.cells),
            cell_words=np.int32(shared.cell_words),
            output=np.int32(shared.output),
            stopped=np.int32(shared.stopped),
            limit_ns=np.int64(shared.limit_ns),
        )
        arguments = bells, self._at(shared.told), np.int32(layer)
        self._launcher.launch(_AWAIT_OUTPUTS, (1, 1, 1), WARP, arguments)

    def add_outputs(
        self, shared: SharedMemory, own: Any, residual: LayerResidual, x: Any, out: Any
    ) -> None:
        """out = the layer's output, of all partial ones, added up as the driver does it; or their
        sum, which the driver norms, without an ffn_residual.

        The bias is in one of the partial outputs. Not finite where the FFN's input x is not.
        Shapes:  x, out, own (T, d), own of the device's neurons, None if it has none
        """
        outputs = record(
            own=self._at(own),
            partials=self._at(shared.partials),
            more=self._at(shared.more_partials),
            service_items=np.int64(shared.partials[0].size),
            num_services=np.int32(shared.partials.shape[0]),
        )
        added = record(
            ffn_residual=self._at(residual.ffn_residual),
            input=self._at(x),
            scale=np.float32(residual.scale),
            width=np.int32(x.shape[1]),
            cells=np.int64(x.size),
        )
        arguments = outputs, added, self._at(shared.told), self._at(out)
        grid = ceil_div(x.size, THREADS), 1, 1
        self._launcher.launch(_ADD_OUTPUTS, grid, THREADS, arguments)

    def widen(self, weights: DeviceMatrix, first: int, last: int, out: Any) -> None:
        """out (n, d) uint16 = rows first..last-1 as float16 bits; NaN where beyond float16."""
        if first >= last:
            return
        at = self._at(weights.data) + np.uint64(first * weights.row_bytes)
        is_vector = has_whole_pieces(weights, at, self._at(out))
        entry = _entry("widen", "WIDEN", weights.format, is_vector)
        arguments = at, np.int64(weights.row_bytes), np.int32(weights.width), self._at(out)
        self._launcher.launch(entry, (last - first, 1, 1), THREADS, arguments)

    def _at(self, array: Any) -> np.uint64:
        """The address of an array; null for None and for an empty one."""
        return NULL if array is None or array.size == 0 else self._launcher.pointer(array)

    def _places_of(self, scratch: Any, layout: FfnLayout) -> _FfnPlaces:
        needed = layout.offsets[-1]
        if scratch.size < needed:
            raise ValueError(f"scratch has {scratch.size} items, the hot FFN needs {needed}")
        base = self._at(scratch)
        return _FfnPlaces(*(base + np.uint64(4 * offset) for offset in layout.offsets[:-1]))

    def _input(self, weight_format: str, x: Any) -> np.ndarray:
        """The record `Input`: x, and for quantized weights values, scales and sums."""
        (num_tokens, width), quantized = x.shape, _NOWHERE
        if weight_format not in ITEM_BYTES:
            if self._ready.pop(width, None) != (self._at(x), num_tokens):
                grid = (ceil_div(width // QUANT_GROUP, _WARPS), num_tokens, 1)
                arguments = self._at(x), np.int32(width), record(**self._space(width))
                self._launcher.launch(_QUANTIZE, grid, THREADS, arguments)
            quantized = self._space(width)
        return record(
            x=self._at(x), **quantized, num_tokens=np.int32(num_tokens), width=np.int32(width)
        )

    def _quantized_for(self, reader: DeviceMatrix | None, x: Any) -> np.ndarray:
        """The record `Quantized` of who writes x, which `reader` reads next."""
        num_tokens, width = x.shape
        self._ready.pop(width, None)
        if reader is None or reader.format in ITEM_BYTES:
            return record(**_NOWHERE)
        self._ready[width] = self._at(x), num_tokens
        return record(**self._space(width))

    def _space(self, width: int) -> dict[str, np.uint64]:
        """Where quantized vectors of that width are."""
        if width not in self._quantized:
            num_bytes = MAX_TOKENS * (width + width // QUANT_GROUP * 8)
            self._quantized[width] = self._launcher.empty_bytes(num_bytes)
        at = self._at(self._quantized[width])
        scales = at + np.uint64(MAX_TOKENS * width)
        sums = scales + np.uint64(MAX_TOKENS * (width // QUANT_GROUP) * 4)
        return {"values": at, "scales": scales, "sums": sums}


_NOWHERE = {"values": NULL, "scales": NULL, "sums": NULL}


class _FfnPlaces(NamedTuple):
    """Addresses of the parts of `FfnLayout.offsets`."""

    h: np.uint64
    is_fired: np.uint64
    fired_counts: np.uint64
    partials: np.uint64


def _entry(file: str, macro: str, weight_format: str, is_vector: bool, *numbers: int) -> Entry:
    return Entry(file, macro, (weight_format.upper(), _flag(is_vector), *numbers))


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _cache_format(keys: Any) -> str:
    return "F32" if keys.dtype == np.float32 else "F16"


def _checked_tokens(x: Any) -> int:
    num_tokens = int(x.shape[0])
    if not 0 < num_tokens <= MAX_TOKENS:
        raise ValueError(f"{num_tokens} tokens; kernels take 1 to {MAX_TOKENS} at once")
    return num_tokens
