"""From a request's text, messages or ids to checked token ids."""

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import PromptError, PromptTooLongError, require_nonempty
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.model.text.tokenizer_process import TokenizerProcess

_MAX_CHARS_A_TOKEN = 1000
_LONG = 1 << 18  # characters, which take a fifth of a second


class Prompts:
    """Encodes and checks prompts; needs no weights, so commands can check before loading."""

    def __init__(self, path: Path, config: ModelConfig, context_length: int) -> None:
        """Tokenizer and chat template come from the model's directory `path`."""
        self.tokenizer = Tokenizer.from_model(path)
        self.config = config
        self.context_length = context_length
        self._tokenizer_process = TokenizerProcess(path)

    @functools.cached_property
    def bos_id(self) -> int | None:
        """The model's bos where its texts open with it: as its tokenizer does, if there is one."""
        bos = self.config.bos_token_id
        if self.tokenizer is None or self.tokenizer.encode("a")[:1] == [bos]:
            return bos
        return None

    def checked(
        self, request: GenerateRequest, unwanted: threading.Event | None = None
    ) -> GenerateRequest:
        """The same request with `ids` in place of its text. Errors: PromptError."""
        return replace(
            request,
            is_chat=request.is_chat or request.messages is not None,
            prompt=None,
            messages=None,
            tools=None,
            template_variables=None,
            prompt_ids=self.ids(request, unwanted),
        )

    def ids(self, request: GenerateRequest, unwanted: threading.Event | None = None) -> list[int]:
        """The request's token ids, all in the vocabulary and within the context.

        The context must hold one more for the answer, unless an embedding is wanted. Encoding may
        stop once `unwanted` is set.
        Errors:  PromptError
        """
        ids = self._encode(request, unwanted)
        if request.sampling.stop and self.tokenizer is None:
            raise PromptError("this model has no tokenizer, so no text; leave out --stop")
        require_nonempty(ids)
        self.require_in_vocabulary(ids)
        self.require_in_vocabulary(request.sampling.stop_token_ids)
        self.require_in_vocabulary([token_id for token_id, _ in request.sampling.biases])
        if len(ids) + (not request.wants_embedding) > self.context_length:
            answer = "" if request.wants_embedding else " with the answer"
            most = self.config.max_positions
            more = f" or start with a larger --context (this model allows {most})"
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context_length}{answer}"
                f"; shorten it{more if most > self.context_length else ''}"
            )
        return ids

    def require_in_vocabulary(self, ids: Sequence[int]) -> None:
        """Raise PromptError where one of `ids` is no token of the model."""
        last = self.config.vocab_size - 1
        for token_id in ids:
            if not 0 <= token_id <= last:
                raise PromptError(f"token id {token_id} is not in the vocabulary 0..{last}")

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        unwanted: threading.Event | None = None,
    ) -> list[int]:
        """The ids of a text. Errors: PromptError.

        One that may take long, and is then encoded in another process, is given up soon after
        `unwanted` is set: a long one, and any where the model's own patterns may be slow.
        """
        if self.tokenizer is None:
            raise PromptError("this model has no tokenizer, so no text")
        if len(text) > _LONG or not self.tokenizer.is_linear:
            return self._tokenizer_process.encode(text, add_special_tokens, unwanted)
        return self.tokenizer.encode(text, add_special_tokens)

    def _encode(self, request: GenerateRequest, unwanted: threading.Event | None) -> list[int]:
        if request.prompt_ids is not None:
            return list(request.prompt_ids)
        if self.tokenizer is None:
            raise PromptError(
                "this model has no tokenizer; give token ids (`hotcold generate --prompt-ids`)"
            )
        if request.messages is not None:
            text = self.tokenizer.render_chat(
                request.messages, tools=request.tools, variables=request.template_variables
            )
        else:
            text = request.prompt or ""
        if len(text) > self.context_length * _MAX_CHARS_A_TOKEN:  # would take minutes to encode
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, far more than the context of "
                f"{self.context_length} tokens holds; shorten it"
            )
        # A chat template writes the special tokens itself.
        return self.encode(text, request.messages is None, unwanted) if text else []
