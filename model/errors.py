"""Errors that a user can act on.

The text of each is one line that says what is wrong and what to do. The command line prints it
without a traceback; everything else that is raised is a defect of the program.
"""

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"
LONGEST_POINTER = 1024


class HotcoldError(Exception):
    """Base of all errors whose one line of text is meant for the user."""


class ConfigError(HotcoldError):
    """config.json (or a file beside it) is missing, contradictory or of an unsupported model."""


class CheckpointError(HotcoldError):
    """A weight file is missing, damaged, or disagrees with config.json."""


class ArtifactError(HotcoldError):
    """A profile, predictor or plan file is missing, damaged, or belongs to something else."""


class PromptError(HotcoldError):
    """A prompt is empty, too long, or holds a token id outside the vocabulary."""


class PromptTooLongError(PromptError):
    """A prompt leaves no space for an answer in the context."""


class MemoryBudgetError(HotcoldError):
    """The model or its KV cache does not fit in the memory that is free or allowed."""


class UsageError(HotcoldError):
    """An option or a request is unknown, malformed or out of range."""


class ServiceError(HotcoldError):
    """A running service died, is stuck, or refused a request."""


def shown(value: object, limit: int = 120) -> str:
    """Return `value` as one printable line of at most `limit` characters, for an error text."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def unknown_option(
    owner: str, name: str, known: Sequence[str], others: Mapping[str, str] | None = None
) -> str:
    """In one line that `owner` has no option of that name, and which one is meant, or known.

    `others`: what some are called elsewhere -> here
    """
    from difflib import get_close_matches  # not for each import of this package

    names = {**(others or {}), **{one: one for one in known}}
    nearest = get_close_matches(name, names, 1, cutoff=0.7)
    told = f"did you mean {names[nearest[0]]}?" if nearest else f"known are {', '.join(known)}"
    return f"{owner} has no option {name!r}; {told}"


def first_line(problem: BaseException, limit: int = 120) -> str:
    """Return a library's error as one printable line, quoted."""
    return shown(str(problem).split("\n")[0], limit)


def first_line_of_any(problem: BaseException) -> str:
    """As `first_line`, for `except BaseException`: Ctrl-C and exits are raised again.

    tokenizers' Rust core raises PanicException, which is no Exception.
    """
    if isinstance(problem, KeyboardInterrupt | SystemExit):
        raise problem
    return first_line(problem)


def refuse_pointer(source: object, head: bytes, error: type[HotcoldError]) -> None:
    """Raise `error` where a file's first bytes are those of a Git LFS pointer."""
    if head.startswith(_POINTER):
        raise error(
            f"{source}: is Git LFS's pointer in the file's place; run `git lfs pull` in its folder"
        )


def refuse_pointer_file(path: Path, error: type[HotcoldError]) -> None:
    """Raise `error` where the file is a Git LFS pointer. Errors: OSError."""
    with path.open("rb") as file:
        refuse_pointer(path, file.read(LONGEST_POINTER), error)


def require_nonempty(prompt: Sized) -> None:
    """Raise PromptError for a prompt, text or ids, that is empty."""
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token")
