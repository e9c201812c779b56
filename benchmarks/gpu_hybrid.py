"""Tokens a second of one shape with parts of it on a GPU, under several budgets, and without one.

    python -m benchmarks.gpu_hybrid --shape falcon-40b-like --layers 20 --density 0.05 --mode exact
        --mode sign --budget 6GiB --budget 12GiB --folder /dev/shm/hotcold --out falcon.json
    python -m benchmarks.gpu_hybrid --shape qwen3-30b-a3b --layers 12 --format q4_0 --mode dense
        --budget 2GiB --budget 8GiB --folder /dev/shm/hotcold --out qwen.json

The model is made in FOLDER, best in memory, of random weights whose neurons fire at rates that
follow a power law: a checkpoint in float16, or a GGUF file with --format. `hotcold profile` counts
random tokens, and with a mode that predicts `hotcold train-predictors` follows. Batch 1; the median
of runs.

What a run has measured stays in OUT: the same command again does what is left; --minutes says when
to stop, and --run-minutes what is given up. With --llama-bench, a build with CUDA, the same file,
or a Llama of as many bytes, runs first within the same budgets: as many whole layers on the GPU as
fit, and attention of all layers with as many FFNs, each with all threads, all but two, and half.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import click
import numpy as np

from benchmarks.frame import Json, head, hotcold, objects, run
from benchmarks.random_gguf import SHAPES, write, write_like
from hotcold.actors.protocol.messages import MODES, SystemConfig
from hotcold.actors.setup.assignment import hot_neurons, system_plan
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.system import System
from hotcold.cuda_kernels.device import first_gpu
from hotcold.jobs.bench.decode import decode_request
from hotcold.jobs.support.options import BYTES
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.model.files.atomic_write import write_atomic
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.check import stored_config
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes
from hotcold.placement.profile import PROFILE_FILE, read_profile
from hotcold.predictors.predictor_file import KINDS

_CONTEXT = 256
_PROFILED_TOKENS = 1024
_SEED = 0
_LLAMA_RESERVE_BYTES = 384 << 20  # of a budget: context, buffers, KV cache
_PARTS = ("attention", "head", "hot neurons", "layers")
_TOLD = ("device", "num_hot_neurons", "num_host_layers", "head_on_host", "gpu_predicts",
         "num_threads", "num_cpu_actors", "neuron_upload_tokens")  # fmt: skip


class Report:
    """A JSON file that grows; what is in it is not measured again."""

    def __init__(self, file: Path, head: Json, minutes: float, run_minutes: float) -> None:
        """Begin it with `head`, or go on with one of the same shape. Errors: ClickException."""
        self._file, self._run_s = file, 60 * run_minutes
        self._ends_s = time.monotonic() + 60 * minutes
        self.content: Json = head | {"runs": {}, "left": []}
        if file.exists():
            found = json.loads(file.read_text())
            if (found["shape"], found["device"]) != (head["shape"], head["device"]):
                raise click.ClickException(f"{file} is of another shape or device; name another")
            self.content = found | {"left": []}

    def measure(self, name: str, run: Callable[[], Json]) -> None:
        """Add what `run` returns, or in one line why it failed; nothing after the time limit."""
        if name in self.content["runs"]:
            return
        if time.monotonic() > self._ends_s:
            self.content["left"].append(name)
        else:
            started = time.monotonic()
            is_timed = name.startswith(("llama.cpp", "hotcold"))
            if is_timed:  # what hangs is not begun again
                self.content["runs"][name] = {"failed": "it did not end"}
                self._write()
            try:
                with _at_most(self._run_s if is_timed else 0):
                    found = run()
            except Exception as problem:  # the others are still worth having
                found = {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0]}
            self.content["runs"][name] = found | {"took_s": time.monotonic() - started}
            click.echo(f"{name}: {json.dumps(found)}", err=True)
        self._write()

    def _write(self) -> None:
        write_atomic(self._file, f"{json.dumps(self.content, indent=1)}\n".encode())


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Errors: TimeoutError within what takes longer, in the main thread; 0: no limit."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _running(path: Path, options: SystemOptions) -> Iterator[tuple[System, SystemConfig]]:
    """A system, and what it has become."""
    system, _ = prepare_system(path, options)
    with System.start(system) as running:
        found: SystemConfig = running.call("describe")
        yield running, found


def _options(mode: str, budget: int) -> SystemOptions:
    """0: the CPU alone."""
    return SystemOptions(
        mode=mode, context_length=_CONTEXT, max_batch=1, gpu_memory_bytes=budget,
        device="cuda" if budget else "cpu", speculate="off",
    )  # fmt: skip


def _decode(path: Path, mode: str, budget: int, prompt: int, tokens: int, repeat: int) -> Json:
    config = read_config(path)
    request = decode_request(config, prompt, tokens)
    started = time.monotonic()
    with _running(path, _options(mode, budget)) as (running, system):
        load_s = time.monotonic() - started
        for _ in range(2):  # graphs are made the second time
            running.complete(decode_request(config, prompt, 16))
        results = [running.complete(request) for _ in range(repeat)]
        rates = [result.decode_tokens_per_s for result in results]
        middle = min(results, key=lambda each: abs(each.decode_tokens_per_s - median(rates)))
        found: Json = {
            "tokens_per_s": median(rates), "runs": rates,
            "prefill_tokens_per_s": median(each.prefill_tokens_per_s for each in results),
            "load_s": load_s, "per_token_ms": middle.per_token_ms,
            "neurons_computed": middle.neurons_computed, "ids": middle.ids,
            "system": {name: getattr(system, name) for name in _TOLD},
        }  # fmt: skip
        if system.device == "cuda":
            running.call("device_report", True)
            result = running.complete(request)
            report = running.call("device_report", False)
            found |= _gpu_share(path, config, system, report, budget)
            found["token_ms"] = _split(report, result.per_token_ms, tokens)
    return found


def _gpu_share(
    path: Path, config: ModelConfig, system: SystemConfig, report: Json, budget: int
) -> Json:
    """What the GPU holds: bytes of its memory, and of all activations its neurons' share."""
    hot = hot_neurons(system, config, system_plan(system, config)) or []
    file = artifact_path(path, PROFILE_FILE)
    counts = read_profile(file, ModelIdentity.of(path), config).counts
    active = sum(int(counts[layer][ids].sum()) for layer, ids in enumerate(hot))
    return {
        "gpu_used_bytes": int(report["used_bytes"]),
        "within_budget": report["used_bytes"] <= budget,
        "hot_share_of_active": active / max(1, int(counts.sum())),
    }


def _split(device_ms: Json, per_token_ms: Json, tokens: int) -> Json:
    """A token's time while it was measured, which costs a little: the parts of the GPU by itself,
    and of the driver's steps what they wait for.
    """
    each = {part: device_ms.get(part, 0.0) / tokens for part in (*_PARTS, "copies")}
    kernels = each["attention"] + each["head"] + each["layers"]
    services = per_token_ms["attention"] + per_token_ms["head"] + per_token_ms["layers"]
    return {
        **{f"gpu {part}": ms for part, ms in each.items()},
        "gpu service beside its kernels": services - kernels,
        "cpu services or hot neurons, the slower": per_token_ms["ffn"],
        "exchange": per_token_ms["exchange"],
        "python": per_token_ms["python"],
        "total": per_token_ms["total"],
    }


def _profile(path: Path, keeps_inputs: bool) -> Json:
    """Count who fires over random tokens; `keeps_inputs`: for predictors to be fitted to."""
    ids = np.random.default_rng(_SEED).integers(0, read_config(path).vocab_size, _PROFILED_TOKENS)
    text = path.with_suffix(".jsonl")
    text.write_text(json.dumps({"ids": ids.tolist()}) + "\n")
    inputs = str(ids.size) if keeps_inputs else "0"
    return hotcold("profile", str(path), "--text", str(text), "--inputs", inputs)


def _make(
    path: Path, shape: str, layers: int | None, density: float, vocab: int | None, file_format: str
) -> None:
    if file_format != "f16":
        known = SHAPES[shape]
        write(path, replace(known, layers=layers or known.layers), file_format)
        return
    sizes = [] if layers is None else ["--layers", str(layers)]
    sizes += [] if vocab is None else ["--vocab", str(vocab)]
    hotcold("make-model", str(path), "--shape", shape, "--density", str(density), *sizes)


def _ways_of_llama_cpp(path: Path, budget: int) -> dict[str, list[str]]:
    """Options for as many layers on the GPU as fit, and for attention of all with as many FFNs."""
    config = read_config(path)
    num_layers, room = config.num_layers, budget - _LLAMA_RESERVE_BYTES
    stored = stored_config(Checkpoint(path), config, "", by_layer=False)
    attention, head = attention_bytes(stored), head_bytes(stored)
    ffn = ffn_bytes(stored, config.num_neurons) / num_layers
    on_gpu = _clipped(room / (ffn + attention / num_layers), num_layers)
    on_cpu = num_layers - _clipped((room - attention - head) / ffn, num_layers)
    ways = {"layers": ["-ngl", str(99 if on_gpu == num_layers else on_gpu)]}
    if on_cpu:
        layers = "|".join(map(str, range(on_cpu)))
        cold = rf"blk\.({layers})\.ffn_(up|gate|down).*=CPU"
        ways["attention and FFNs"] = ["-ngl", "99", "-ot", cold]
    return ways


def _llama_cpp(bench: str, gguf: Path, options: list[str], threads: int, n: int) -> Json:
    """The best of all threads, all but two, and half."""
    counts = ",".join(map(str, sorted({threads, max(1, threads - 2), max(1, threads // 2)})))
    command = [bench, "-m", str(gguf), "-t", counts, "-lm", "none"]
    command += ["-fa", "1", "-p", "0", "-n", str(n), "-r", "3", "-o", "jsonl"]
    said, _ = run([*command, *options])
    rates = [median(row["samples_ts"]) for row in objects(said)]
    return {"options": options, "tokens_per_s": max(rates), "by_threads": rates}


def _clipped(count: float, most: int) -> int:
    return int(max(0, min(most, count)))


@click.command(context_settings={"show_default": True})
@click.option("--shape", default="falcon-40b-like", help="As of make-model.")
@click.option("--layers", type=int, help="Of the shape; all of them without it.")
@click.option("--vocab", type=int, help="Tokens of a float16 model; the shape's without it.")
@click.option("--density", type=float, default=0.05, help="Of such a model.")
@click.option("--format", "file_format", default="f16", help="Of a GGUF file.")
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=("exact",))
@click.option("--budget", "budgets", type=BYTES, multiple=True, help="VRAM; several times.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("/dev/shm/hotcold"))
@click.option("--prompt-tokens", default=64)
@click.option("--tokens", default=128)
@click.option("--repeat", default=3)
@click.option("--minutes", default=9.0, help="Begin nothing after so many.")
@click.option("--run-minutes", default=2.5, help="Give up a run that takes longer.")
@click.option("--llama-bench", help="A llama.cpp build with CUDA.")
@click.option("--cpu/--no-cpu", default=True, help="Without a GPU, too.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON, which grows.")
def main(
    shape: str, layers: int | None, vocab: int | None, density: float, file_format: str,
    modes: tuple[str, ...], budgets: tuple[int, ...], folder: Path, prompt_tokens: int,
    tokens: int, repeat: int, minutes: float, run_minutes: float, llama_bench: str | None,
    cpu: bool, out: Path,
) -> None:  # fmt: skip
    """Measure one shape; the report goes to OUT."""
    started, gguf = time.monotonic(), file_format != "f16"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{shape}-{layers or 'all'}-{vocab or 'all'}-{density:g}-{file_format}"
    path = path.with_name(path.name + ".gguf") if gguf else path
    if not (path if gguf else path / "config.json").exists():
        _make(path, shape, layers, density, vocab, file_format)
    gpu = first_gpu()
    system, _ = prepare_system(path, _options(modes[0] if modes[0] not in KINDS else "exact", 0))
    about = head(path, system.num_threads) | {
        "device": gpu if isinstance(gpu, str) else gpu[0], "format": file_format,
        "density": density, "prompt_tokens": prompt_tokens, "tokens": tokens,
        "llama.cpp reads": "the same file" if gguf else "a Llama of as many bytes",
    }  # fmt: skip
    report = Report(out, about, minutes - (time.monotonic() - started) / 60, run_minutes)
    sizes = prompt_tokens, tokens, repeat
    file = path if gguf else path.with_name(path.name + ".gguf")
    if llama_bench and not file.exists():  # a Llama of as many bytes
        write_like(file, read_config(path), "f16")
    for budget in budgets if llama_bench else ():
        for way, options in _ways_of_llama_cpp(path, budget).items():
            arguments = (str(llama_bench), file, options, system.num_threads, tokens)
            name = f"llama.cpp {_place(budget)}, {way}"
            report.measure(name, partial(_llama_cpp, *arguments))
    kinds = [mode for mode in modes if mode in KINDS]
    report.measure("profile", lambda: _profile(path, bool(kinds)))
    for kind in kinds:
        fit = partial(hotcold, "train-predictors", str(path), "--kind", kind)
        report.measure(f"predictors {kind}", fit)
    for mode, budget in product(modes, (*budgets, *([0] if cpu else []))):
        run = partial(_decode, path, mode, budget, *sizes)
        report.measure(f"hotcold {mode} {_place(budget)}", run)
    click.echo(json.dumps(report.content))


def _place(budget: int) -> str:
    return f"{budget / (1 << 30):g} GiB" if budget else "cpu"


if __name__ == "__main__":
    main()
