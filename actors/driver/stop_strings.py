"""Stop strings: an answer's text is shown up to the first of them."""

from array import array
from collections.abc import Sequence


class _StopString:
    """How much of one stop string the text ends with, by Knuth, Morris and Pratt.

    Each character takes a few steps, however long the stop string is.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_held = 0  # characters
        self._shorter = array("I", [0])  # by length: of beginnings that end so, the next shorter
        for character in stop[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def push(self, text: str) -> None:
        """Add text, which does not complete the stop string."""
        if self.num_held or self.stop[0] in text:
            for character in text:
                self.num_held = self._longer(self.num_held, character)

    def _longer(self, size: int, character: str) -> int:
        while size and self.stop[size] != character:
            size = self._shorter[size - 1]
        return size + (self.stop[size] == character)


class StopStrings:
    """Shows text until a stop string appears; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], includes: bool = False) -> None:
        """The text ends before the first of `stops` that appears, or `includes` it."""
        self.num_shown = 0  # characters
        self.found = False
        self._shown: list[str] = []
        self._stops = [_StopString(stop) for stop in dict.fromkeys(stops) if stop]
        self._includes = includes
        self._held = ""

    @property
    def text(self) -> str:
        """All that was shown."""
        return "".join(self._shown)

    def push(self, text: str, may_stop: bool = True) -> str:
        """Add new text; returns what can be shown now: all of it unless it `may_stop` there."""
        if self.found:
            return ""
        self._held += text
        if not may_stop:
            for one in self._stops:
                one.num_held = 0
            return self._show(len(self._held))
        stops = [one.stop for one in self._stops]
        places = [(at, len(stop)) for stop in stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            at, size = min(places)
            return self._show(at + size if self._includes else at)
        for one in self._stops:
            one.push(text)
        return self._show(len(self._held) - max((one.num_held for one in self._stops), default=0))

    def flush(self) -> str:
        """The text held back, once no more comes."""
        return "" if self.found else self._show(len(self._held))

    def _show(self, size: int) -> str:
        shown, self._held = self._held[:size], self._held[size:]
        self.num_shown += len(shown)
        self._shown.append(shown)
        return shown
