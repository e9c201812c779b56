"""Stop strings across token borders."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string appears; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], includes: bool = False) -> None:
        """`stops`: the text ends before the first of these that appears, or `includes` it."""
        self.text = ""  # all that was passed on
        self.found = False
        self._stops = [stop for stop in stops if stop]
        self._includes = includes
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> str:
        """Add new text; returns what can be shown now. Unless it `may_stop` there all of it can."""
        if self.found:
            return ""
        self._held += text
        if not may_stop:
            return self._pass_on(len(self._held))
        places = [(at, len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            at, size = min(places)
            return self._pass_on(at + size if self._includes else at)
        return self._pass_on(len(self._held) - self._longest_beginning())

    def flush(self) -> str:
        """Pass on what was held back: nothing more will come."""
        return "" if self.found else self._pass_on(len(self._held))

    def _longest_beginning(self) -> int:
        sizes = [
            size
            for stop in self._stops
            for size in range(1, min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:size])
        ]
        return max(sizes, default=0)

    def _pass_on(self, size: int) -> str:
        shown, self._held = self._held[:size], self._held[size:]
        self.text += shown
        return shown
