"""Which layers' attention is windowed: layer_types, or the older keys that it followed from."""

from __future__ import annotations

from collections.abc import Callable

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import shown

_KINDS = ("full_attention", "sliding_attention")
_MAX_WINDOW = 1 << 26


def sliding_layers(
    reader: ConfigReader, is_sliding: Callable[[int], bool], num_layers: int
) -> tuple[bool, ...]:
    """Whether each layer is windowed: as `layer_types` says, or `is_sliding` without it.

    Errors:  ConfigError for other kinds of layers, or another number of them
    """
    if not reader.has("layer_types"):
        return tuple(is_sliding(layer) for layer in range(num_layers))
    kinds = reader.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.fail("layer_types", f"is {shown(kinds, 60)}; give one for each layer")
    for kind in kinds:
        if kind not in _KINDS:
            raise reader.fail(
                "layer_types", f"has {shown(kind)}, which is not supported; {' or '.join(_KINDS)}"
            )
    return tuple(kind == "sliding_attention" for kind in kinds)


def windows(
    reader: ConfigReader, sliding: tuple[bool, ...], default: int | None = None
) -> tuple[int, ...]:
    """The window of each layer, 0 where it is not windowed; () where none is.

    Errors:  ConfigError where a layer is windowed and there is no sliding_window
    """
    if not any(sliding):
        return ()
    size = reader.integer("sliding_window", default, high=_MAX_WINDOW)
    return tuple(size if is_windowed else 0 for is_windowed in sliding)
