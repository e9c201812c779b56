"""How many kernels this process has compiled: those that it found in the cache do not count."""

from numba.core import event


class CompileCounter(event.Listener):
    """Counts what Numba compiles from now on, one function at a time."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._num_ended = 0
        event.register("numba:compile", self)

    @property
    def is_compiling(self) -> bool:
        """Whether a function is being compiled now."""
        return self.num_begun > self._num_ended

    def on_start(self, _: event.Event) -> None:
        """A function is not in the cache."""
        self.num_begun += 1

    def on_end(self, _: event.Event) -> None:
        """It is compiled, or has failed."""
        self._num_ended += 1
