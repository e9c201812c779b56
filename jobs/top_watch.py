"""The picture of a system on the whole screen, until somebody presses q."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from prompt_toolkit.application import Application
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Layout, Window
from prompt_toolkit.layout.controls import FormattedTextControl
from prompt_toolkit.output import Output
from rich.text import Text

from hotcold.jobs.running.client import Client, LoadingError
from hotcold.jobs.top_picture import drawn, picture
from hotcold.model.errors import HotcoldError

_FOOT = "q ends"


def watch(
    system: Client,
    keys_from: Input | None = None,
    shown_on: Output | None = None,
    each_s: float = 1.0,
) -> None:
    """Update the picture every `each_s` seconds. Errors: HotcoldError where the system ends."""
    view = _View(system.record.name)
    app: Application[None] = Application(
        Layout(Window(FormattedTextControl(lambda: ANSI(view.text(app.output))))),
        key_bindings=_keys(),
        full_screen=True,
        input=keys_from,
        output=shown_on,
    )
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            try:
                view.take(system.telemetry())
            except LoadingError as error:
                view.remark = str(error)
            except HotcoldError as error:
                if app.loop is not None:
                    app.loop.call_soon_threadsafe(partial(app.exit, exception=error))
                return
            app.invalidate()
            is_over.wait(each_s)

    poller = threading.Thread(target=poll, name="top", daemon=True)
    try:
        app.run(pre_run=poller.start)
    finally:
        is_over.set()


class _View:
    """The last telemetry of a system, as the screen shows it."""

    def __init__(self, name: str) -> None:
        self.remark = "asking"
        self._name = name
        self._found: dict[str, Any] | None = None

    def take(self, found: dict[str, Any]) -> None:
        """Take new telemetry; the figures of the last request stay."""
        if self._found is not None and not found["running"]:
            if not found["map"]["steps"]:
                found["map"] = self._found["map"]
            if not found["per_step_ms"]:
                found["per_step_ms"] = self._found["per_step_ms"]
        self._found = found

    def text(self, output: Output) -> str:
        """The screen's text, with a terminal's codes."""
        size = output.get_size()
        if self._found is None:
            return f"{self._name}: {self.remark}\n\n{_FOOT}"
        shown = picture(self._name, self._found, size.columns, size.rows)
        foot = drawn(Text(_FOOT, style="dim"), size.columns, True)
        return f"{drawn(shown, size.columns, True)}\n\n{foot}"


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("q")
    def end(event: KeyPressEvent) -> None:
        event.app.exit()

    @keys.add("c-c")
    @keys.add("<sigint>")
    def interrupt(event: KeyPressEvent) -> None:
        event.app.exit(exception=KeyboardInterrupt)

    return keys
