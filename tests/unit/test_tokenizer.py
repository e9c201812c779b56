"""Text to ids and back, piece by piece as tokens come, and chat templates that may be hostile."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from llguidance import LLTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from hotcold.model.errors import ConfigError, HotcoldError, PromptError
from hotcold.model.text.chat_template import MAX_TEMPLATE_BYTES
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.model.text.tokenizer_process import TokenizerProcess
from tests.gguf_files import STRING, small_llama

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    "Hello world, héllo wörld! 你好 🙂🙃",
    "the quick  brown fox\njumps over",
    "naïve café 東京",
] * 5
SPECIAL = ["<s>", "</s>", "<|user|>"]


def byte_level() -> tokenizers.Tokenizer:
    """A tokenizer as GPT-2, OPT and Falcon have: bytes are its letters."""
    return tokenizers.Tokenizer.from_str(_trained())


@functools.cache
def _trained() -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return str(tokenizer.to_str())


def sentencepiece_like() -> tokenizers.Tokenizer:
    """A tokenizer as Llama has: spaces are letters, unknown characters fall back to bytes."""
    vocab = {token: i for i, token in enumerate(["<unk>", *SPECIAL])}
    for token in (
        [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdehlortwxyz") + ["▁hello", "▁wo"]
    ):
        vocab.setdefault(token, len(vocab))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


BACKENDS = {"byte-level": byte_level, "sentencepiece": sentencepiece_like}


def write(path: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"} | config))
    return path


@pytest.fixture(params=list(BACKENDS))
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    found = Tokenizer.from_model(write(tmp_path, BACKENDS[request.param]()))
    assert found is not None
    return found


def test_round_trip_with_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world the end")
    assert ids[0] == tokenizer.token_id("<s>") and len(ids) > 4
    assert tokenizer.decode(ids) == "hello world the end"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != ids[0]
    assert tokenizer.vocab_size > max(ids)
    with pytest.raises(PromptError, match="Unicode"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize("text", ["héllo 你好 🙂 world", " hello  hello", "🙂🙃"])
def test_stream_is_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.stream_decoder()
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert stream.num_chars == len("".join(pieces))
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_after_a_prompt_and_of_half_a_character(tokenizer: Tokenizer) -> None:
    prompt, whole = tokenizer.encode("hello"), tokenizer.encode("hello wo")
    assert whole[: len(prompt)] == prompt
    stream = tokenizer.stream_decoder(prompt)
    said = "".join(stream.push(token) for token in whole[len(prompt) :])
    assert said + stream.finish() == " wo"
    ids = tokenizer.encode("a🙂", add_special_tokens=False)
    stream = tokenizer.stream_decoder(ids[:-1])  # the context starts or ends inside a character
    assert not any("\ufffd" in stream.push(token) for token in ids[:-1])
    assert stream.finish().startswith("\ufffd")
    assert stream.finish() == ""


def test_few_ids_are_decoded_for_each(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens that show nothing, and of bytes that never end a character, too."""
    plain, most = tokenizer.decode, [0]

    def decode(ids: list[int]) -> str:
        most.append(len(ids))
        return plain(ids)

    begun = tokenizer.encode("🙂", add_special_tokens=False)[-3:-1]
    end = tokenizer.encode(" hello", add_special_tokens=False)
    for silent in ([1], [tokenizer.vocab_size], [1, *begun, 2], begun[-1:], begun):
        ids = silent * 500 + end
        monkeypatch.setattr(tokenizer, "decode", decode)
        stream = tokenizer.stream_decoder(end)
        pieces = [stream.push(one) for one in ids] + [stream.finish()]
        monkeypatch.undo()
        assert "".join(pieces) == plain(end + ids)[len(plain(end)) :]
    assert max(most) < 30


@pytest.mark.parametrize("name", BACKENDS)
def test_bytes_of_tokens_equal_llguidances(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_model(write(tmp_path, BACKENDS[name]()))
    assert tokenizer is not None
    table = LLTokenizer(tokenizer.to_json())
    found = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    for token_id, own in enumerate(found):
        if own != b"\xff" and not table.is_special_token(token_id):  # it keeps this for itself
            assert own == table.decode_bytes([token_id])
    assert found[tokenizer.token_id("<s>") or 0] == b"<s>" and b"\xff" in found
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_long_texts_have_the_same_ids_in_another_process(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text, other = " ".join(TEXTS) * 500, TokenizerProcess(tmp_path)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.no_truncation()
    plain.no_padding()
    for adds in (True, False):
        expected = plain.encode(text, add_special_tokens=adds).ids
        assert other.encode(text, adds) == tokenizer.encode(text, adds) == expected
    assert tokenizer.decode(expected) == plain.decode(expected) and len(expected) > 5000
    for encode in (other.encode, tokenizer.encode):
        with pytest.raises(PromptError, match="Unicode"):
            encode("\ud800" * 2000, True)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    assert Tokenizer.from_model(tmp_path) is None
    for content in (b"", b"{}", b"\xff", b'{"version": "1.0", "model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json") as caught:
            Tokenizer.from_model(tmp_path)
        assert "\n" not in str(caught.value)


CHATML = """{{ bos_token }}{% for message in messages %}
    {%- if message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('only user\\nand assistant') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}<|user|>{{ message.content | trim }}{% endif %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ {"é": messages | length} | tojson }}{{ strftime_now("%%") }}
{% endif %}"""
MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yes"}]


def chat(path: Path, template: str | list[dict[str, str]] | None) -> Tokenizer:
    """A tokenizer with the template in tokenizer_config.json."""
    config = {} if template is None else {"chat_template": template}
    found = Tokenizer.from_model(write(path, byte_level(), **config))
    assert found is not None
    return found


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals_transformers(add_generation_prompt: bool, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = chat(tmp_path, CHATML)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert ours.render_chat(MESSAGES, add_generation_prompt) == expected


def test_where_templates_stand(tmp_path: Path) -> None:
    assert not chat(tmp_path, None).has_chat_template
    with pytest.raises(PromptError, match="no chat template"):
        chat(tmp_path, None).render_chat(MESSAGES)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert chat(tmp_path, named).render_chat(MESSAGES) == "plain"
    assert chat(tmp_path, named[:1]).render_chat(MESSAGES) == "tools"
    with pytest.raises(ConfigError, match="default"):
        chat(tmp_path, [named[0], {"name": "rag", "template": ""}])
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert chat(tmp_path, "config").render_chat(MESSAGES) == "file <s>"


HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{{ [1] * 10000000000 }}",
    "{{ messages.clear() }}",
    "{{ 1 / 0 }}",
    "{% include '/etc/passwd' %}",
]
NESTED = [
    "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    "{{ " + "(" * 1000 + "1" + ")" * 1000 + " }}",
    "{{ " + "1 + " * 3000 + "1 }}",
]


@pytest.mark.parametrize("template", [*HOSTILE, *NESTED])
def test_hostile_templates(template: str, tmp_path: Path) -> None:
    told = "bad chat template: it is nested too deeply" if template in NESTED else "template"
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: .*{told}") as caught:
        print(chat(tmp_path, template).render_chat(MESSAGES))
    assert "\n" not in str(caught.value)


# Each takes memory or time without end, most of it within one operation of C.
GROWING = [
    "{{ '%999999999d' % 1 }}",
    "{% set n = namespace(a=9) %}{% for i in range(30) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
    "{{ n.a }}",
    "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
    "{% for a in range(99999) %}{% set b = range(99999) | sum %}{% endfor %}",
]


@pytest.mark.parametrize("template", GROWING)
def test_templates_that_eat_memory_or_time(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotcold.model.text.chat_template.RENDER_TIMEOUT_S", 1)
    monkeypatch.setattr("hotcold.model.text.subprocess_worker.START_S", 1)
    tokenizer = chat(tmp_path, template)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=r"too much memory|characters|runs longer than 1 s"):
        tokenizer.render_chat(MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


def test_other_threads_run_while_a_template_does(tmp_path: Path) -> None:
    """One operation of C keeps all other threads of its process waiting until its end."""
    tokenizer = chat(tmp_path, "{{ (range(99999) | join('a' * 80)) | replace('a', 'bc') | length }}"
                     "{{ messages[0].content.format(1) | length }}")  # fmt: skip
    told = [{"role": "user", "content": ":" * 40_000}]
    tokenizer.check_template()
    num_digits = sum(len(str(number)) for number in range(99_999))
    worst: list[float] = []
    while len(worst) < 5 and min(worst, default=2) >= 2:  # the machine may be busy with others
        gaps, answers = [0.0], list[str]()
        rendering = threading.Thread(
            target=lambda to=answers: to.append(tokenizer.render_chat(told))
        )
        rendering.start()
        while rendering.is_alive():
            began = time.monotonic()
            time.sleep(0.001)
            gaps.append(time.monotonic() - began)
        assert answers == [f"{num_digits + 2 * 80 * 99_998}40000"]
        worst.append(max(gaps))
    assert min(worst) < 2


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "GGUF"])
def test_templates_that_are_too_long(place: str, tmp_path: Path) -> None:
    longest, files = "é" * (MAX_TEMPLATE_BYTES // 2), write(tmp_path, byte_level())

    def read(template: str) -> Tokenizer | None:
        if place == "GGUF":
            made = small_llama().with_key("tokenizer.chat_template", STRING, template)
            (tmp_path / "a.gguf").write_bytes(made.content())
            return Tokenizer.from_model(tmp_path / "a.gguf")
        if place == "chat_template.jinja":
            (files / place).write_text(template)
        else:
            write(tmp_path, byte_level(), chat_template=template)
        return Tokenizer.from_model(files)

    found = read(longest)
    assert found is not None and found.render_chat(MESSAGES) == longest
    with pytest.raises(ConfigError, match=f"larger than {MAX_TEMPLATE_BYTES} bytes"):
        read(longest + "a")


def test_a_process_that_dies_is_one_line_and_the_next_rendering_works(tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, "{% for i in range(messages[0].content | int) %}"
                     "{% set b = range(99999) | sum %}{% endfor %}done")  # fmt: skip
    before = own_children()
    assert tokenizer.render_chat([{"role": "user", "content": "1"}]) == "done"
    (process,) = own_children() - before
    failed: list[str] = []
    request_state = threading.Thread(target=ask_in_vain, args=[tokenizer, failed])
    used = process.cpu_times().user
    request_state.start()
    while process.cpu_times().user < used + 0.1:  # it renders
        time.sleep(0.01)
    process.kill()
    request_state.join()
    assert "\n" not in failed[0]
    assert "chat template failed: ended the process that ran it (status -9); try" in failed[0]
    assert tokenizer.render_chat([{"role": "user", "content": "1"}]) == "done"
    (process,) = own_children() - before
    del tokenizer
    gc.collect()
    process.wait(60)  # it ends with what it belongs to


def ask_in_vain(tokenizer: Tokenizer, failed: list[str]) -> None:
    try:
        tokenizer.render_chat([{"role": "user", "content": "99999"}])
    except ConfigError as problem:
        failed.append(str(problem))


def own_children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def test_a_process_does_not_outlive_the_one_that_asks(tmp_path: Path) -> None:
    """Killed while it waits, or while it renders: then it ends when its time is over."""
    program = (
        "import os, sys, threading, time, psutil\n"
        "from hotcold.model.text import chat_template, subprocess_worker\n"
        "chat_template.RENDER_TIMEOUT_S = subprocess_worker.START_S = 1\n"
        "found = chat_template.ChatTemplate(sys.argv[1], 'a', {})\n"
        "found.check()\n"
        "child = psutil.Process().children()[0]\n"
        "threading.Thread(target=found.render, args=[[]], daemon=True).start()\n"
        "while child.cpu_times().user < 0.5: time.sleep(0.01)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    endless = "{% for a in range(99999) %}{% set b = range(99999) | sum %}{% endfor %}"
    done = subprocess.run([sys.executable, "-c", program, endless], cwd=ROOT, capture_output=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(120)


def test_variables_reach_the_template(tmp_path: Path) -> None:
    template = "{{ enable_thinking }} {{ a.b | length }} {{ add_generation_prompt }}{{ tools }}"
    tokenizer = chat(tmp_path, template)
    variables = {"enable_thinking": False, "a": {"b": [1, 2]}, "tools": 1, "messages": 2}
    assert tokenizer.render_chat(MESSAGES, variables=variables) == "False 2 TrueNone"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'go<think>\n' }}", "go<think>\n</think>\n\n"),  # DeepSeek-R1, MiniMax M2, Step 3.5
        ("go{# <think> #}", "go<think>\n\n</think>\n\n"),  # Kimi K2 Thinking, LFM 2.5
        ("go<think>{% if enable_thinking is false %}</think>{% endif %}", "go<think></think>"),
        ("{{ 'off' if enable_thinking is false }}go{# <think> #}", "offgo"),  # told in words
        ("go", "go"),
    ],
)
def test_thoughts_are_left_out(template: str, expected: str, tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, template)
    off = {"enable_thinking": False}
    assert tokenizer.render_chat(MESSAGES, variables=off) == expected
    assert "</think>" not in tokenizer.render_chat(MESSAGES, variables={"enable_thinking": True})


def test_long_conversations_and_refused_messages(tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, CHATML.replace("loop.index > 9", "false"))
    messages = [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "x"}]
    assert len(tokenizer.render_chat(messages * 2000)) > 1_000_000
    with pytest.raises(PromptError, match="only user") as caught:
        tokenizer.render_chat([{"role": "robot", "content": "x"}])
    assert "\n" not in str(caught.value)
    with pytest.raises(HotcoldError):
        tokenizer.render_chat([{"role": "user", "content": object()}])
