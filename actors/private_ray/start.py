"""Starts a private Ray: GCS server, raylet and workers, without the processes for a cluster.

`ray.init` starts five more Python processes: autoscaler monitor, log monitor, dashboard, and two
agents that the raylet waits for. Here the agents are two shells, and the others are left out: the
embedded model's first text comes after 3.5 s on two cores, and after 12.6 s with `ray.init` alone
(7 s without forked workers). This uses parts of Ray that are not public. If one that only saves
time is missing, Ray starts without it; if `init_private` fails, its caller falls back on
`ray.init`.
"""

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ray

from hotcold.actors.private_ray.closed_ray import closed_to_others
from hotcold.actors.private_ray.fork_server import ADDRESS, ForkServer, run_beside
from hotcold.actors.private_ray.temp_folder import TempFolder
from hotcold.actors.setup.ray_parts import replaced

_log = logging.getLogger(__name__)
# In place of an agent, which the raylet requires: a shell that waits for the end of a pipe, that of
# the raylet. Ray's further arguments become the shell's, which takes no notice of them.
_STUB_AGENT = '/bin/sh -c "read stands_in_for_an_agent"'
_OF_RAYLET = {
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",  # it is their standard input
    "RAY_kill_idle_workers_interval_ms": "0",  # workers wait for the driver's first calls
}
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
# Of one node that nobody watches: no statistics, one thread a task, and a look at what hardly ever
# changes not ten times a second. A worker that ends is noticed by its closed socket.
# A GCS server that lacks one of them ends, so they are for the version that they were tried with.
_SETTINGS_OF = "2.60."
_SETTINGS: dict[str, Any] = {
    "enable_metrics_collection": False,
    "emit_main_service_metrics": False,
    "event_stats": False,
    "enable_timeline": False,
    "task_events_report_interval_ms": 0,
    "gcs_server_rpc_server_thread_num": 1,
    "gcs_server_rpc_client_thread_num": 1,
    "num_server_call_thread": 1,
    "core_worker_num_server_call_thread": 1,
    "object_manager_rpc_threads_num": 1,
    "worker_num_grpc_internal_threads": 1,
    "raylet_report_resources_period_milliseconds": 1000,
    "raylet_check_gc_period_milliseconds": 10_000,
    "gcs_pull_resource_loads_period_milliseconds": 10_000,
    "object_manager_timer_freq_ms": 10_000,
    "local_fs_monitor_interval_ms": 10_000,
    "io_context_monitor_probe_interval_ms": 10_000,
    "report_worker_backlog_interval_ms": 10_000,
    "debug_dump_period_milliseconds": 0,
    "raylet_death_check_interval_milliseconds": 10_000,
    # The raylet may look for its object store before that listens, and would look again after 1 s.
    "raylet_client_connect_timeout_milliseconds": 10,
    "raylet_client_num_connect_attempts": 1000,
    "ray_syncer_message_refresh_interval_ms": 60_000,
    "health_check_period_ms": 30_000,
    "start_python_gc_manager_thread": False,
}
_AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
_NO_PORT = 1  # where nothing listens
_WORKER = "--python_worker_command"
_WORKERS = "--num_prestart_python_workers"
_WORKERS_AT_ONCE = "--maximum_startup_concurrency"
_FORKED_WORKER = Path(__file__).with_name("forked_worker.py")
_WORKERS_SOCKET = "workers"  # of the fork server
_REGISTERED_S = 15.0  # for the raylet to register with the GCS server; mostly it takes 0.2
_starting = threading.Lock()


def init_private(num_workers: int, beside: tuple[str, bytes] | None = None, **options: Any) -> None:
    """`ray.init(**options)` with the fewest processes; Ray ends with this process.

    `num_workers` worker processes start at once, before the first call. `beside`: a module that is
    run meanwhile, and its standard input. Ray's files are in a private folder, which `ray.shutdown`
    removes.
    Errors:  any, with an unknown version of Ray; it may leave children of this process running
    """
    from ray._private import node as ray_node
    from ray._private import utils

    TempFolder.remove_dead()
    at_once = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    with _starting, ExitStack() as undo:
        folder = TempFolder()
        undo.callback(folder.remove)
        server = ForkServer.take()
        undo.callback(server.end)
        try:
            address = folder.path / _WORKERS_SOCKET
            server.listen(address)
            if beside is not None:
                run_beside(address, *beside)
        except OSError as error:
            server.end()
            _log.warning("Ray's workers start in its own way, which takes longer: %s", error)
        undo.callback(ray.shutdown)
        node_class = _node_class(ray_node, server, folder, num_workers)
        with (
            replaced(ray_node, "Node", node_class),
            # A node sleeps to wait for its raylet; ours has been awaited already.
            replaced(ray_node, "time", at_once),
            # It would import the dashboard's packages, for a third of a second.
            replaced(utils, "get_dashboard_dependency_error", lambda: None),
            closed_to_others(folder.path),
        ):
            # A hook, such as that of `uv run`, would need an agent to make an environment.
            ray.init(
                _temp_dir=str(folder.temp_dir),
                _skip_env_hook=True,
                _system_config=_settings(options["num_cpus"]),
                **options,
            )
        undo.pop_all()


def _settings(num_cpus: int) -> dict[str, Any] | None:
    """Ray's; None for versions that they were not tried with."""
    if not ray.__version__.startswith(_SETTINGS_OF):
        return None
    # Calls of one kind that the GCS server keeps at once, memory for each. Every process has one
    # that waits for news; a model has a driver, an attention service and at most a service a CPU.
    return _SETTINGS | {"gcs_max_active_rpcs_per_handler": 16 + 4 * num_cpus}


def _node_class(
    ray_node: ModuleType, server: ForkServer, folder: TempFolder, num_workers: int
) -> type:
    """A subclass of Ray's node without the processes that a private Ray does not need."""
    from ray._private import services

    class PrivateNode(ray_node.Node):  # type: ignore[name-defined]
        """The processes of a private Ray."""

        def __init__(self, ray_params: Any, *args: Any, **kwargs: Any) -> None:
            ray_params.session_name = "session"  # a socket's path may have about a hundred bytes
            ray_params.worker_path = str(_FORKED_WORKER)
            super().__init__(ray_params, *args, **kwargs)

        def start_monitor(self) -> None:
            """No autoscaler."""

        def start_log_monitor(self) -> None:
            """No process that reads logs."""

        def start_api_server(self, **_: Any) -> None:
            """No dashboard."""
            self._webui_url = ""

        def start_raylet(self, *args: Any, **kwargs: Any) -> None:
            """Start the raylet, with stubs for its agents, whose ports it reads from files."""
            for name in _AGENT_PORTS:
                port_file = Path(self._session_dir) / f"{name}_{self._node_id}"
                port_file.write_text(str(_NO_PORT))
            start = _with_command(services.start_ray_process, num_workers, folder)
            with replaced(services, "start_ray_process", start):
                super().start_raylet(*args, **kwargs)
            self._await_raylet()

        def _await_raylet(self) -> None:
            """Wait until the raylet has registered. Errors: ChildProcessError, TimeoutError.

            Ray itself polls once a second, and half a minute even if the raylet has ended.
            """
            (raylet,) = self.all_processes["raylet"]
            deadline = time.monotonic() + _REGISTERED_S
            while not self.get_gcs_client().get_all_node_info(timeout=_REGISTERED_S):
                if raylet.process.poll() is not None:
                    raise ChildProcessError("the raylet has ended")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the raylet has not registered in {_REGISTERED_S:.0f} s")
                time.sleep(0.005)

        def kill_all_processes(self, *args: Any, **kwargs: Any) -> None:
            """Kill them at once, as none holds persistent state, and remove their files."""
            super().kill_all_processes(check_alive=False, allow_graceful=False)
            server.end()
            folder.remove()

    return PrivateNode


def _with_command(
    start: Callable[..., Any], num_workers: int, folder: TempFolder
) -> Callable[..., Any]:
    """`start` (Ray's `start_ray_process`) with the raylet's command changed."""
    worker = subprocess.list2cmdline([str(_FORKED_WORKER)])

    def changed(argument: str) -> str:
        name = argument.split("=", 1)[0]
        if name in _AGENTS:
            return f"{name}={_STUB_AGENT}"
        if name == _WORKER:
            return argument.replace(worker, f"-I -S {worker}")
        return f"{name}={num_workers}" if name in (_WORKERS, _WORKERS_AT_ONCE) else argument

    def start_changed(command: list[str], *args: Any, **kwargs: Any) -> Any:
        kwargs["env_updates"] = (
            (kwargs.get("env_updates") or {})
            | _OF_RAYLET
            | {ADDRESS: str(folder.path / _WORKERS_SOCKET)}
        )
        return start([changed(argument) for argument in command], *args, **kwargs)

    return start_changed
