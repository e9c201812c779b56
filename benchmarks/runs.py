"""What the benchmarks share: running hotcold's commands, and reports with their tables."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import click

from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.numba_kernels.ir.target import has_feature
from hotcold.placement.machine.sysfs import read_cpu

Json = dict[str, Any]

_FORCED = ("avx2", "avxvnni", "avx512f", "avx512vnni", "avx512bf16")  # LLVM's names


def hotcold(*arguments: str) -> Json:
    """Run a command of hotcold with --json and return its answer.

    Errors:  ClickException with the command's own last line where it failed
    """
    command = [sys.executable, "-m", "hotcold.jobs.cli", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise click.ClickException(f"hotcold {' '.join(arguments)}: {said[-1]}")
    result: Json = json.loads(done.stdout.splitlines()[-1])
    return result


def where_and_when(model: Path, threads: int) -> Json:
    """What every report says first: machine, date, shape, batch."""
    config, cpu = read_config(model), read_cpu()
    forced = forced_target(cpu.features)
    name = f"{cpu.name} {forced}" if forced else cpu.name
    return {
        "machine": f"{name}, {threads} threads, Linux {platform.machine()}",
        "date": date.today().isoformat(),
        "shape": shape_text(config),
        "batch": 1,
    }


def forced_target(
    features: Sequence[str], is_compiled_for: Callable[[str], bool] = has_feature
) -> str:
    """ "as AVX2" and the like where kernels leave out what this CPU has; else "".

    `features` of /proc/cpuinfo; `is_compiled_for` knows LLVM's names. Such a CPU has more memory
    bandwidth, caches and ports than one without them, so its figures are not those of a real one.
    """
    own = {name.replace("_", "") for name in features}
    left_out = [name for name in _FORCED if name in own and not is_compiled_for(name)]
    if not left_out:
        return ""
    for name, spelled in (("avx512vnni", "AVX-512 VNNI"), ("avx512f", "AVX-512"),
                          ("avxvnni", "AVX-VNNI"), ("avx2", "AVX2")):  # fmt: skip
        if is_compiled_for(name):
            return f"as {spelled}"
    return "as plain vectors"


def shape_text(config: ModelConfig) -> str:
    """A model's sizes in a line."""
    return (
        f"{config.num_layers} layers of d {config.hidden_size}, {_ffn_text(config)}, "
        f"vocabulary {config.vocab_size}, {config.dtype}"
    )


def _ffn_text(config: ModelConfig) -> str:
    experts = config.experts
    if experts is None:
        return f"FFN {config.ffn_size}"
    router = experts.router
    return f"{router.num_chosen} of {router.num_experts} experts of {experts.size}"


def write_report(report: Json, table: str, out: Path | None) -> None:
    """Print the table; with `out` write OUT.json and OUT.md too."""
    click.echo(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_name(f"{out.name}.json").write_text(json.dumps(report, indent=1) + "\n")
        out.with_name(f"{out.name}.md").write_text(table)


def table_option(table: Callable[[Json], str]) -> Callable[[Any], Any]:
    """Add `--table-of REPORT.json`: print the table of a report that was written before."""

    def show(context: click.Context, _: click.Parameter, file: Path | None) -> None:
        if file is not None:
            click.echo(table(json.loads(file.read_text())), nl=False)
            context.exit()

    return click.option(
        "--table-of",
        type=click.Path(exists=True, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Measure nothing: print the table of this report, OUT.json of an earlier run.",
    )


def spread(values: list[float]) -> str:
    """The median of ratios, the least and the most."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
