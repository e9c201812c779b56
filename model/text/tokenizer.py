"""Text to token ids and back, over the tokenizers library.

BOS is added by `Tokenizer.encode`, as the tokenizer's file says: tokenizer.json in its
post-processor, the other formats in `add_ends` of `model/text/bpe.py`.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from hotcold.model.errors import (
    ConfigError,
    PromptError,
    first_line,
    first_line_of_any,
    refuse_pointer_file,
    shown,
)
from hotcold.model.gguf.file_names import is_gguf
from hotcold.model.text.call_syntax import CallSyntax
from hotcold.model.text.channels import split_readable
from hotcold.model.text.chat_template import ChatTemplate, Messages, Thinking, special_tokens
from hotcold.model.text.end_tokens import end_ids
from hotcold.model.text.gguf_tokenizer import begins_chats, gguf_chat_template, gguf_tokenizer
from hotcold.model.text.legacy_tokenizers import legacy_tokenizer
from hotcold.model.text.split_patterns import is_linear, patterns_of
from hotcold.model.text.tools import Tools

# Characters or ids. The library takes over a millisecond for more, and lets other threads run
# meanwhile only in functions that take several texts.
_SHORT = 1000
# The end of a prompt, which may decide how the first token after it is written.
_CONTEXT_TOKENS = 6
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_INCOMPLETE = "\ufffd"  # what decoders write for an incomplete character
_MOST_PENDING = 8  # tokens whose text is held back, as their last character may be incomplete


class Tokenizer:
    """A model's tokenizer and chat template. Truncation and padding are off."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: ChatTemplate | None = None,
        begins_chats: bool = False,
        eos: str | None = None,
    ):
        """With `begins_chats` conversations begin with BOS where texts do. `eos` ends answers."""
        backend.no_truncation()
        backend.no_padding()
        self._template = template
        self._backend = _with_plain(template.marks if template else (), backend)
        self._begins_chats = begins_chats
        self._eos = eos

    @functools.cached_property
    def bos(self) -> str:
        """The text of the token that texts begin with; "" where there is none."""
        first = self.encode("a")[:1]
        return self.token_text(first[0]) if first and first != self.encode("a", False)[:1] else ""

    @classmethod
    def from_model(cls, path: str | Path) -> Tokenizer | None:
        """Read a model's tokenizer and chat template; None where it has no tokenizer.

        From tokenizer.json, else tokenizer.model, else vocab.json and merges.txt; or from the
        metadata of a GGUF file.
        Errors:  ConfigError naming the file that is damaged, CheckpointError for a GGUF file
        """
        if is_gguf(path):
            own = gguf_tokenizer(path)
            if own is None:
                return None
            return cls(own, gguf_chat_template(path), begins_chats=begins_chats(path))
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            legacy = legacy_tokenizer(Path(path))
            return None if legacy is None else cls(legacy, **_beside(Path(path)))
        try:
            backend = tokenizers.Tokenizer.from_buffer(file.read_bytes())
            backend.encode("a")  # some damage shows only here
            slow = [one for one in patterns_of(backend.decoder) if not is_linear(one)]
        except BaseException as problem:
            reason = first_line_of_any(problem)
            refuse_pointer_file(file, ConfigError)
            raise ConfigError(f"{file}: not a tokenizer ({reason}); download it again") from None
        if slow:  # it would run for each token, where all requests wait
            raise ConfigError(
                f"{file}: its decoder has the pattern {shown(slow[0])}, which may take for ever; "
                "take the model from where you trust it"
            )
        return cls(backend, **_beside(Path(path)))

    @functools.cached_property
    def is_linear(self) -> bool:
        """Whether a text is known to be encoded in a time that grows with its length alone."""
        parts = self._backend.normalizer, self._backend.pre_tokenizer
        return all(is_linear(pattern) for part in parts for pattern in patterns_of(part))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be used."""
        return self._template is not None

    def check_template(self) -> None:
        """Raise ConfigError where the chat template is none, PromptError where it is missing."""
        self._require_template().check()

    @property
    def chat_template(self) -> str | None:
        """The chat template's own text, in Jinja's language; None where there is none."""
        return None if self._template is None else self._template.text

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return str(self._backend.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes within a text, maybe a part of a character.

        An added token's are its own text; an unknown id has none.
        """
        text = self._backend.id_to_token(token_id) or ""
        if token_id in self._added:
            return text.encode()
        if self._is_byte_level:
            bytes_of = _bytes_of_letters()
            return b"".join(bytes_of.get(letter, letter.encode()) for letter in text)
        if (byte := _BYTE_TOKEN.fullmatch(text)) is not None:
            return bytes([int(byte[1], 16)])
        return text.replace("▁", " ").encode()

    @functools.cached_property
    def _added(self) -> dict[int, bool]:
        """Added tokens, and whether they are special."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: one.special for token_id, one in added.items()}

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves it out: it is special, or no token."""
        return self._added.get(token_id, False) or not self._backend.id_to_token(token_id)

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token's exact text, or None."""
        return self._backend.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """Return a token's text; bytes that form no character become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    @property
    def added_texts(self) -> dict[int, str]:
        """Added tokens that are not special: their text is part of the answer, such as <think>."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: one.content for token_id, one in added.items() if not one.special}

    def end_ids(self, named: Iterable[int]) -> tuple[int, ...]:
        """The ids that end an answer: those that the model's files name, then the known ones."""
        added = self._backend.get_added_tokens_decoder()
        special = {one.content: token_id for token_id, one in added.items() if one.special}
        others = {one.content: token_id for token_id, one in added.items() if not one.special}
        eos = None if self._eos is None else self._backend.token_to_id(self._eos)
        return end_ids(named if eos is None else (*named, eos), special, others)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with BOS and EOS where the tokenizer adds them.

        Errors:  PromptError for text that is invalid Unicode or that the tokenizer cannot encode
        """
        if len(text) > _SHORT:
            return self.encode_all([text], add_special_tokens)[0]
        with _told():
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """As `encode`, of each text; other threads run meanwhile."""
        with _told():
            found = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [list(one.ids) for one in found]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that form no character become U+FFFD."""
        if len(ids) <= _SHORT:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    @property
    def call_syntax(self) -> CallSyntax:
        """The syntax of the model's tool calls. Errors: PromptError without a template."""
        return self._require_template().call_syntax

    @property
    def thinking(self) -> Thinking | None:
        """The marks around the model's reasoning; None where it does not reason."""
        return None if self._template is None else self._template.thinking

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as the model's template writes it, special tokens included.

        As `ChatTemplate.render`. With the variable continue_final_message the text ends with the
        last message's content, which the answer continues.

        Errors:  PromptError where there is no template or it refuses the messages; ConfigError
                 where the template itself fails
        """
        text = self._require_template().render(messages, add_generation_prompt, tools, variables)
        if self._begins_chats and not text.startswith(self.bos):
            text = self.bos + text
        if not (variables or {}).get("continue_final_message"):
            return text
        last = str(messages[-1].get("content") or "")
        is_in_channels = self.thinking is not None and self.thinking.are_channels
        last = (split_readable(last)[1] if is_in_channels else last).strip()
        if not last or last not in text:
            raise PromptError("the last message cannot be continued: the chat template changes it")
        return text[: text.rindex(last) + len(last)]

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise PromptError("this model has no chat template; give a plain prompt instead")
        return self._template

    def stream_decoder(self, prompt_ids: Sequence[int] = ()) -> StreamDecoder:
        """Return a decoder for the tokens that follow `prompt_ids`."""
        return StreamDecoder(self, prompt_ids)


def _beside(directory: Path) -> dict[str, Any]:
    """What a directory has beside its tokenizer: the chat template, and the text of EOS."""
    template = ChatTemplate.from_directory(directory)
    return {"template": template, "eos": special_tokens(directory).get("eos_token")}


@contextmanager
def _told() -> Iterator[None]:
    """Raise what the library raises for a text as PromptError."""
    try:
        yield
    except (UnicodeEncodeError, TypeError):
        raise PromptError("the prompt is no valid Unicode text; give it in UTF-8") from None
    except BaseException as problem:  # a panic of Rust is no Exception
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        reason = first_line(problem)
        raise PromptError(f"the model's tokenizer cannot encode the prompt: {reason}") from None


def _with_plain(marks: Sequence[str], backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer with no special token within `marks`: decoding leaves special tokens out."""
    added = backend.get_added_tokens_decoder().values()
    plain = {
        token.content
        for token in added
        if token.special and any(token.content in mark for mark in marks)
    }
    if not plain:
        return backend
    values = json.loads(backend.to_str())
    for token in values["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in plain
    return tokenizers.Tokenizer.from_str(json.dumps(values))


@functools.cache
def _bytes_of_letters() -> dict[str, bytes]:
    """The bytes of byte-level tokens' letters: printable ones are themselves, others in order.

    Source:  GPT-2, encoder.py, bytes_to_unicode
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


class StreamDecoder:
    """Turns ids that come one by one into pieces of text that are final.

    The pieces joined are the text after the prompt: it keeps a space that the tokenizer strips at
    the start of a text. A character of several tokens is returned when it is complete. A few ids
    are decoded for each that comes, whatever they are.

    num_chars: of the pieces so far
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # The text of _ids[:_num_written] was returned; it is the context of what follows, and
        # starts with a whole character.
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        while self._ids and tokenizer.decode(self._ids).startswith(_INCOMPLETE):
            del self._ids[0]
        self._num_written = len(self._ids)
        self.num_chars = 0

    def push(self, token_id: int) -> str:
        """Add one id; return the text that is now final, maybe none."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._ids.append(token_id)
        piece = self._pending(len(self._ids))
        if piece and not piece.endswith(_INCOMPLETE):
            return self._write(piece, len(self._ids))
        if len(self._ids) - self._num_written <= _MOST_PENDING:
            return ""
        # An incomplete character has three bytes at most, so it begins in the last three tokens.
        last = len(self._ids) - 3
        counts = range(last, self._num_written, -1)
        final = (count for count in counts if piece.startswith(self._pending(count)))
        count = next(final, last)
        return self._write(self._pending(count), count)

    def peek(self, token_id: int) -> str:
        """Return what `push` would, and add nothing."""
        ahead = copy.copy(self)
        ahead._ids = list(self._ids)
        return ahead.push(token_id)

    def finish(self) -> str:
        """Return the rest, an incomplete character as U+FFFD."""
        return self._write(self._pending(len(self._ids)), len(self._ids))

    def _pending(self, count: int) -> str:
        """The text of the first `count` ids after what was returned."""
        written = self._tokenizer.decode(self._ids[: self._num_written])
        return self._tokenizer.decode(self._ids[:count])[len(written) :]

    def _write(self, piece: str, count: int) -> str:
        """Return the text of the first `count` ids, those before them are no context any more."""
        del self._ids[: self._num_written]
        self._num_written = count - self._num_written
        self.num_chars += len(piece)
        return piece
