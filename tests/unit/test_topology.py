"""Who does what, of services that are named here."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.actors.protocol.messages import ServicePart
from hotcold.actors.protocol.topology import Topology


def neurons(*counts: int) -> list[np.ndarray]:
    return [np.arange(count, dtype=np.int32) for count in counts]


LOWER = ServicePart("lower", attention=range(2), neuron_ids=neurons(0, 4, 0, 0))
UPPER = ServicePart("upper", attention=range(2, 4), has_head=True, neuron_ids=neurons(0, 1, 2, 0))
FIRST = ServicePart("cpu0", neuron_ids=neurons(7, 6, 5, 4), host="a")
SECOND = ServicePart("cpu1", neuron_ids=neurons(0, 1, 1, 1), host="b")
NONE = ServicePart("cpu2", host="a")


def test_two_services_with_attention() -> None:
    found = Topology((FIRST, LOWER, NONE, UPPER, SECOND))
    assert found.attention_of.tolist() == [1, 1, 3, 3] and found.head == 3
    assert found.cache_services == [1, 3] and found.cpu_services == [0, 2, 4]
    assert found.num_neurons.T.tolist() == [
        [7, 6, 5, 4], [0, 4, 0, 0], [0, 0, 0, 0], [0, 1, 2, 0], [0, 1, 1, 1]
    ]  # fmt: skip
    assert found.num_hot.tolist() == [0, 5, 2, 0]
    assert found.ffn_of == [[0, 2, 4], [1, 3, 0, 2, 4], [3, 0, 2, 4], [0, 2, 4]]
    lists, counts = found.ffn_lists
    assert [row[count] for row, count in zip(lists, counts, strict=True)] == [1, 1, 3, 3]
    assert found.is_chained.tolist() == [True, False, False, True]
    assert [row[:count].tolist() for row, count in zip(lists, counts, strict=True)] == found.ffn_of
    assert [len(shard) for shard in found.shards] == [4, 0, 4]
    assert found.on_host("a") == [0, 2] and found.on_host("b") == [4]


@pytest.mark.parametrize("parts", [(LOWER,), (UPPER,), (LOWER, UPPER, UPPER), (FIRST, SECOND)])
def test_a_layer_s_attention_and_the_head_are_in_one_service(
    parts: tuple[ServicePart, ...],
) -> None:
    with pytest.raises(ValueError, match="heads in all services"):
        Topology(parts)
