"""Neurons of several blocks: cut between threads and services, and found again when loaded."""

from __future__ import annotations

import numpy as np

from hotcold.actors.protocol.stripes import in_loading_order, share_stripes


def test_each_service_has_its_share_of_every_block() -> None:
    ids, sizes = np.arange(200, dtype=np.int32), (80, 0, 16, 104)
    stripes = share_stripes(16, [3, 1])
    shards = [in_loading_order(ids, sizes, own) for own in stripes]
    assert np.sort(np.concatenate(shards)).tolist() == ids.tolist()
    blocks = np.repeat(np.arange(4), sizes)
    for shard, share in zip(shards, (0.75, 0.25), strict=True):
        assert (np.diff(blocks[shard]) >= 0).all()
        counts = np.bincount(blocks[shard], minlength=4)
        assert np.abs(counts - share * np.array(sizes)).max() <= 2  # stripes of 6 or 7 neurons


def test_a_neuron_is_in_the_same_stripe_whoever_has_it() -> None:
    """Also where others are on a GPU."""
    ids, sizes = np.delete(np.arange(90), [3, 4, 50]), (40, 50)
    (whole,) = share_stripes(16, [1])
    order = in_loading_order(ids, sizes, whole)
    for threads in ([1, 1], [2, 1, 1], [1, 3, 2, 5]):
        shards = [in_loading_order(ids, sizes, own) for own in share_stripes(16, threads)]
        for block, (first, last) in enumerate([(0, 40), (40, 90)]):
            parts = [shard[(shard >= first) & (shard < last)] for shard in shards]
            expected = order[(order >= first) & (order < last)]
            assert np.concatenate(parts).tolist() == expected.tolist(), block
