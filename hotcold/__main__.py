"""`python -m hotcold`, and the command `hotcold`."""

# Not `signal`: until the command is imported, modules of the current folder are found.
import _signal  # type: ignore[import-not-found]
import os


def run() -> None:
    """Run the command; Ctrl-C while it is imported ends the process at once, without a traceback.

    A process that ignores Ctrl-C goes on to.
    """
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _end)
    from hotcold.jobs import cli

    cli.run()


def _end(number: int, frame: object) -> None:
    os.write(2, b"\n")
    os._exit(130)


if __name__ == "__main__":
    run()
