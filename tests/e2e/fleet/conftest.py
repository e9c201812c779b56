"""The Ray in which all of these tests deploy their applications, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import ray

from hotcold.actors import launch


@pytest.fixture(scope="package")
def deployed() -> Iterator[Callable[[Callable[[], Any]], str]]:
    """deployed(make): the address of the application, in place of the one before if it is another.

    On a node that has memory for one model `ON_DEMAND` and a half.
    """
    from ray import serve

    from hotcold.ui.fleet.application import NAME
    from hotcold.ui.fleet.models import fleet_models
    from tests.e2e.fleet.doors import ON_DEMAND, free_port

    memory = int(1.5 * fleet_models([], ON_DEMAND.system)[0].bundle["memory"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "init_private", partial(launch.init_private, _memory=memory))
        launch.start_local_ray(4, 200 << 20)
    assert ray.cluster_resources()["memory"] == memory
    port, running = free_port(), list[Callable[[], Any]]()

    def deploy(make: Callable[[], Any]) -> str:
        if running[-1:] != [make]:
            serve.run(make(), name=NAME)
            running.append(make)
        return f"http://127.0.0.1:{port}"

    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield deploy
    finally:
        ray.shutdown()  # at once, and Serve with it
