"""Tokens a second with drafts and without, in turn, by kinds of prompts; what is accepted, where.

    python -m benchmarks.speculation MODEL [--draft q4] [--counts 2,4,8] [--rounds 3] [--json OUT]
    python -m benchmarks.speculation MODEL --kinds ids --imposed 0.5,0.7,0.9
    python -m benchmarks.speculation MODEL.gguf --llama-server PATH

Driver and services are threads of this process, on the same loaded weights for all variants: `off`,
`auto`, and numbers of tokens. A round runs them one right after the other; their order is turned
each round, rates are medians. Every variant's tokens are compared with those of `off`.

`--imposed P`: a draft's tokens are replaced by those that follow, each with probability P, and else
by wrong ones, while what the model's own draft costs is paid; so models with random weights show
what acceptance is worth. `--batch N`: N requests at once.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.drafts import Drafter
from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.speculation import Speculation, draft_policy
from hotcold.actors.protocol.messages import DraftCounts, GenerateRequest, Generation
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.jobs.support.options import system_option
from hotcold.model.errors import PromptError
from hotcold.model.files.locate import locate_model
from hotcold.model.sampling import SamplingParams
from tests.actors.in_process import InProcessSystem

_CODE = '''def area(shape):
    """Return the area of a shape, which is a dict with the key "kind"."""
    if shape["kind"] == "square":
        return shape["side"] ** 2
    if shape["kind"] == "circle":
        return 3.14159 * shape["radius"] ** 2
    raise ValueError(shape["kind"])
'''
_TEXT = (
    "The river rises in the hills behind the village and runs past the mill, where it turns an old "
    "wheel. In spring it floods the lower meadows; in summer children build dams of stones in it. "
    "Below the bridge it joins a larger stream, and both go on to the sea."
)
KINDS = {
    "chat": ["Why is the sky blue?", "Give me three tips for a good night's sleep."],
    "code": [f"Add the kind rectangle to this function, and show all of it:\n\n{_CODE}"],
    "repeat": [f"Repeat this text word for word:\n\n{_TEXT}"],
    "ids": [],  # random ones: for models without a tokenizer
}
_LLAMA_SPEC = ("none", "ngram-simple", "ngram-mod")


class Imposed:
    """A drafter whose tokens are right with a given probability, at the cost of another one."""

    def __init__(self, inner: Drafter | None, chance: float, vocab_size: int) -> None:
        """`inner` is paid and not heard; None: drafts cost nothing."""
        self.answers: dict[tuple[int, ...], list[int]] = {}  # by prompts
        self._inner, self._chance, self._vocab_size = inner, chance, vocab_size
        self._random = np.random.default_rng(0)

    def propose(self, requests: Sequence[ActiveRequest], counts: Sequence[int]) -> list[list[int]]:
        """As `Drafter.propose`."""
        if self._inner is not None:
            self._inner.propose(requests, counts)
        return [self._draft(one, count) for one, count in zip(requests, counts, strict=True)]

    def _draft(self, request: ActiveRequest, count: int) -> list[int]:
        tokens = request.tokens
        for prompt, answer in self.answers.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                num_new = len(tokens) - len(prompt)
                right = np.array(answer[num_new : num_new + count], np.int64)
                is_wrong = self._random.random(right.size) >= self._chance
                found: list[int] = ((right + is_wrong) % self._vocab_size).tolist()
                return found
        return []


@dataclass
class Measured:
    """One variant's runs of one kind of prompts."""

    rates: list[float] = field(default_factory=list)  # tokens a second of all requests
    drafts: DraftCounts = field(default_factory=DraftCounts)
    num_tokens: int = 0
    is_same: bool = True  # its tokens are those of `off`

    def add(self, results: Sequence[Generation], rate: float) -> None:
        """Count a run."""
        self.rates.append(rate)
        for result in results:
            self.num_tokens += len(result.ids)
            self.drafts.num_drafts += result.drafts.num_drafts
            self.drafts.num_drafted += result.drafts.num_drafted
            for place, count in enumerate(result.drafts.accepted_at):
                for _ in range(count):
                    self.drafts.accept(place)

    def report(self, off: float) -> dict[str, Any]:
        """Its figures; `off` is the rate without drafts."""
        rate, num_drafts = median(self.rates), max(self.drafts.num_drafts, 1)
        return {
            "tokens_per_s": rate,
            "ratio": rate / off,
            "same_tokens": self.is_same,
            "acceptance": self.drafts.num_accepted / max(self.drafts.num_drafted, 1),
            "share_accepted_by_position": [count / num_drafts for count in self.drafts.accepted_at],
            "drafts_per_token": self.drafts.num_drafts / max(self.num_tokens, 1),
            **self.drafts.as_json(),
        }


@contextmanager
def running(path: Path, options: SystemOptions) -> Iterator[Driver]:
    """A driver with its services in this process."""
    system, config = prepare_system(path, options)
    in_process = InProcessSystem(
        path,
        num_threads=system.num_threads,
        num_slots=system.max_batch,
        num_positions=system.context_length,
        kv_positions=system.kv_positions,
        max_tokens=min(system.prefill_chunk, system.context_length),
        specs=service_specs(system, config),
    )
    with in_process as services:
        driver = Driver(system, services.exchange, services.topology)
        try:
            yield driver
        finally:
            driver.close()


def requests_of(
    driver: Driver, kind: str, tokens: int, batch: int, temperature: float
) -> list[GenerateRequest]:
    """`batch` requests of a kind. Errors: PromptError."""
    sampling = SamplingParams(
        max_tokens=tokens, temperature=temperature, ignore_eos=kind == "ids", seed=1
    )
    if kind == "ids":
        random, size = np.random.default_rng(0), driver.generator.config.vocab_size
        prompts = [random.integers(0, size, 32).tolist() for _ in range(batch)]
        return [GenerateRequest(sampling, prompt_ids=ids) for ids in prompts]
    texts = [KINDS[kind][number % len(KINDS[kind])] for number in range(batch)]
    asked = [[{"role": "user", "content": text}] for text in texts]
    requests = [GenerateRequest(sampling, messages=messages) for messages in asked]
    try:
        checked = [driver.generator.prompts.checked(request) for request in requests]
    except PromptError:  # a model without a chat template continues the text
        plain = [replace(one, messages=None, prompt=text) for one, text in zip(
            requests, texts, strict=True)]  # fmt: skip
        checked = [driver.generator.prompts.checked(request) for request in plain]
    return [replace(one, messages=None, prompt=None) for one in checked]


def run(driver: Driver, requests: Sequence[GenerateRequest]) -> tuple[list[Generation], float]:
    """The results of these requests at once, and tokens a second after the first ones."""

    def complete(request: GenerateRequest) -> Generation:
        *_, last = driver.generate(request)
        assert last.result is not None
        return last.result

    with ThreadPoolExecutor(len(requests)) as pool:
        results = list(pool.map(complete, requests))
    decode_s = max(result.decode_s for result in results)
    return results, sum(len(result.ids) - 1 for result in results) / max(decode_s, 1e-9)


def measure(
    driver: Driver,
    requests: Sequence[GenerateRequest],
    variants: dict[str, Speculation | None],
    imposed: Sequence[Imposed],
    rounds: int,
) -> dict[str, Any]:
    """Run all variants in turn; the first one is without drafts."""
    scheduler = driver._scheduler
    scheduler.speculation = None
    alone, _ = run(driver, requests)
    truth = [result.ids for result in alone]
    for drafter in imposed:
        drafter.answers = {
            tuple(request.prompt_ids or ()): ids
            for request, ids in zip(requests, truth, strict=True)
        }
    measured = {name: Measured() for name in variants}
    names = list(variants)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            scheduler.speculation = variants[name]
            results, rate = run(driver, requests)
            measured[name].add(results, rate)
            measured[name].is_same &= [result.ids for result in results] == truth
    scheduler.speculation = None
    off = median(measured[names[0]].rates)
    return {name: one.report(off) for name, one in measured.items()}


def llama_server_rates(
    program: Path, model: Path, prompts: Sequence[str], tokens: int, threads: int, rounds: int
) -> dict[str, float]:
    """Tokens a second of llama.cpp's server by `--spec-type`, the median of all prompts' runs."""
    rates = {}
    for spec in _LLAMA_SPEC:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            str(program), "-m", str(model), "-t", str(threads), "--port", str(port),
            "--host", "127.0.0.1", "-c", "4096", "-np", "1", "--spec-type", spec,
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _await_server(server, port)
            found = []
            for _ in range(rounds):
                for prompt in prompts:
                    body = {
                        "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens,
                        "temperature": 0, "cache_prompt": False,
                    }  # fmt: skip
                    answer = _posted(f"http://127.0.0.1:{port}/v1/chat/completions", body)
                    found.append(answer["timings"]["predicted_per_second"])
            rates[spec] = median(found)
        finally:
            server.terminate()
            server.wait()
    return rates


def _await_server(server: subprocess.Popen[bytes], port: int) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise click.ClickException(f"llama-server ended with status {server.returncode}")


def _posted(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def _variants(
    drafter: Drafter | None, counts: Sequence[int], imposed: Sequence[Imposed], chances: list[str]
) -> dict[str, Speculation | None]:
    """off first; then `auto` and numbers, of the system's own drafts or of imposed ones."""
    wanted = ["auto", *map(str, counts)]
    found: dict[str, Speculation | None] = {"off": None}
    if not imposed:
        return found | {one: Speculation(draft_policy(one), drafter) for one in wanted}
    for one, chance in zip(imposed, chances, strict=True):
        for name in wanted:
            made = Speculation(draft_policy(name), one, has_ngrams=False)
            found[f"{name}, {chance} right"] = made
    return found


def _table(found: dict[str, Any]) -> str:
    lines = [
        "| drafts | tokens/s | ratio | accepted | by place | same tokens |",
        "| --- " * 6 + "|",
    ]
    for name, one in found.items():
        places = " ".join(f"{share:.2f}" for share in one["share_accepted_by_position"][:8])
        lines.append(
            f"| {name} | {one['tokens_per_s']:.2f} | {one['ratio']:.3f} | "
            f"{one['acceptance']:.1%} | {places} | {'yes' if one['same_tokens'] else 'NO'} |"
        )
    return "\n".join(lines)


@click.command()
@click.argument("model", required=False)
@click.option("--kinds", default="chat,code,repeat", help="Of " + ", ".join(KINDS) + ".")
@click.option("--counts", default="2,4,8", help="Fixed numbers of tokens, beside auto.")
@click.option("--imposed", default="", help="Chances of a draft's token to be right.")
@click.option("--tokens", default=128, show_default=True)
@click.option("--batch", default=1, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--llama-server", type=click.Path(path_type=Path, exists=True))
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write all figures here.")
@system_option("mode")
@system_option("weight_dtype")
@system_option("num_threads")
@system_option("draft")
def main(
    model: str | None,
    kinds: str,
    counts: str,
    imposed: str,
    tokens: int,
    batch: int,
    rounds: int,
    temperature: float,
    llama_server: Path | None,
    out: Path | None,
    **values: Any,
) -> None:
    """Measure MODEL."""
    path = locate_model(model)
    options = SystemOptions(max_batch=max(batch, 1), speculate="auto", **values)
    numbers = [int(count) for count in counts.split(",") if count]
    chances = [chance for chance in imposed.split(",") if chance]
    report: dict[str, Any] = {"model": path.name, "batch": batch, "tokens": tokens, "kinds": {}}
    with running(path, options) as driver:
        drafter = driver.drafter
        vocab_size = driver.generator.config.vocab_size
        drafters = [Imposed(drafter, float(chance), vocab_size) for chance in chances]
        variants = _variants(drafter, numbers, drafters, chances)
        for kind in kinds.split(","):
            requests = requests_of(driver, kind, tokens, batch, temperature)
            found = measure(driver, requests, variants, drafters, rounds)
            report["kinds"][kind] = found
            print(f"\n{path.name}, {kind}, {batch} at once\n\n{_table(found)}", flush=True)
    if llama_server is not None:
        threads = options.num_threads or 2
        for kind in kinds.split(","):
            rates = llama_server_rates(llama_server, path, KINDS[kind], tokens, threads, rounds)
            report["kinds"][kind]["llama.cpp"] = rates
            told = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
            print(f"llama.cpp, {kind}, tokens/s: {told}", flush=True)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
