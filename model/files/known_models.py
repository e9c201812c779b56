"""Well-known names of models, such as qwen3:8b, each of which stands for a repository.

`known_models.toml` has them; a file of the user's own adds to it, and comes first.
"""

from __future__ import annotations

import os
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hotcold.model.errors import UsageError, shown
from hotcold.model.files.hub import REPOSITORY, cached_models

_FILE = Path(__file__).with_name("known_models.toml")
_SPARSE = "sparse"  # the table of names of models whose neurons are mostly zero
_LATEST = ":latest"  # Ollama's tag where none is given


def own_file() -> Path:
    """The user's file of names, whether it exists or not."""
    chosen = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    home = chosen if chosen.is_absolute() else Path.home() / ".config"  # as XDG wants it
    return home / "hotcold" / "models.toml"


def known_models() -> dict[str, str]:
    """Repositories by name. Errors: UsageError of the user's file."""
    return _names_in(_FILE) | _names_in(own_file())


def sparse_models() -> set[str]:
    """The known repositories whose models leave most neurons out."""
    return set(_tables_in(_FILE)[_SPARSE].values())


def repository_of(text: str) -> str:
    """The repository that a name stands for; any other text as it is.

    A file or a folder of that name comes before. Errors: UsageError of the user's file.
    """
    if not text or "/" in text:
        return text
    try:
        if Path(text).exists():
            return text
    except (OSError, ValueError):  # a name that no file can have
        return text
    known = known_models()
    return known.get(text) or known.get(text.removesuffix(_LATEST), text)


def did_you_mean(text: str) -> str:
    """The known name or fetched model that is most like `text`, for an error's end.

    Of a known name with another tag, its tags. Where none is like it and `text` may be a name,
    those that are known, without tags.
    """
    known = known_models()
    base, has_tag, _ = text.lower().partition(":")
    tags = [name for name in known if name.startswith(f"{base}:")]
    if has_tag and tags and text.lower() not in known:
        return f"; known of {base}: {', '.join(tags)}"
    names = [*known, *(model.name for model in cached_models())]
    same = {name.lower(): name for name in names}
    nearest = get_close_matches(text.lower(), same, 1, 0.7)
    if nearest:
        return f"; did you mean {same[nearest[0]]}?"
    if not text or "/" in text:
        return ""
    shortest = {name if (base := name.partition(":")[0]) not in known else base for name in known}
    return f"; known names: {', '.join(sorted(shortest))}"


def _tables_in(path: Path) -> dict[str, Any]:
    """The names of a file, and a table of those of sparse models; none where it is missing.

    Errors:  UsageError
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as problem:
        raise UsageError(f"{path} cannot be read: {problem}; mend or remove it") from None


def _names_in(path: Path) -> dict[str, str]:
    """All names of a file. Errors: UsageError."""
    found = _tables_in(path)
    if isinstance(found.get(_SPARSE), dict):
        found |= found.pop(_SPARSE)
    for name, model in found.items():
        if "/" in name or not isinstance(model, str) or not REPOSITORY.fullmatch(model):
            raise UsageError(
                f'{path}: {shown(name)} is {shown(model)}; write it like "qwen3:8b" = '
                '"org/repo:Q4_K_M"'
            )
    return found
