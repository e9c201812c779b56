"""Text to token ids and back, over the tokenizers library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from model.errors import LONGEST_POINTER, ConfigError, PromptError, refuse_pointer, shown
from model.gguf.names import is_gguf
from model.text.chat_template import ChatTemplate, Messages
from model.text.gguf_tokenizer import gguf_chat_template, gguf_tokenizer
from model.text.older_files import older_tokenizer
from model.text.tools import CallSyntax, Tools

# As much of a prompt as may decide how the first token after it is written.
_CONTEXT_TOKENS = 6
_INCOMPLETE = "\ufffd"  # what decoders write for a character whose bytes are not all there


class Tokenizer:
    """A model's tokenizer and chat template. Truncation and padding that it may ask for are off."""

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None = None):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template

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

    @property
    def chat_template(self) -> str | None:
        """The chat template's own text, in Jinja's language; None where there is none."""
        return None if self._template is None else self._template.text

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return str(self._backend.to_str())

    def token_id(self, token: str) -> int | None:
        """Return the id of a token's exact text, or None."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with the special tokens that the tokenizer puts around it.

        Errors:  PromptError for text that is no valid Unicode or that the tokenizer cannot encode
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError):
            raise PromptError("the prompt is no valid Unicode text; give it in UTF-8") from None
        except Exception as problem:  # the library raises nothing narrower
            reason = shown(str(problem).split("\n")[0])
            raise PromptError(f"the model's tokenizer cannot encode the prompt: {reason}") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that form no character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @property
    def call_syntax(self) -> CallSyntax:
        """How the model is asked to write calls of tools. Errors: PromptError without a template"""
        return self._require_template().call_syntax

    def render_chat(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> str:
        """Return the conversation as the model's template writes it, special tokens included.

        Errors:  PromptError where there is no template or it refuses the messages; ConfigError
                 where the template itself fails
        """
        return self._require_template().render(messages, add_generation_prompt, tools)

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise PromptError("this model has no chat template; give a plain prompt instead")
        return self._template

    def stream_decoder(self, prompt_ids: Sequence[int] = ()) -> StreamDecoder:
        """Return a decoder for the tokens that follow `prompt_ids`."""
        return StreamDecoder(self, prompt_ids)


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
