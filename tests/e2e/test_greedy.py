"""64 greedy tokens of every variant equal transformers' own, through the whole driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.model.sampling import SamplingParams
from tests.actors.in_process import InProcessSystem
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint
from tests.tiny_models import VARIANTS


@pytest.mark.sweep(keep=5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers(
    variant: str, tiny: Callable[..., TinyCheckpoint]
) -> None:
    checkpoint = tiny(variant)
    sampling = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(sampling, prompt_ids=checkpoint.ids[:10].tolist())
    with InProcessSystem(checkpoint.path, num_services=2) as system:
        for mode in ("dense", "exact"):
            config = SystemConfig(str(checkpoint.path), mode, context_length=128)
            driver = Driver(config, system.exchange, system.topology)
            *_, last = driver.generate(request)
            driver.close()
            assert last.result is not None
            assert last.result.ids == checkpoint.greedy_ids
            assert last.result.finish_reason == "length"
            assert last.result.num_prompt_tokens == 10
