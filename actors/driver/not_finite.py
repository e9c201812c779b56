"""Which service made a NaN, and which sequences have it. Asked only when there is one."""

import numpy as np

from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.numba_kernels.serve.mailbox import Wires

_GPU = 0


def bad_embedding(wires: Wires, num_tokens: int) -> NotFiniteError:
    """Tokens were placed whose embeddings are not finite: no service is to blame."""
    return _error(wires, "in its token embeddings", _bad(wires.hidden[:num_tokens]), None)


def bad_layer(wires: Wires, layer: int, num_tokens: int, first: int = 1) -> NotFiniteError:
    """A layer whose input was finite has an output, or an input of its FFN, that is not.

    Its partial outputs are those of services `first` and after.
    """
    mixed, ffn_input = wires.mixed[:num_tokens], wires.ffn_input[:num_tokens]
    rows = _bad(mixed) | _bad(ffn_input)
    guilty = _GPU if rows.any() else None
    for service in range(first, wires.partials.shape[0]):
        partial = _bad(wires.partials[service, :num_tokens])
        if guilty is None and partial.any():
            guilty = service
        rows |= partial
    rows |= _bad(wires.hidden[:num_tokens])
    return _error(wires, f"in layer {layer}", rows, guilty)


def bad_logits(wires: Wires, num_tokens: int, num_logits: int) -> NotFiniteError:
    """Logits that are not finite, of the last `num_logits` tokens."""
    rows = np.zeros(num_tokens, bool)
    rows[num_tokens - num_logits :] = _bad(wires.logits[:num_logits])
    return _error(wires, "in its logits", rows, _GPU)


def _bad(values: np.ndarray) -> np.ndarray:
    """Which rows are not finite: (T,) bool."""
    bad: np.ndarray = ~np.isfinite(values).all(axis=1)
    return bad


def _error(wires: Wires, where: str, rows: np.ndarray, guilty: int | None) -> NotFiniteError:
    slots = wires.slots[: rows.size][rows]
    return NotFiniteError(where, frozenset(slots.tolist()), guilty)
