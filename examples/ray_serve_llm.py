"""A model behind Ray Serve LLM's own ingress: `python ray_serve_llm.py [MODEL [PORT]]`.

The routes, request routers and autoscaling are Ray's, as with vLLM. Ask it by OpenAI's client, at
http://127.0.0.1:8000/v1; Ctrl-C ends it.
"""

import sys
from pathlib import Path
from typing import Any

from ray import serve

from hotcold.serve import build_openai_app


def app(model: str = "demo", **options: Any) -> serve.Application:
    """The application; `options` are those of `hotcold serve`, such as context=4096."""
    is_file = Path(model).exists()
    source = str(Path(model).absolute()) if is_file else model
    config = {
        "model_loading_config": {"model_id": Path(model).name, "model_source": source},
        "engine_kwargs": options,
        "deployment_config": {"num_replicas": 1},
    }
    return build_openai_app({"llm_configs": [config]})


def main(model: str = "demo", port: str = "8000") -> None:
    """Serve until Ctrl-C."""
    serve.start(http_options={"port": int(port)})
    serve.run(app(model), blocking=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
