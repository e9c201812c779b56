"""A layer that drafts proposes what transformers says it should, and changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.draft_policy import AutoPolicy, FixedPolicy
from hotcold.actors.driver.layer_drafter import LayerDrafter
from hotcold.actors.protocol.failures import CacheLost
from tests.actors.batching import answer, answers, batching, greedy
from tests.actors.test_model_drafts import requests
from tests.actors.test_speculation import beside, drafting
from tests.conftest import TinyCheckpoint
from tests.draft_layer_models import DraftedModel
from tests.tiny_models import VOCAB_SIZE
from tests.unit.test_mixtures import FILES, write_gguf


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DraftedModel]:
    made: dict[str, DraftedModel] = {}

    def make(variant: str) -> DraftedModel:
        if variant not in made:
            made[variant] = DraftedModel(variant, tmp_path_factory.mktemp(variant) / "m")
        return made[variant]

    return make


class Resting(FixedPolicy):
    """Drafts of three tokens, for six steps after each 45 without any."""

    num_steps = 0

    def looks(self, num: int, most: int, has_model: bool) -> bool:
        self.num_steps += 1
        return self.num_steps % 51 < 7 and super().looks(num, most, has_model)


PROPOSING = ["qwen3.5", "qwen3.5-moe", "glm4-moe-groups", "deepseek-v3"]
IN_FILES = ["qwen35moe", "glm4moe", "deepseek2"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("variant", "case"),
    [*((name, "") for name in PROPOSING), *((FILES[case][0], case) for case in IN_FILES)],
)
def test_what_a_layer_proposes(
    variant: str, case: str, drafted: Callable[[str], DraftedModel]
) -> None:
    """Each draft of a short prompt's answer, and of a long one's, is transformers'.

    Rows are left out where more than 32 tokens came since the last draft: the first of these.
    With a `case` the model is a GGUF file.
    """
    model, most_tokens = drafted(variant), 12 if case else 75
    if case:
        write_gguf(model.path, case, changed_keys={"nextn_predict_layers": 1})
    checkpoint = TinyCheckpoint(model.path / "m.gguf" if case else model.path)
    seen: list[tuple[list[int], list[int]]] = []
    with batching(checkpoint, shares=True, draft="mtp") as (_, driver):
        assert isinstance(driver.drafter, LayerDrafter)
        drafter: Any = driver.drafter
        propose = drafter.propose

        def recording(asked: Any, counts: Any) -> Any:
            found = propose(asked, counts)
            seen.extend((list(one.tokens), draft) for one, draft in zip(asked, found, strict=True))
            return found

        drafter.propose = recording
        ids = np.random.default_rng(6).integers(0, VOCAB_SIZE, 150).tolist()
        for length in (9, 150):
            seen.clear()
            with drafting(driver, drafter, Resting(3), ngrams=False):
                answer(driver, greedy(ids[:length], most_tokens))
            left_out, end = set[int](), length
            for tokens, draft in seen:
                left_out.update(range(end, len(tokens) - 33))
                end = len(tokens) - 1
                assert draft == model.draft(tokens, len(draft), left_out), len(tokens)
            assert len(seen) > 2 and (left_out or case)


def test_a_lost_cache_changes_nothing(drafted: Callable[[str], DraftedModel]) -> None:
    """It is lost in steps of the layer that drafts; what it had kept is not used again."""
    model = TinyCheckpoint(drafted("glm4-moe-groups").path)
    with batching(model) as (_, driver):
        wanted = answers(driver, requests())
    with batching(model, shares=True, draft="mtp") as (_, driver):
        assert isinstance(driver.drafter, LayerDrafter)
        engine = driver.drafter.engine
        lost: list[bool] = []
        draft = engine.draft

        def losing(*given: Any) -> np.ndarray:
            lost.append(len(lost) % 9 == 4)
            if lost[-1]:
                raise CacheLost("the gpu service was replaced")
            return draft(*given)

        patched: Any = engine
        patched.draft = losing
        with drafting(driver, driver.drafter, FixedPolicy(3), ngrams=True):
            assert answers(driver, beside(requests(), "drafted")) == wanted
        assert sum(lost) > 3


@pytest.mark.parametrize("variant", ["qwen3.5", "deepseek-v3"])
def test_answers_are_those_without(variant: str, drafted: Callable[[str], DraftedModel]) -> None:
    model = TinyCheckpoint(drafted(variant).path)
    with batching(model) as (_, driver):
        wanted = answers(driver, requests())
    with batching(model, shares=True, draft="mtp") as (_, driver):
        assert isinstance(driver.drafter, LayerDrafter)
        for name, policy in (
            ("4", FixedPolicy(4)),
            ("resting", Resting(3)),
            ("auto", AutoPolicy()),
        ):
            with drafting(driver, driver.drafter, policy, ngrams=name == "4"):
                assert answers(driver, beside(requests(), name)) == wanted
        num_steps = driver.drafter.engine.times.num_steps
        assert num_steps > 0
        short = [at for at, one in enumerate(requests()) if len(one.prompt_ids or ()) <= 32]
        with drafting(driver, driver.drafter, FixedPolicy(0), ngrams=False):
            found = answers(driver, beside([requests()[at] for at in short], "plain"))
        assert found == [wanted[at] for at in short]
        assert driver.drafter.engine.times.num_steps == num_steps  # nothing was computed in vain
