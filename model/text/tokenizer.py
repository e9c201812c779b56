"""Text to token ids and back, over the tokenizers library."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from hotcold.model.errors import LONGEST_POINTER, ConfigError, PromptError, refuse_pointer, shown
from hotcold.model.gguf.names import is_gguf
from hotcold.model.text.chat_template import ChatTemplate, Messages
from hotcold.model.text.gguf_tokenizer import gguf_chat_template, gguf_tokenizer
from hotcold.model.text.older_files import older_tokenizer
from hotcold.model.text.thinking import Thinking
from hotcold.model.text.tools import CallSyntax, Tools

# Characters or ids. The library takes over a millisecond for more, and lets other threads run
# meanwhile only in functions that take several texts.
_SHORT = 1000
# As much of a prompt as may decide how the first token after it is written.
_CONTEXT_TOKENS = 6
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_INCOMPLETE = "\ufffd"  # what decoders write for a character whose bytes are not all there


class Tokenizer:
    """A model's tokenizer and chat template. Truncation and padding that it may ask for are off."""

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None = None):
        backend.no_truncation()
        backend.no_padding()
        self._template = template
        self._backend = _showing(self.thinking or (), backend)

    @classmethod
    def from_model(cls, path: str | Path) -> Tokenizer | None:
        """Read a model's tokenizer and chat template; None where it has no tokenizer.

        They are tokenizer.json, else tokenizer.model, else vocab.json and merges.txt, and what lies
        beside them; or in the metadata of a GGUF file.
        Errors:  ConfigError naming the file that is damaged, CheckpointError for a GGUF file
        """
        if is_gguf(path):
            own = gguf_tokenizer(path)
            return None if own is None else cls(own, gguf_chat_template(path))
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            older = older_tokenizer(Path(path))
            return None if older is None else cls(older, ChatTemplate.from_directory(path))
        try:
            backend = tokenizers.Tokenizer.from_buffer(file.read_bytes())
            backend.encode("a")  # some damage is met only here
        except BaseException as problem:  # the library raises Exception, its core PanicException
            if isinstance(problem, KeyboardInterrupt | SystemExit):
                raise
            with file.open("rb") as opened:
                refuse_pointer(file, opened.read(LONGEST_POINTER), ConfigError)
            reason = shown(str(problem).split("\n")[0])
            raise ConfigError(f"{file}: not a tokenizer ({reason}); download it again") from None
        return cls(backend, ChatTemplate.from_directory(path))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be used."""
        return self._template is not None

    def check_template(self) -> None:
        """Look whether the chat template is one. Errors: ConfigError, PromptError without any."""
        self._require_template().check()

    @property
    def chat_template(self) -> str | None:
        """The chat template's own text, in Jinja's language; None where there is none."""
        return None if self._template is None else self._template.text

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return str(self._backend.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token stands for within a text, maybe a part of a character.

        The name of one that is found in a text before it is cut; nothing for an id of none.
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
    def _added(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token's exact text, or None."""
        return self._backend.token_to_id(token)

    @property
    def added_texts(self) -> dict[int, str]:
        """Added tokens that are no special ones: they stand for their own text, such as <think>."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: one.content for token_id, one in added.items() if not one.special}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with the special tokens that the tokenizer puts around it.

        Errors:  PromptError for text that is no valid Unicode or that the tokenizer cannot encode
        """
        try:
            if len(text) <= _SHORT:
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
            (found,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(found.ids)
        except (UnicodeEncodeError, TypeError):
            raise PromptError("the prompt is no valid Unicode text; give it in UTF-8") from None
        except Exception as problem:  # the library raises nothing narrower
            reason = shown(str(problem).split("\n")[0])
            raise PromptError(f"the model's tokenizer cannot encode the prompt: {reason}") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that form no character become U+FFFD."""
        if len(ids) <= _SHORT:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    @property
    def call_syntax(self) -> CallSyntax:
        """How the model is asked to write calls of tools. Errors: PromptError without a template"""
        return self._require_template().call_syntax

    @property
    def thinking(self) -> Thinking | None:
        """How the model writes what it thinks, if it does."""
        return None if self._template is None else self._template.thinking

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as the model's template writes it, special tokens included.

        As `ChatTemplate.render`. With the variable continue_final_message the text ends with what
        the last message says, for the answer to go on with it.

        Errors:  PromptError where there is no template or it refuses the messages; ConfigError
                 where the template itself fails
        """
        text = self._require_template().render(messages, add_generation_prompt, tools, variables)
        if not (variables or {}).get("continue_final_message"):
            return text
        last = str(messages[-1].get("content") or "").strip()
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


def _showing(tags: Sequence[str], backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer with none of `tags` among the special tokens, which texts do not show."""
    added = backend.get_added_tokens_decoder().values()
    if not any(token.special and token.content in tags for token in added):
        return backend
    values = json.loads(backend.to_str())
    for token in values["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in tags
    return tokenizers.Tokenizer.from_str(json.dumps(values))


@functools.cache
def _bytes_of_letters() -> dict[str, bytes]:
    """What the letters of byte-level tokens stand for: printable bytes themselves, others in order.

    Source:  GPT-2, encoder.py, bytes_to_unicode
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


class StreamDecoder:
    """Turns ids that come one by one into text that is never taken back.

    All pieces joined are the text that follows the prompt: a space that the tokenizer would strip
    at the start of a text is kept after a prompt. A character of several tokens comes when it is
    whole.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # The text of _ids[:_num_written] is out; it is the context of what follows, and starts with
        # a whole character.
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        while self._ids and tokenizer.decode(self._ids).startswith(_INCOMPLETE):
            del self._ids[0]
        self._num_written = len(self._ids)
        self.text = ""

    def push(self, token_id: int) -> str:
        """Take one more id; return the text that it makes certain, maybe none."""
        self._ids.append(token_id)
        piece = self._pending()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        return self._write(piece)

    def finish(self) -> str:
        """Return what was held back, a broken character as U+FFFD."""
        return self._write(self._pending())

    def _pending(self) -> str:
        written = self._tokenizer.decode(self._ids[: self._num_written])
        return self._tokenizer.decode(self._ids)[len(written) :]

    def _write(self, piece: str) -> str:
        self._ids = self._ids[self._num_written :]
        self._num_written = len(self._ids)
        self.text += piece
        return piece
