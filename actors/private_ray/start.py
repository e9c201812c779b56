"""Starts a private Ray: GCS server, raylet and workers, without the processes for a cluster.

`ray.init` starts five more Python processes: autoscaler monitor, log monitor, dashboard, and two
agents that the raylet waits for. Here the agents are two shells, and the others are left out: the
embedded model's first text comes after 3.5 s on two cores, and after 12.6 s with `ray.init` alone
(7 s without forked workers). Ray has no public option for any of it, so this uses parts of it that
are not public, of versions that it was tried with. Where it fails, its caller uses `ray.init`.
"""

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ray

from hotcold.actors.private_ray.closed_ray import closed_to_others
from hotcold.actors.private_ray.fork_server import ADDRESS, ForkServer
from hotcold.actors.private_ray.temp_folder import TempFolder
from hotcold.actors.setup.ray_parts import replaced

_NEWEST = (2, 60)  # of the versions that it was tried with
_SETTINGS = {
    # The raylet may look for its object store before that listens, and would look again after 1 s.
    "raylet_client_connect_timeout_milliseconds": 10,
    "raylet_client_num_connect_attempts": 1000,
    "kill_idle_workers_interval_ms": 0,  # workers wait for the driver's first calls
    "task_events_report_interval_ms": 0,  # else the GCS server has a record of every call
    # A look at what hardly ever changes not ten times a second: a third of what a Ray takes idle.
    "raylet_report_resources_period_milliseconds": 1000,
    "raylet_check_gc_period_milliseconds": 10_000,
    "object_manager_timer_freq_ms": 10_000,
}
# In place of an agent, which the raylet requires: a shell that waits for the end of its standard
# input, a pipe of the raylet's.
_STUB_AGENT = '/bin/sh -c "read stands_in_for_an_agent"'
_PIPE_TO_AGENT = "RAY_enable_pipe_based_agent_to_parent_health_check"
_AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
_LOOKS, _LOOK_S = 3000, 0.005  # whether the raylet has registered, which takes 0.03 s
_ANSWER_S = 15.0
_starting = threading.Lock()


def init_private(num_workers: int, beside: tuple[str, bytes] | None = None, **options: Any) -> None:
    """`ray.init(**options)` with the fewest processes; Ray ends with this process.

    `num_workers` worker processes start at once, before the first call. `beside`: a module that is
    run meanwhile, and its standard input. Ray's files are in a private folder, which `ray.shutdown`
    removes.
    Errors:  OSError with a newer version of Ray; any, with an unknown one, and children of this
             process may be left
    """
    from ray._private import node as ray_node
    from ray._private import utils

    TempFolder.remove_dead()
    with _starting, ExitStack() as undo:
        folder = TempFolder()
        undo.callback(folder.remove)
        server = ForkServer.take()
        undo.callback(server.end)
        if tuple(map(int, ray.__version__.split(".")[:2])) > _NEWEST:
            raise OSError(f"version {ray.__version__} is newer than those that were tried")
        address = folder.path / "workers"
        server.listen(address)
        if beside is not None:
            server.run(address, *beside)
        undo.callback(ray.shutdown)
        with (
            replaced(ray_node, "Node", _node_class(ray_node, server, folder, num_workers)),
            # A node sleeps while its raylet registers; ours has been awaited already.
            replaced(ray_node, "time", SimpleNamespace(**vars(time) | {"sleep": lambda s: None})),
            # It would import the dashboard's packages, for a third of a second.
            replaced(utils, "get_dashboard_dependency_error", lambda: None),
            closed_to_others(folder.path),
        ):
            # A hook, such as that of `uv run`, would need an agent to make an environment.
            ray.init(
                _temp_dir=str(folder.temp_dir),
                _skip_env_hook=True,
                _system_config=_SETTINGS,
                **options,
            )
        undo.pop_all()


def _node_class(
    ray_node: ModuleType, server: ForkServer, folder: TempFolder, num_workers: int
) -> type:
    """A subclass of Ray's node without the processes that a private Ray does not need."""
    from ray._private import services

    # The last one of an option's values counts.
    changes = [
        f"--num_prestart_python_workers={num_workers}",  # by itself one for each CPU
        f"--maximum_startup_concurrency={num_workers}",
        f"--dashboard_agent_command={_STUB_AGENT}",
        f"--runtime_env_agent_command={_STUB_AGENT}",
    ]

    def start_changed(command: list[str], *args: Any, **kwargs: Any) -> Any:
        return start_ray_process([*command, *changes], *args, **kwargs)

    start_ray_process = services.start_ray_process

    class PrivateNode(ray_node.Node):  # type: ignore[name-defined]
        """The processes of a private Ray."""

        def __init__(self, ray_params: Any, *args: Any, **kwargs: Any) -> None:
            ray_params.session_name = "session"  # a socket's path may have about a hundred bytes
            ray_params.worker_path = str(Path(__file__).with_name("forked_worker.py"))
            ray_params.env_vars = {_PIPE_TO_AGENT: "1", ADDRESS: str(folder.path / "workers")}
            ray_params.no_monitor, ray_params.include_log_monitor = True, False
            super().__init__(ray_params, *args, **kwargs)

        def start_api_server(self, **_: Any) -> None:
            """No dashboard."""
            self._webui_url = ""

        def start_raylet(self, *args: Any, **kwargs: Any) -> None:
            """Start the raylet, with stubs for its agents, whose ports it reads from files.

            Errors:  ChildProcessError where it ends before it has registered
            """
            for name in _AGENT_PORTS:
                port_file = Path(self._session_dir, f"{name}_{self._node_id}")
                port_file.write_text("1")  # where no program of a user can listen
            with replaced(services, "start_ray_process", start_changed):
                super().start_raylet(*args, **kwargs)
            raylet = self.all_processes["raylet"][0].process
            for _ in range(_LOOKS):  # Ray itself looks every 0.1 s
                if self.get_gcs_client().get_all_node_info(timeout=_ANSWER_S):
                    break
                if raylet.poll() is not None:
                    raise ChildProcessError("the raylet has ended")
                time.sleep(_LOOK_S)

        def kill_all_processes(self, *args: Any, **kwargs: Any) -> None:
            """Kill them at once, as none holds persistent state, and remove their files."""
            super().kill_all_processes(check_alive=False, allow_graceful=False)
            server.end()
            folder.remove()

    return PrivateNode
