"""Where a GPU's own time goes while somebody measures: kernels and copies of one service."""

from __future__ import annotations

from typing import Any

from hotcold.actors.attention.cuda.device import Device


class DeviceTimes:
    """Events between the parts of requests; none are recorded unless `measures` is set."""

    def __init__(self, device: Device) -> None:
        """Measures nothing yet."""
        self._device = device
        self.measures = False
        self._marks: list[tuple[str, Any]] = []
        self._ms: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """What was put on the stream since the last mark is `part`; "" for what does not count."""
        if self.measures:
            self._marks.append((part, self._device.mark()))

    def collect(self) -> None:
        """Add up, where all that was marked has come."""
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            if part:
                ms = self._device.elapsed_ms(start, end)
                self._ms[part] = self._ms.get(part, 0.0) + ms
        self._marks.clear()

    def take(self) -> dict[str, float]:
        """Milliseconds of each part since the last call."""
        found, self._ms = self._ms, {}
        return found
