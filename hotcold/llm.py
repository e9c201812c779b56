"""A model as Python programs use it: `LLM`."""

from __future__ import annotations

import os
import queue
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Unpack, overload

from hotcold.actors.protocol.messages import Generation, TokenEvent
from hotcold.actors.protocol.options import OPTIONS, SystemOptions, in_keywords, seconds_of
from hotcold.answers import Answer, Answers, progress_bar
from hotcold.inputs import Given, Inputs
from hotcold.jobs.running.in_flight import Connection, InFlight
from hotcold.model.errors import HotcoldError, PromptError, UsageError, shown
from hotcold.outputs import RequestOutput, ScoreOutput, StreamPiece
from hotcold.sampling_params import SamplingParams, unknown_argument

if TYPE_CHECKING:
    import numpy as np

    from hotcold.chats import ChatOptions
    from hotcold.inputs import Params, Prompt

# What vLLM's LLM has: what is used here.
_ELSEWHERE = {
    "get_tokenizer": "llm.tokenize and llm.detokenize",
    "get_default_sampling_params": "llm.default_sampling",
}


class LLM:
    """A model that answers, in a system that runs already or that this process starts.

    `model`: an org/repo id, a directory or a file, or None for the embedded model. The options are
    those of `hotcold generate`, by their names there (docs/python.md); sizes are bytes or texts
    such as "3GiB". A system of the same model and options that this user runs on this machine is
    used as it is, unless `own`. One that is started ends with `close`, with the `with` block or
    with this process; with `keep`, such as "10m", it stays so long after its last answer, for the
    next program.

    Where this process is connected to Ray, the system is there, and an LLM can be handed to tasks
    and actors: it is a handle there, and `close` ends the system where it was made.

    `progress`: show bars on standard error; None: at a terminal alone.
    May be used by several threads and event loops at once.
    Errors:  HotcoldError, of one line that says what to do; TypeError for an unknown option
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        mode: str | None = None,
        dtype: str | None = None,
        cpu_memory: int | str | None = None,
        gpu_memory: int | str | None = None,
        threads: int | None = None,
        cpu_actors: int | None = None,
        context_length: int | None = None,
        parallel: int | None = None,
        kv_tokens: int | None = None,
        kv_dtype: str | None = None,
        prefix_cache: int | str | None = None,
        device: str = "auto",
        predictors: str | os.PathLike[str] | None = None,
        thresholds: str | os.PathLike[str] | None = None,
        plan: str | os.PathLike[str] | None = None,
        exchange: str = "arena",
        speculate: str | int = "auto",
        draft: str = "auto",
        pin: str = "auto",
        hosts: Sequence[str] = (),
        keep: float | str | None = None,
        own: bool = False,
        progress: bool | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise _unknown_option(next(iter(unknown)))
        options = SystemOptions.of_keywords(
            mode=mode,
            dtype=dtype,
            cpu_memory=cpu_memory,
            gpu_memory=gpu_memory,
            threads=threads,
            cpu_actors=cpu_actors,
            context_length=context_length,
            parallel=parallel,
            kv_tokens=kv_tokens,
            kv_dtype=kv_dtype,
            prefix_cache=prefix_cache,
            device=device,
            predictors=predictors,
            thresholds=thresholds,
            plan=plan,
            exchange=exchange,
            speculate=str(speculate),
            draft=draft,
            pin=pin,
            hosts=hosts,
        )
        keep_s = seconds_of(keep) if isinstance(keep, str) else float(keep or 0)
        text = None if model is None else os.fspath(model)
        try:
            self._use(_connect(text, options, keep_s, own), progress)
        except HotcoldError as error:
            in_keywords(error)
            raise

    def _use(self, connection: Connection, progress: bool | None) -> None:
        self._in_flight = InFlight(connection)
        self._progress = progress
        self._close = weakref.finalize(self, _end, self._in_flight)

    @classmethod
    def over(cls, connection: Connection, progress: bool | None = None) -> LLM:
        """One of a connection. Internal."""
        made = cls.__new__(cls)
        made._use(connection, progress)
        return made

    def __reduce__(self) -> Any:
        return LLM.over, (self._in_flight.connection, self._progress)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def close(self) -> None:
        """Answer no more, and end the system if this LLM started it; may be repeated.

        Scripts: the last LLM of a system ends it. Notebooks and prompts: the first, as the others
        are what earlier cells left, in `Out` or in the last error's frames.
        """
        if hasattr(sys, "ps1") and self._close.alive and not self._in_flight.is_parents:
            self._in_flight.connection.end_sharing()
        self._close()

    def __repr__(self) -> str:
        state = "" if self._close.alive else ", closed"
        return f"LLM({self.model_path.name!r}{state})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            told = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"an LLM has no {name!r}{told}")

    # --- what it is ------------------------------------------------------------------------------

    @cached_property
    def model_path(self) -> Path:
        """The model's directory or file."""
        return Path(self._config.model_path)

    @property
    def mode(self) -> str:
        """Which neurons are computed."""
        return self._config.mode

    @property
    def context_length(self) -> int:
        """Most tokens of a request, prompt and answer together."""
        return self._config.context_length

    @property
    def default_sampling(self) -> SamplingParams:
        """The model's own sampling, which counts where a request says nothing else."""
        return SamplingParams.of_model(self._inputs.default_sampling)

    @cached_property
    def _config(self) -> Any:
        return self._in_flight.connection.config

    @cached_property
    def _inputs(self) -> Inputs:
        return Inputs(self.model_path, self.context_length)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Errors: PromptError."""
        if not isinstance(text, str):
            raise PromptError(f"{shown(text)} is no text")
        return self._inputs.prompts.encode(text, add_special_tokens)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens by their names. Errors: PromptError."""
        self._inputs.prompts.require_in_vocabulary(ids)
        if self._inputs.prompts.tokenizer is None:
            raise PromptError("this model has no tokenizer, so no text")
        return self._inputs.prompts.tokenizer.decode(ids, skip_special_tokens=False)

    def telemetry(self) -> dict[str, Any]:
        """What the system does now: speed, memory, and by layer which neurons work.

        Neurons are counted from the first call on, until none has come for five seconds. Keys are
        those of the page's panel (docs/api.md). Errors: ServiceError
        """
        return self._in_flight.connection.telemetry()

    # --- text ------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        progress: bool | None = None,
        **unknown: Never,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue a text or token ids, or each of a list of them.

        Of one prompt it returns a RequestOutput or raises; of a list a list, in order, where a
        prompt that failed has an `error`, and the others their answers. `sampling_params` is one
        for all, or a list with one for each. As many prompts run at once as the system lets.
        Ctrl-C ends what runs. Ids may be an array; vLLM's {"prompt": TEXT} and
        {"prompt_token_ids": IDS} are prompts, too.
        Errors:  PromptError, UsageError, ServiceError
        """
        _refuse("generate", unknown, "sampling_params", "progress")
        return self._run(self._inputs.of_prompts(prompts, sampling_params), progress)

    @overload
    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[list[dict[str, Any]]],
        sampling_params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or each of a list of them, by the model's chat template.

        Messages are OpenAI's, `options` those of `ChatOptions`. An answer's calls of tools are its
        `tool_calls`, what the model thought is its `thinking`, and its `message` is what the
        conversation goes on with. Otherwise as `generate`.
        """
        given = self._inputs.of_conversations(messages, sampling_params, options)
        return self._run(given, progress)

    def stream(
        self,
        prompt: Prompt | list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[StreamPiece]:
        """Answer a text, token ids or a conversation piece by piece, as it comes.

        The last piece has the `finish_reason` and the whole `output`. To leave the loop ends the
        answer. `options` are for conversations, as of `chat`.
        Errors:  as `generate`
        """
        try:
            task = self._inputs.of_stream(prompt, sampling_params, options)
            answer = Answer(task, 0)
            for event in self._in_flight.events(task.requests[0]):
                yield answer.add(event)
        except HotcoldError as error:
            in_keywords(error)
            raise

    async def astream(
        self,
        prompt: Prompt | list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[StreamPiece]:
        """As `stream`, for `async for`."""
        try:
            task = await _in_thread(
                lambda: self._inputs.of_stream(prompt, sampling_params, options)
            )
            answer = Answer(task, 0)
            async for event in self._in_flight.async_events(task.requests[0]):
                yield answer.add(event)
        except HotcoldError as error:
            in_keywords(error)
            raise

    async def agenerate(
        self, prompts: Any, sampling_params: Params = None, **unknown: Never
    ) -> Any:
        """As `generate`, for `await`. A task that is cancelled ends what it asked for."""
        _refuse("agenerate", unknown, "sampling_params")
        return await self._arun(lambda: self._inputs.of_prompts(prompts, sampling_params))

    async def achat(
        self, messages: Any, sampling_params: Params = None, **options: Unpack[ChatOptions]
    ) -> Any:
        """As `chat`, for `await`."""
        return await self._arun(
            lambda: self._inputs.of_conversations(messages, sampling_params, options)
        )

    # --- vectors and scores ----------------------------------------------------------------------

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = False,
        progress: bool | None = None,
        **unknown: Never,
    ) -> np.ndarray:
        """A vector of a text (D,), or of each of a list (N, D): the mean of its hidden states
        after the last layer and its norm, as of /v1/embeddings.

        `normalize`: each of length 1, so that products of vectors are cosines.
        Dtypes:  float32
        Errors:  PromptError of the first text that has no vector, ServiceError
        """
        import numpy as np

        _refuse("embed", unknown, "normalize", "progress")
        given = self._inputs.to_read(texts, wants_embedding=True)
        results = self._finished(given, progress)
        found = np.array([_first(one).embedding for one in results], np.float32)
        if not results:
            found = found.reshape(0, self._inputs.prompts.config.hidden_size)
        if normalize:
            found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found[0] if given.is_one else found

    @overload
    def score(  # type: ignore[overload-overlap]  # as above
        self, texts: Prompt, *, progress: bool | None = None
    ) -> ScoreOutput: ...

    @overload
    def score(
        self, texts: Sequence[Prompt], *, progress: bool | None = None
    ) -> list[ScoreOutput]: ...

    def score(
        self, texts: Any, *, progress: bool | None = None, **unknown: Never
    ) -> ScoreOutput | list[ScoreOutput]:
        """How likely the model finds a text or token ids, or each of a list: in nats, by token.

        Errors:  PromptError of the first text that cannot be scored, ServiceError
        """
        _refuse("score", unknown, "progress")
        given = self._inputs.to_read(texts, num_prompt_logprobs=0)
        found = []
        for one in self._finished(given, progress):
            _first(one)
            scored = one.answers[0].prompt_logprobs
            ids, values = [s.token_id for s in scored], [s.logprob for s in scored]
            found.append(ScoreOutput(tuple(ids), tuple(values)))
        return found[0] if given.is_one else found

    # --- running requests ------------------------------------------------------------------------

    def _run(self, given: Given, progress: bool | None) -> Any:
        return _results(self._finished(given, progress), given.is_one)

    def _finished(self, given: Given, progress: bool | None) -> list[Answers]:
        """Run all tasks. Errors: ServiceError, and all of them end."""
        arrived: queue.SimpleQueue[tuple[Answers, int, TokenEvent | BaseException]]
        arrived = queue.SimpleQueue()
        found: list[Answers] = []
        running: set[Answers] = set()
        shown = self._progress if progress is None else progress
        try:
            for task in given.tasks:
                answers = Answers(task)
                found.append(answers)
                if not answers.is_done:
                    running.add(answers)
                for index, request in enumerate(task.requests):
                    self._in_flight.start(request, _putter(arrived, answers, index))
            with progress_bar(given.num_tasks, shown) as show:
                while running:
                    show(given.num_tasks - len(running))
                    for answers, index, event in _all_of(arrived):
                        answers.take(index, event)
                        if answers.is_done:
                            running.discard(answers)
        finally:
            # Those that have not ended.
            self._in_flight.cancel(
                *(one.request_id for answers in found for one in answers.task.requests)
            )
        return found

    async def _arun(self, asked: Callable[[], Given]) -> Any:
        import asyncio

        given = await _in_thread(asked)
        found = [Answers(task) for task in await _in_thread(lambda: list(given.tasks))]
        names = [request.request_id for one in found for request in one.task.requests]

        async def read(answers: Answers, index: int) -> None:
            try:
                async for event in self._in_flight.async_events(answers.task.requests[index]):
                    answers.take(index, event)
            except HotcoldError as problem:
                answers.take(index, problem)
            except asyncio.CancelledError:
                self._in_flight.cancel(*names)
                raise

        async with asyncio.TaskGroup() as group:
            for answers in found:
                for index in range(len(answers.task.requests)):
                    group.create_task(read(answers, index))
        return _results(found, given.is_one)


def _results(found: list[Answers], is_one: bool) -> Any:
    """What `generate` returns. Errors: the one prompt's."""
    results = [one.output() for one in found]
    if is_one and results[0].problem is not None:
        raise results[0].problem
    return results[0] if is_one else results


def _first(answers: Answers) -> Generation:
    """What the first answer ended with. Errors: the prompt's."""
    if answers.problem is not None:
        raise answers.problem
    result = answers.answers[0].result
    assert result is not None
    return result


def _connect(model: str | None, options: SystemOptions, keep_s: float, own: bool) -> Connection:
    """A system that runs already, or a new one. Errors: HotcoldError."""
    from warnings import filterwarnings

    from hotcold.model.files.locate import locate_model

    # Ray and the hub's library import a bar that in a notebook wants widgets, and show none here.
    filterwarnings("ignore", "IProgress not found")
    ray = sys.modules.get("ray")
    is_in_ray = (ray is not None and ray.is_initialized()) or "RAY_ADDRESS" in os.environ
    if keep_s or not is_in_ray:
        import logging

        from hotcold.jobs.running.find import find_system

        say = logging.getLogger("hotcold").info
        found = find_system(model, options, keep_s, own, say, attends=True)
        if found is not None:
            return found
    from hotcold.jobs.running.own import start

    return start(locate_model(model), options)


def _unknown_option(name: str) -> TypeError:
    """With the option that may be meant, by this name in another program or one that is like it."""
    from inspect import signature

    from hotcold.jobs.support.other_names import OTHER_NAMES

    own = list(signature(LLM).parameters)[:-1]
    others = {
        other.lstrip("-").replace("-", "_"): one.keyword
        for one in OPTIONS.values()
        for other in (one.flag, *OTHER_NAMES.get(one.flag, ()))
    }
    return TypeError(unknown_argument("LLM", name, own, others))


def _refuse(method: str, unknown: dict[str, Never], *known: str) -> None:
    """Raise UsageError for an option that a method does not have."""
    for name in unknown:
        others = {"use_tqdm": "progress"} if "progress" in known else {}
        raise UsageError(unknown_argument(method, name, known, others))


def _end(in_flight: InFlight) -> None:
    if not in_flight.is_parents:
        in_flight.close()


def _putter(arrived: Any, answers: Answers, index: int) -> Callable[[Any], None]:
    return lambda event: arrived.put((answers, index, event))


def _all_of(arrived: queue.SimpleQueue[Any]) -> Iterator[Any]:
    """What has come, after a moment's wait for the first."""
    try:
        yield arrived.get(timeout=0.5)
        while True:
            yield arrived.get_nowait()
    except queue.Empty:
        return


async def _in_thread(work: Callable[[], Any]) -> Any:
    """What `work` on texts returns, while the event loop goes on."""
    import asyncio

    return await asyncio.to_thread(work)
