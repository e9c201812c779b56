"""The files that `hotcold profile` writes, checked before hours of work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hotcold.jobs.support.extras import require_extra
from hotcold.model.errors import UsageError
from hotcold.model.files.artifact_places import ARTIFACTS, artifact_folders
from hotcold.placement.profile import PROFILE_FILE
from hotcold.predictors.fitting.inputs import INPUTS_FILE

_PLOT_SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class ProfileFiles:
    """The profile, and where asked for the recorded inputs, the figure and the thresholds."""

    profile: Path
    inputs: Path | None
    plot: Path | None
    thresholds: Path | None = None

    @classmethod
    def choose(
        cls,
        model_path: Path,
        out: Path | None,
        inputs_out: Path | None,
        plot: Path | None,
        *,
        with_inputs: bool,
        thresholds: Path | None = None,
    ) -> ProfileFiles:
        """The files that were named, else those in the model's folder of artifacts.

        Errors:  UsageError where one cannot be written, or two are the same
        """
        if inputs_out is not None and not with_inputs:
            raise UsageError("--inputs-out was given, but --inputs 0 records none; leave one out")
        if plot is not None:
            require_plot(plot)
        written = artifact_folders(model_path)[0]
        inputs = (inputs_out or written / INPUTS_FILE) if with_inputs else None
        files = cls(out or written / PROFILE_FILE, inputs, plot, thresholds)
        options = {"--out": files.profile, "--inputs-out": inputs, "--plot": plot,
                   "--thresholds-out": thresholds}  # fmt: skip
        for option, path in options.items():
            if path is not None:
                require_writable(option, path)
        if len({path.resolve() for path in files.all}) < len(files.all):
            raise UsageError(
                "--out, --inputs-out, --plot and --thresholds-out name the same file; give others"
            )
        return files

    @property
    def all(self) -> list[Path]:
        """Those that are written."""
        files = self.profile, self.inputs, self.plot, self.thresholds
        return [path for path in files if path is not None]


def require_plot(path: Path) -> None:
    """Raise UsageError where no figure can be drawn into a file of this name."""
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise UsageError(f"--plot {path}: give a name that ends in {', '.join(_PLOT_SUFFIXES)}")
    require_extra("plot", "--plot")


def require_writable(option: str, path: Path) -> None:
    """Make the folder of `path`, which `option` names. Errors: UsageError where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        reason = "is a directory" if path.is_dir() else ""
    except OSError as problem:
        reason = f"cannot be written: {problem.strerror}"
    if not reason and not os.access(path.parent, os.W_OK):
        reason = f"cannot be written: no permission in {path.parent}"
    if reason:
        raise UsageError(
            f"{path}: {reason}; give another place with {option}, or for all of a model's files in "
            f"{ARTIFACTS}"
        )
