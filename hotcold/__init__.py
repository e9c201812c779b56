"""Large language models on one ordinary computer, in Python, on Ray.

    from hotcold import LLM, SamplingParams

    with LLM("org/repo") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=50)).text)

What `__all__` names is public and stable (docs/python.md); all else is internal. In a checkout the
packages' folders stand at its top, and this folder has a symbolic link to each.
"""

import sys
from importlib import import_module

TYPE_CHECKING = False  # type checkers know the name; `typing` takes as long as all else here
if TYPE_CHECKING:
    from hotcold.actors.protocol.messages import TokenLogprob
    from hotcold.llm import LLM
    from hotcold.model.errors import (
        ArtifactError,
        CheckpointError,
        ConfigError,
        HotcoldError,
        MemoryBudgetError,
        PromptError,
        PromptTooLongError,
        ServiceError,
        UsageError,
    )
    from hotcold.outputs import (
        CompletionOutput,
        RequestOutput,
        ScoreOutput,
        StreamPiece,
        ToolCall,
        Work,
    )
    from hotcold.sampling_params import SamplingParams

__version__ = "0.1.0"
_LINUX_ONLY = "hotcold runs on Linux only; use a container, or WSL 2 on Windows"

__all__ = [
    "LLM",
    "ArtifactError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "HotcoldError",
    "MemoryBudgetError",
    "PromptError",
    "PromptTooLongError",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "ServiceError",
    "StreamPiece",
    "TokenLogprob",
    "ToolCall",
    "UsageError",
    "Work",
    "__version__",
]

_MODULES = {
    "LLM": "hotcold.llm",
    "SamplingParams": "hotcold.sampling_params",
    "TokenLogprob": "hotcold.actors.protocol.messages",
    **dict.fromkeys(
        ("CompletionOutput", "RequestOutput", "ScoreOutput", "StreamPiece", "ToolCall", "Work"),
        "hotcold.outputs",
    ),
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `import hotcold` takes no time."""
    if name not in __all__:
        raise AttributeError(f"module 'hotcold' has no attribute {name!r}")
    if name == "LLM" and sys.platform != "linux":
        raise ImportError(_LINUX_ONLY)
    found: object = getattr(import_module(_MODULES.get(name, "hotcold.model.errors")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
