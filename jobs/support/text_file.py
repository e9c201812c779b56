"""A file of text as token ids: what is profiled, and what perplexity is measured on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.actors.driver.prompts import Prompts
from hotcold.jobs.support.console import steps_bar
from hotcold.model.errors import HotcoldError, UsageError, shown
from hotcold.model.text.tokenizer import Tokenizer

_PIECE_CHARS = 100_000  # encoding a long text at once takes more memory and time
_LAST_CHARS = 10_000  # of a piece, in which its end is searched
_JSON_LINES = (".jsonl", ".json")
_NO_TOKENIZER = (
    "text needs a tokenizer, and this model has none; give token ids in a "
    '.jsonl file: {"ids": [1, 2, 3]}'
)
# Between a word and a line's end every usual tokenizer starts a new token.
_WORD_AND_LINE_END = re.compile(r"(?<=\w)(?=\r?\n)")


@dataclass(frozen=True, eq=False)
class TextIds:
    """A text file's token ids, its documents one after the other.

    Shapes:  ids (T,), T >= 1
    Dtypes:  ids int32, each in the model's vocabulary
    """

    ids: np.ndarray
    digest: str  # sha256 of the file's bytes, 64 hexadecimal digits
    name: str  # the file's


def read_text_ids(
    path: Path,
    prompts: Prompts,
    on_progress: Callable[[float], None] = lambda share: None,
    content: bytes | None = None,
) -> TextIds:
    """Tokenize a file: UTF-8 text as one document, or in .jsonl and .json a document a line.

    A line is {"text": "..."}, {"messages": [{"role": ..., "content": ...}, ...]}, which the chat
    template writes, or {"ids": [...]}, which needs no tokenizer; other keys are ignored. The
    model's eos stands between documents. No document opens with bos: a reader of windows
    puts it before each. A plain text is cut between words and line ends into pieces that are
    encoded one by one; `on_progress` gets the share done. `content`: what the file holds, if known.
    Errors:  UsageError where the file is missing, empty or malformed or the model has no tokenizer;
             PromptError, ConfigError of the tokenizer and chat template
    """
    tokenizer = prompts.tokenizer
    content = _read(path) if content is None else content
    read = _json_documents if path.suffix.lower() in _JSON_LINES else _plain_documents
    bos, eos = prompts.config.bos_token_id, prompts.config.eos_token_ids[:1]
    parts: list[np.ndarray] = []
    for ids, share in read(path, content, tokenizer):
        on_progress(share)
        start = 1 if bos is not None and ids[:1] == [bos] else 0  # a chat template's
        document = ids[start:]
        if not document:
            continue
        if parts and eos and int(parts[-1][-1]) != eos[0]:
            parts.append(np.array(eos, np.int32))
        parts.append(np.array(document, np.int32))
    if not parts:
        raise UsageError(f"{path}: holds no text; give a file with some")
    ids_found = np.concatenate(parts)
    _check_vocabulary(path, ids_found, prompts.config.vocab_size)
    return TextIds(ids_found, hashlib.sha256(content).hexdigest(), path.name)


def read_text(path: Path | None, prompts: Prompts) -> TextIds:
    """`read_text_ids` with a progress bar; without a path of the language reference of Python."""
    content = None
    if path is None:
        from pydoc_data.topics import topics

        path = Path("Python's reference")
        content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    with steps_bar("tokenizing", 1.0) as show:
        return read_text_ids(path, prompts, show, content)


def windows(num_ids: int, size: int) -> list[tuple[int, int]]:
    """First and last (exclusive) of consecutive windows of `size` ids; the last may be shorter."""
    return [(first, min(first + size, num_ids)) for first in range(0, num_ids, size)]


def split_text(text: str) -> Iterator[str]:
    """Cut a text into pieces of _PIECE_CHARS at most, where it changes few tokens or none.

    Between a word and a line's end, else after a line's end, else before a space, else anywhere.
    """
    first = 0
    while len(text) - first > _PIECE_CHARS:
        last = first + _PIECE_CHARS
        from_here = max(first + 1, last - _LAST_CHARS)
        ends = [match.start() for match in _WORD_AND_LINE_END.finditer(text, from_here, last)]
        if ends:
            last = ends[-1]
        elif (found := text.rfind("\n", from_here, last)) >= 0:
            last = found + 1
        elif (found := text.rfind(" ", from_here, last)) >= 0:
            last = found
        yield text[first:last]
        first = last
    yield text[first:]


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise UsageError(f"{path}: cannot be read ({reason}); give a text file") from None
    if not content.strip():
        raise UsageError(f"{path}: is empty; give a file with text")
    return content


def _plain_documents(
    path: Path, content: bytes, tokenizer: Tokenizer | None
) -> Iterator[tuple[list[int], float]]:
    """The whole file as one document's ids. The share done comes with empty ones meanwhile."""
    if tokenizer is None:
        raise UsageError(_NO_TOKENIZER)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise UsageError(
            f"{path}: is not UTF-8 (byte {problem.start}); convert it, or give another file"
        ) from None
    ids: list[int] = []
    done = 0
    for piece in split_text(text):
        ids += tokenizer.encode(piece, add_special_tokens=False)
        done += len(piece)
        yield [], done / max(len(text), 1)
    yield ids, 1.0


def _json_documents(
    path: Path, content: bytes, tokenizer: Tokenizer | None
) -> Iterator[tuple[list[int], float]]:
    """Each line's ids, and the share of the file that is done."""
    done = 0
    for number, line in enumerate(content.split(b"\n"), 1):
        done += len(line) + 1
        if not line.strip():
            continue
        try:
            ids = _line_ids(line, tokenizer)
        except HotcoldError as problem:
            raise UsageError(f"{path}: line {number}: {problem}") from None
        yield ids, min(done / len(content), 1.0)


def _line_ids(line: bytes, tokenizer: Tokenizer | None) -> list[int]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as problem:
        raise UsageError(
            f"not JSON in UTF-8 ({shown(str(problem))[1:-1]}); write an object a line"
        ) from None
    match values:
        case {"text": str(), "messages": _}:
            raise UsageError("has both text and messages; give one of them")
        case {"ids": [*ids]}:
            if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
                raise UsageError("ids must be a list of token ids, whole numbers from 0 on")
            return ids
        case {"text": _} | {"messages": _} if tokenizer is None:
            raise UsageError(_NO_TOKENIZER)
        case {"text": str(text)} if tokenizer is not None:
            return [i for p in split_text(text) for i in tokenizer.encode(p, False)] if text else []
        case {"messages": [_, *_] as messages} if tokenizer is not None and all(
            map(_is_message, messages)
        ):
            # A conversation that waits for an answer is read up to where the model would speak.
            waits = messages[-1]["role"] != "assistant"
            text = tokenizer.render_chat(messages, add_generation_prompt=waits)
            return [i for p in split_text(text) for i in tokenizer.encode(p, False)]
    raise UsageError(
        f'{shown(values, 60)} is no document; write {{"text": "..."}}, {{"ids": [1, 2, 3]}} or '
        '{"messages": [{"role": "user", "content": "..."}]}'
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _check_vocabulary(path: Path, ids: np.ndarray, vocab_size: int) -> None:
    if ids.max() >= vocab_size:
        raise UsageError(
            f"{path}: the tokenizer gives id {ids.max()}, the model knows 0..{vocab_size - 1}; "
            "the model's tokenizer.json belongs to another model"
        )
