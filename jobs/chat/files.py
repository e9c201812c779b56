"""Files of a conversation: texts that are attached to a question, conversations that are saved."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from hotcold.jobs.chat.conversation import Message
from hotcold.model.errors import UsageError, shown
from hotcold.model.files.atomic_write import replace_atomic

_MAX_ATTACHED = 1 << 20  # bytes of one file
_MAX_SAVED = 16 << 20
_ROLES = ("user", "assistant")
_KIND = "hotcold conversation"
_TICKS = re.compile("`+")
_MENTION = re.compile(r'(?:^|(?<=\s))@(?:"([^"]+)"|(\S+))')
_PATH = re.compile(r"[\w./~+ -]+")
_PATHS_BEGIN = ("/", "~/", "./", "../")
# Of files of which one may ask.
_SUFFIXES = (
    "c", "cc", "cfg", "conf", "cpp", "cs", "css", "csv", "diff", "doc", "docx", "gguf", "go", "gz",
    "h", "hpp", "htm", "html", "ini", "ipynb", "java", "jpeg", "jpg", "js", "json", "jsonl", "jsx",
    "kt", "log", "lua", "md", "odt", "patch", "pdf", "php", "pl", "png", "ppt", "pptx", "py", "pyi",
    "r", "rb", "rs", "rst", "sh", "sql", "svg", "swift", "tar", "tex", "toml", "ts", "tsv", "tsx",
    "txt", "xls", "xlsx", "xml", "yaml", "yml", "zip",
)  # fmt: skip


def read_attachment(path: Path) -> str:
    """A file of text as it goes with a question: its name, and its content between fences.

    Errors:  UsageError where it is none, or has over 1 MiB
    """
    try:
        text = _read(path, _MAX_ATTACHED).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8") from None
    if "\0" in text:
        raise UsageError(f"{path} is no text: it has a byte of zero")
    fence = "`" * max(3, 1 + max(map(len, _TICKS.findall(text)), default=0))
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"


def mentioned(question: str) -> list[Path]:
    """The files that a question names as @path or @"path", also those that there are not.

    What is at no path, and neither begins as one nor ends as files do, is just a word.
    """
    found = []
    for quoted, plain in _MENTION.findall(question):
        names = [quoted] if quoted else [plain, plain.rstrip(".,;:?!)")]
        names = [name for name in names if name.strip("./~")]
        meant = [name for name in names if os.path.exists(_path(name))]
        if not meant and names and _is_plainly_path(names[-1]):
            meant = names[-1:]
        if meant and (path := _path(meant[0])) not in found:
            found.append(path)
    return found


def _is_plainly_path(name: str) -> bool:
    """Whether it begins as a path, or ends as files do: not angular/core, not functools.wraps."""
    stem, _, suffix = name.rpartition(".")
    is_file = bool(stem) and suffix.lower() in _SUFFIXES
    return _PATH.fullmatch(name) is not None and (is_file or name.startswith(_PATHS_BEGIN))


def save_conversation(path: Path, system_prompt: str, messages: list[Message], model: str) -> None:
    """Write a conversation for this user alone, in OpenAI's form.

    Errors:  UsageError where another kind of file is there, or it cannot be written
    """
    if path.exists() or path.is_symlink():
        try:
            load_conversation(path)
        except UsageError:
            raise UsageError(f"{path} is there and no saved conversation; name another") from None
    opening = [{"role": "system", "content": system_prompt}] if system_prompt else []
    content = {"kind": _KIND, "model": model, "messages": [*opening, *messages]}
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    try:
        replace_atomic(path, text.encode(errors="surrogatepass"), mode=0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def load_conversation(path: Path) -> tuple[str, list[Message]]:
    """The system prompt, "" without one, and the messages of a saved conversation.

    Errors:  UsageError
    """
    try:
        content = json.loads(_read(path, _MAX_SAVED))
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no saved conversation") from None
    found = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(found, list) or content.get("kind") != _KIND:
        raise UsageError(f"{path} is no saved conversation")
    messages = [_message(path, one) for one in found]
    opening = ""
    if messages and messages[0]["role"] == "system":
        opening = messages.pop(0)["content"]
    for message, role in zip(messages, _ROLES * len(messages), strict=False):
        if message["role"] != role:
            raise UsageError(f"{path}: questions and answers are not in turn")
    if len(messages) % 2:
        raise UsageError(f"{path}: the last question has no answer")
    return opening, messages


def _message(path: Path, one: Any) -> Message:
    if isinstance(one, dict) and set(one) == {"role", "content"}:
        role, content = one["role"], one["content"]
        if role in ("system", *_ROLES) and isinstance(content, str):
            return {"role": role, "content": content}
    raise UsageError(f"{path}: {shown(one)} is no message")


def _read(path: Path, most_bytes: int) -> bytes:
    """A plain file's content. Errors: UsageError."""
    try:
        # A pipe would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{path} is no file")
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:
        raise UsageError(f"{path} has over {most_bytes >> 20} MiB")
    return content


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # of a user that there is not
        return Path(name)
