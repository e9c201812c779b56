"""A Ray for one process alone: GCS server, raylet and workers, without what looks after a cluster.

`ray.init` starts five Python processes more: autoscaler monitor, log monitor, dashboard, and two
agents that the raylet waits for. Here they are left out, and two small processes stand in for the
agents. The parts of Ray that this leans on are its own, not public: whoever calls `init_private`
falls back on `ray.init` where it fails.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

from actors.processes.closed_ray import closed_to_others
from actors.processes.session_folder import SessionFolder

_STAND_IN = Path(__file__).with_name("stand_in_agent.py")
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
_AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
_NO_PORT = 1  # nothing of ours listens there
_WORKERS = "--num_prestart_python_workers"
_WORKERS_AT_ONCE = "--maximum_startup_concurrency"
# What workers import before anybody asks them for an actor.
_PRELOADED = {
    "RAY_preload_python_modules": "actors.launch,actors.cpu.cpu_service,actors.gpu.gpu_service"
}
_starting = threading.Lock()


def init_private(num_workers: int, **options: Any) -> None:
    """Do as `ray.init(**options)`, with the fewest processes; it ends with this process.

    `num_workers` worker processes start at once, before anybody asks for one. Ray's files are in a
    folder of its own, which `ray.shutdown` removes.
    Errors:  any, where this Ray is not like those that were known; nothing is left running then but
             children of this process
    """
    from ray._private import node as ray_node

    SessionFolder.remove_dead()
    folder = SessionFolder()
    node_class = _node_class(ray_node, folder, num_workers)
    with _starting:
        usual = ray_node.Node
        ray_node.Node = node_class
        try:
            # A hook, such as that of `uv run`, asks for an environment that an agent has to make.
            with closed_to_others(folder.path):
                ray.init(_temp_dir=str(folder.temp_dir), _skip_env_hook=True, **options)
        except BaseException:
            ray.shutdown()
            folder.remove()
            raise
        finally:
            ray_node.Node = usual


def _node_class(ray_node: ModuleType, folder: SessionFolder, num_workers: int) -> type:
    """Ray's class of a node's processes, without those that a private one has no use for."""
    from ray._private import services

    class PrivateNode(ray_node.Node):  # type: ignore[name-defined]
        """The processes of a private Ray."""

        def __init__(self, ray_params: Any, *args: Any, **kwargs: Any) -> None:
            ray_params.session_name = "session"  # a socket's path may have about a hundred bytes
            super().__init__(ray_params, *args, **kwargs)

        def start_monitor(self) -> None:
            """No autoscaler."""

        def start_log_monitor(self) -> None:
            """No process that reads logs."""

        def start_api_server(self, **_: Any) -> None:
            """No dashboard."""
            self._webui_url = ""

        def start_raylet(self, *args: Any, **kwargs: Any) -> None:
            """Start the raylet, with stand-ins for its agents, whose ports it finds in files."""
            for name in _AGENT_PORTS:
                port_file = Path(self._session_dir) / f"{name}_{self._node_id}"
                port_file.write_text(str(_NO_PORT))
            usual = services.start_ray_process
            services.start_ray_process = _with_command(usual, num_workers)
            try:
                super().start_raylet(*args, **kwargs)
            finally:
                services.start_ray_process = usual

        def kill_all_processes(self, *args: Any, **kwargs: Any) -> None:
            """End them, and remove their files."""
            super().kill_all_processes(*args, **kwargs)
            folder.remove()

    return PrivateNode


def _with_command(start: Callable[..., Any], num_workers: int) -> Callable[..., Any]:
    """`start`, of a process, with the raylet's command changed."""

    def changed(argument: str) -> str:
        name = argument.split("=", 1)[0]
        if name in _AGENTS:
            return f'{name}="{sys.executable}" -I -S "{_STAND_IN}"'
        return f"{name}={num_workers}" if name in (_WORKERS, _WORKERS_AT_ONCE) else argument

    def start_changed(command: list[str], *args: Any, **kwargs: Any) -> Any:
        kwargs["env_updates"] = (kwargs.get("env_updates") or {}) | _PRELOADED
        return start([changed(argument) for argument in command], *args, **kwargs)

    return start_changed
