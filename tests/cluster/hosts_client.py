"""A process inside a cluster that runs systems and requests as lines of JSON on its input tell.

    {"nodes": 2}                                waits until the cluster has so many nodes
    {"system": {...}, "name": "x"}              stops the running system, starts one of SystemConfig
    {"prompt_ids": [...], "num_tokens": 64}     completes it greedily
    {..., "signals": {"PID": 9}}                the same; sends signals once tokens have come
    {..., "num_logprobs": 0}                    the same; tells how likely each token was found
    {"processes": true}                         tells the process id of each service

Each line is answered by one of JSON on the output, by {"error": ...} if it fails.
"""

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import ray

from hotcold.actors.processes.cluster import connect
from hotcold.actors.protocol.messages import GenerateRequest, LoadProgress, SystemConfig
from hotcold.actors.system import System
from hotcold.model.errors import HotcoldError
from hotcold.model.sampling import SamplingParams

_NODES_S = 600.0


class Client:
    """A `hosts_client` that another process started, seen from there."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """`process` has pipes for its input and output."""
        self._process = process

    def tell(self, **command: Any) -> dict[str, Any]:
        """One command's answer. Errors: RuntimeError with the error that it answered"""
        input_, output = self._process.stdin, self._process.stdout
        if input_ is None or output is None:
            raise ValueError("the client's process has no pipes")
        input_.write(json.dumps(command) + "\n")
        input_.flush()
        line = output.readline()
        if not line:
            raise RuntimeError(f"the client ended with status {self._process.wait(30)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def start(self, system: SystemConfig, name: str) -> dict[str, Any]:
        """Start a system, in the place of the last: its processes, stages and notes."""
        return self.tell(system=json.loads(system.as_json()), name=name)

    def end(self) -> None:
        """Let it stop its system and end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    """Answer lines until the input ends."""
    running: System | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "system" in command:
                if running is not None:
                    running.stop()
                    running = None
                told: list[LoadProgress] = []
                running = System.start(
                    SystemConfig.from_json(json.dumps(command["system"]).encode()),
                    name=command.get("name"),
                    on_progress=told.append,
                )
                notes = {note: None for progress in told for note in progress.notes}
                stages = {progress.stage: None for progress in told}
                told_of = {"stages": list(stages), "notes": list(notes)}
                answer = {"processes": running.call("processes"), **told_of}
            elif "nodes" in command:
                answer = {"nodes": _await_nodes(command["nodes"])}
            elif "processes" in command and running is not None:
                answer = {"processes": running.call("processes")}
            else:
                answer = _complete(running, **command)
        except HotcoldError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    if running is not None:
        running.stop()


def _complete(
    running: System | None,
    prompt_ids: list[int],
    num_tokens: int,
    signals: dict[str, int] | None = None,
    num_logprobs: int | None = None,
) -> dict[str, Any]:
    if running is None:
        return {"error": "no system runs"}
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    left, result = dict(signals or {}), None
    request = GenerateRequest(sampling, prompt_ids=prompt_ids, num_logprobs=num_logprobs)
    logprobs: list[float | None] = []
    for event in running.generate(request):
        logprobs += [token.logprob for token in event.logprobs]
        while left:
            pid, number = left.popitem()
            os.kill(int(pid), number)
        result = event.result
    if result is None:
        return {"error": "the stream ended without a result"}
    return result.as_json() | {"logprobs": logprobs}


def _await_nodes(count: int) -> list[str]:
    """Connect, once something listens at RAY_ADDRESS, and wait for the nodes; their addresses."""
    host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
    deadline = time.monotonic() + _NODES_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    connect()
    while (alive := _alive()) and len(alive) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    if len(alive) < count:
        raise HotcoldError(f"the cluster has {len(alive)} nodes after {_NODES_S:.0f} s")
    return alive


def _alive() -> list[str]:
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


if __name__ == "__main__":
    main()
