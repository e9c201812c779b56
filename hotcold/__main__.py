"""`python -m hotcold`, and the command `hotcold`."""

# Not `signal`: until the command is imported, modules of the current folder are found.
import _signal  # type: ignore[import-not-found]
import os
import sys


def run() -> None:
    """Run the command; Ctrl-C while it is imported ends the process at once, without a traceback.

    A process that ignores Ctrl-C goes on to.
    """
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _end)
    _be_the_package()
    if sys.platform != "linux" and "--version" not in sys.argv:
        import hotcold

        sys.exit(f"hotcold: error: {hotcold._LINUX_ONLY}")
    from hotcold.jobs import cli

    cli.run()


def _be_the_package() -> None:
    """Where Python took a folder `hotcold` for it, as the one around a checkout, find it anew."""
    if getattr(sys.modules.get("hotcold"), "__file__", None) is None:
        sys.modules.pop("hotcold", None)
        sys.path.append(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def _end(number: int, frame: object) -> None:
    os.write(2, b"\n")
    os._exit(130)


if __name__ == "__main__":
    run()
