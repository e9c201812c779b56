"""Which service made a NaN, and which sequences have it. Asked only when there is one."""

import numpy as np

from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.numba_kernels.serve.mailbox import SharedBuffers

_GPU = 0


def bad_embedding(buffers: SharedBuffers, num_tokens: int) -> NotFiniteError:
    """Tokens were placed whose embeddings are not finite: no service is to blame."""
    return _error(buffers, "in its token embeddings", _bad(buffers.hidden[:num_tokens]), None)


def bad_layer(
    buffers: SharedBuffers, layer: int, num_tokens: int, first: int = 1
) -> NotFiniteError:
    """A layer whose input was finite has an output, or an input of its FFN, that is not.

    Its partial outputs are those of services `first` and after.
    """
    mixed, ffn_input = buffers.mixed[:num_tokens], buffers.ffn_input[:num_tokens]
    rows = _bad(mixed) | _bad(ffn_input)
    guilty = _GPU if rows.any() else None
    for service in range(first, buffers.partials.shape[0]):
        partial = _bad(buffers.partials[service, :num_tokens])
        if guilty is None and partial.any():
            guilty = service
        rows |= partial
    rows |= _bad(buffers.hidden[:num_tokens])
    return _error(buffers, f"in layer {layer}", rows, guilty)


def bad_logits(buffers: SharedBuffers, num_tokens: int, num_logits: int) -> NotFiniteError:
    """Logits that are not finite, of the last `num_logits` tokens."""
    rows = np.zeros(num_tokens, bool)
    rows[num_tokens - num_logits :] = _bad(buffers.logits[:num_logits])
    return _error(buffers, "in its logits", rows, _GPU)


def _bad(values: np.ndarray) -> np.ndarray:
    """Which rows are not finite: (T,) bool."""
    bad: np.ndarray = ~np.isfinite(values).all(axis=1)
    return bad


def _error(
    buffers: SharedBuffers, where: str, rows: np.ndarray, guilty: int | None
) -> NotFiniteError:
    slots = buffers.slots[: rows.size][rows]
    return NotFiniteError(where, frozenset(slots.tolist()), guilty)
