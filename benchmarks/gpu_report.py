"""One JSON object of what `benchmarks/gpu_host.sh` has left in a folder.

python -m benchmarks.gpu_report FOLDER
"""

import json
import xml.etree.ElementTree as ET
from contextlib import suppress
from pathlib import Path

import click

from benchmarks.frame import Json

_STAGES = ("machine", "kernels", "hybrid", "layers", "falcon", "opt", "relu_llama", "llama",
           "speed", "qwen", "smallthinker", "systems", "sanitizer")  # fmt: skip
_LAST_LINES = 5


def stage_report(folder: Path, name: str) -> Json:
    """A stage's exit status, its tests by outcome, its figures, and its last lines if it failed."""
    status = folder / f"{name}.status"
    if not status.exists():
        return {"state": "not run"}
    code = int(status.read_text())
    found: Json = {"state": "passed" if code == 0 else f"exit status {code}"}
    if not (folder / f"{name}.done").exists():
        found["state"] = "out of time" if code in (124, 137) else "not finished"
    if (tests := folder / f"{name}.xml").exists():
        with suppress(ET.ParseError):  # cut off
            found["tests"] = _outcomes(tests)
    if (figures := folder / f"{name}.json").exists():
        with suppress(ValueError):
            found["figures"] = json.loads(figures.read_text())
    log = folder / f"{name}.log"
    if code and log.exists():
        found["said"] = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
    return found


def _outcomes(file: Path) -> Json:
    """Numbers of a test run, and the names of what failed."""
    found: Json = {"passed": 0, "skipped": 0, "failed": []}
    for case in ET.parse(file).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            found["passed" if case.find("skipped") is None else "skipped"] += 1
    return found


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Print the report of FOLDER."""
    device = folder / "device.json"
    found: Json = {"device": json.loads(device.read_text()) if device.exists() else None}
    found["stages"] = {name: stage_report(folder, name) for name in _STAGES}
    click.echo(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
