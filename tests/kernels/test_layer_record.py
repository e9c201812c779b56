"""The record of a layer's numbers: one layout for Numba and for CUDA."""

import re

import numpy as np

from hotcold.cuda_kernels.source import CSRC
from hotcold.numba_kernels.layer_record import LAYER_NUMBERS

_TYPES = {"int": np.int32, "float": np.float32, "bool": np.bool_}


def test_the_structure_of_cuda_has_the_same_fields() -> None:
    text = re.sub("//.*", "", (CSRC / "layer.cuh").read_text())
    found = re.search(r"struct LayerNumbers \{(.*?)\};", text, re.DOTALL)
    assert found is not None
    fields = [
        (name.strip(), np.dtype(_TYPES[kind]))
        for kind, names in re.findall(r"(\w+) ([\w, ]+);", found[1])
        for name in names.split(",")
    ]
    assert fields == [(name, dtype) for name, (dtype, *_) in (LAYER_NUMBERS.fields or {}).items()]
    assert np.dtype(fields, align=True).itemsize == LAYER_NUMBERS.itemsize
