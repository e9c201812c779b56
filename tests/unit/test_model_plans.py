"""What `hotcold serve` refuses to serve together."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.running.served import model_plans
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY

DEMO = str(DEMO_DIRECTORY)
NONE = SystemOptions()


def test_each_has_its_name_and_its_need(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(DEMO_DIRECTORY)
    (alone,) = model_plans([], NONE)
    assert (alone.name, alone.model) == ("demo", DEMO)
    assert alone.need.memory_bytes > 3 * 180 << 20
    (other,) = model_plans([str(tmp_path / "linked")], SystemOptions(context_length=64))
    assert other.system.context_length == 64 and other.need.memory_bytes < alone.need.memory_bytes


@pytest.mark.parametrize(
    ("models", "options", "told"),
    [
        ([DEMO, DEMO], NONE, "two models are called 'demo'"),
        ([DEMO, "/none"], NONE, "'/none': '/none': there is no such file"),
        ([DEMO, "b"], SystemOptions(plan=Path("p")), "--plan is of one model, and these are 2"),
    ],
)
def test_what_cannot_be_served_together(
    models: list[str], options: SystemOptions, told: str
) -> None:
    with pytest.raises(UsageError) as refused:
        model_plans(models, options)
    assert told in str(refused.value)
