"""cluster.yaml is what Ray's cluster launcher takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import fillout_defaults, validate_config

FILE = Path(__file__).resolve().parents[2] / "cluster.yaml"


def _config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return config


def test_ray_accepts_it() -> None:
    validate_config(fillout_defaults(_config()))


def test_ray_refuses_what_it_does_not_know() -> None:
    with pytest.raises(Exception, match="unknown_key"):
        validate_config(_config() | {"unknown_key": 1})


def test_nothing_listens_beyond_the_machine() -> None:
    start = " ".join(_config()["head_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in start
    assert "RAY_AUTH_MODE=token" in start
