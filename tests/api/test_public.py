"""What is public: names, options, parameters, and that none of it costs anything before use."""

from __future__ import annotations

import inspect
import io
import pickle
import subprocess
import sys
import threading
import warnings
from dataclasses import fields
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from hotcold import LLM, SamplingParams, UsageError
from hotcold.actors.protocol.messages import COMPILING_LONGER, GenerateRequest
from hotcold.actors.protocol.options import SystemOptions
from hotcold.inputs import Inputs
from hotcold.jobs.running import in_flight as in_flight_module
from hotcold.jobs.support.options import system_options
from hotcold.model import sampling
from hotcold.model.files.locate import DEMO_DIRECTORY

DEFAULTS = sampling.SamplingParams(temperature=0.3, top_k=7)
HEAVY = {"torch", "numba", "ray", "numpy", "click", "rich", "asyncio", "tokenizers", "hotcold.llm"}


def test_imports_are_light() -> None:
    code = (
        "import sys, hotcold\nfirst = sorted(sys.modules)\npath = list(sys.path)\n"
        "from hotcold import LLM, SamplingParams\n"
        "assert sys.path == path\nprint(first)\nprint(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, then = (set(eval(line)) for line in done.stdout.splitlines())
    assert not first & HEAVY
    assert not then & (HEAVY - {"hotcold.llm"})


def test_options_are_those_of_the_command() -> None:
    @system_options
    def command() -> None: ...

    options = {one.opts[0].lstrip("-").replace("-", "_") for one in command.__click_params__}  # type: ignore[attr-defined]
    assert len(options) == len(fields(SystemOptions))
    given = set(inspect.signature(LLM).parameters)
    assert {"context_length" if name == "context" else name for name in options} <= given


def test_only_what_is_given_changes_a_models_own_sampling() -> None:
    assert SamplingParams().of_requests(DEFAULTS) == [DEFAULTS]
    (found,) = SamplingParams(top_k=3, stop="end", logit_bias={5: -1.0}).of_requests(DEFAULTS)
    assert (found.temperature, found.top_k) == (0.3, 3)
    assert (found.stop, found.biases) == (("end",), ((5, -1.0),))
    assert [one.seed for one in SamplingParams(n=2, seed=4).of_requests(DEFAULTS)] == [4, 5]
    assert type(found) is sampling.SamplingParams


def test_params_are_as_they_were_given() -> None:
    stop, biases = ["end"], {5: -1.0}
    params = SamplingParams(stop=stop, logit_bias=biases)
    stop.append("")
    biases[5] = 1000.0
    for one in (params, params.changed()):
        (found,) = one.of_requests(DEFAULTS)
        assert (found.stop, found.biases) == (("end",), ((5, -1.0),))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("context_lenght", "did you mean context_length?"),
        ("n_gpu_layers", "did you mean gpu_memory?"),
        ("zzz", "known are model, mode, dtype, "),
        ("temperature", "give SamplingParams(temperature=...)"),
        ("tensor_parallel_size", "leave it out"),
    ],
)
def test_an_unknown_option_is_told(option: str, told: str) -> None:
    options: Any = {option: 3, "threads": 2}
    with pytest.raises(TypeError) as error:
        LLM("nowhere", **options)
    assert str(error.value).startswith(f"LLM has no option {option!r}") and told in str(error.value)


@pytest.mark.parametrize(
    ("method", "option", "told"),
    [
        ("generate", "max_tokens", "give SamplingParams(max_tokens=...)"),
        ("generate", "guided_decoding", "give one of json_schema, regex"),
        ("generate", "use_tqdm", "did you mean progress?"),
        ("chat", "chat_template_kwargs", "did you mean template_variables?"),
        ("score", "zzz", "known are progress"),
    ],
)
def test_an_unknown_option_of_a_method_is_told(method: str, option: str, told: str) -> None:
    system: Any = SimpleNamespace(max_batch=1, close=lambda: None)
    llm, options = LLM.over(system), {option: 3}
    llm.__dict__["_inputs"] = Inputs(DEMO_DIRECTORY, 64)
    with pytest.raises(UsageError) as error:
        getattr(llm, method)([{"role": "user", "content": "a"}], **options)
    assert str(error.value).startswith(f"{method} has no option {option!r}; {told}")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_first_answer_waits_for_is_told_at_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    asked, told = threading.Event(), Terminal()
    delivers: list[Any] = []

    def look() -> bool:
        asked.set()
        return True

    connection: Any = SimpleNamespace(
        max_batch=9, is_compiling=look, submit=lambda request, take: delivers.append(take)
    )
    monkeypatch.setattr(in_flight_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(sys, "stderr", told)
    in_flight = in_flight_module.InFlight(connection)
    for _ in range(2):
        in_flight.start(GenerateRequest(DEFAULTS, prompt="a"), lambda event: None)
    assert not is_terminal or asked.wait(60)
    for take in delivers:
        take(UsageError("over"))
    for thread in threading.enumerate():
        if thread.name == "compiling":
            thread.join(60)
    assert told.getvalue() == f"{COMPILING_LONGER}\n" * is_terminal


def test_a_notebook_without_widgets_is_not_told_of_them() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(UsageError):
            LLM("/nowhere/at/all")
        warnings.warn(import_module("tqdm.notebook").WARN_NOIPYW, stacklevel=1)
    assert not told


def test_what_vllm_has_besides_is_told() -> None:
    llm = LLM.__new__(LLM)
    with pytest.raises(AttributeError, match=r"'get_tokenizer'; use llm.tokenize and"):
        llm.get_tokenizer()  # type: ignore[attr-defined]
    assert not hasattr(llm, "zzz")


def test_values_as_other_programs_have_them() -> None:
    """vLLM's -1 for all; NumPy's numbers."""
    given: dict[str, Any] = {"seed": np.int64(3), "temperature": np.float32(0.5)}
    params = SamplingParams(top_k=-1, **given)
    assert params == SamplingParams(top_k=0, seed=3, temperature=0.5)
    assert [type(one) for one in (params.seed, params.temperature)] == [int, float]


def test_a_pydantic_class_is_a_schema() -> None:
    class Place(BaseModel):
        name: str
        size: int

    shape = SamplingParams(json_schema=Place).shape()
    assert shape == SamplingParams(json_schema=Place.model_json_schema()).shape() is not None


def test_params_are_copied_and_shown() -> None:
    params = SamplingParams(temperature=0.5, seed=3)
    assert repr(params) == "SamplingParams(temperature=0.5, seed=3)"
    sent = pickle.loads(pickle.dumps(params))
    assert sent == params and sent.of_requests(DEFAULTS) == params.of_requests(DEFAULTS)
    assert repr(params.changed(seed=4)) == "SamplingParams(temperature=0.5, seed=4)"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temprature": 1}, r"no option 'temprature'; did you mean temperature\?"),
        ({"max_new_tokens": 1}, r"no option 'max_new_tokens'; did you mean max_tokens\?"),
        ({"structured_outputs": 1}, "did you mean one of json_schema, regex, choice, grammar"),
        ({"zzz": 1}, "no option 'zzz'; known are max_tokens"),
        ({"top_k": -2}, "top_k is -2"),
        ({"seed": np.int64(-1)}, "seed is -1"),
        ({"n": 0}, "n is 0"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice were both given"),
        ({"cache": None}, "cache is None; give True or False"),
        ({"regex": 5}, "regex is 5; give a text"),
        ({"choice": "abc"}, "choice is 'abc'; give a list of texts"),
        ({"choice": ["a", 5]}, r"choice is \['a', 5\]; give a list of texts"),
    ],
)
def test_params_that_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        SamplingParams(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="options by name"):
        SamplingParams(3)
