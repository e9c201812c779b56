"""Who fires on a text: counted by the services, asked of all of them, lost with any of them."""

from __future__ import annotations

import numpy as np

from hotcold.actors.processes.system_services import SystemServices
from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.setup.connection import Connection


class NeuronCounts:
    """Windows that are counted, and whether all that counted them are there still."""

    def __init__(self, services: SystemServices) -> None:
        """`services` may still be loading."""
        self._services = services
        # Who has counted since the first window, and how many were replaced before it.
        self._counting: tuple[Connection, int] | None = None

    def profile_window(self, ids: list[int], recorded: list[int]) -> np.ndarray:
        """Count who fires in a window; see `Driver.profile_window`."""
        if self._counting is None:
            self._counting = self._who_serves()
        inputs = self._services.driver.profile_window(ids, recorded)
        self._require_whole()
        return inputs

    def gather(self) -> np.ndarray:
        """For how many profiled tokens each neuron has fired since the start: (L, N) int64.

        Errors:  RequestError where some are lost
        """
        from hotcold.actors.driver.profiling import counts_by_neuron

        def gather() -> np.ndarray:
            self._require_whole()
            connection = self._services.connection
            specs = [spec for spec in connection.specs if spec.neuron_ids is not None]
            asked = [spec.index for spec in specs]
            counts = connection.call_each("fired_counts", services=asked)
            return counts_by_neuron(self._services.config, specs, counts)

        return self._services.driver.between_requests(gather)

    def _who_serves(self) -> tuple[Connection, int]:
        connection = self._services.connection
        return connection, connection.replacer.num_replaced

    def _require_whole(self) -> None:
        """A service that was replaced has forgotten who fired. Errors: RequestError."""
        if self._counting not in (None, self._who_serves()):
            raise RequestError(
                "a service was restarted while neurons were counted, and its counts are lost; "
                "profile again"
            )
