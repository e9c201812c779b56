"""What may be typed in a conversation, what is asked then, and which files it touches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from hotcold.actors.protocol.messages import GenerateRequest, TokenEvent
from hotcold.jobs.chat.conversation import Conversation
from hotcold.jobs.chat.files import (
    load_conversation,
    mentioned,
    read_attachment,
    save_conversation,
)
from hotcold.jobs.chat.screen import Screen
from hotcold.jobs.chat.session import HELP, Session, Settings
from hotcold.model.errors import PromptError, UsageError
from tests.stand_in_chat import StandIn, conversation


class Script(Screen):
    """A screen at which lines are typed that a test has written."""

    is_terminal = can_edit = True

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)
        self.beginnings: list[str] = []
        self.told: list[str] = []
        self.answers: list[str] = []

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, beginning: str) -> str:
        self.beginnings.append(beginning)
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None

    def say(self, text: str) -> None:
        self.told.append(text)

    @contextmanager
    def answer(self) -> Iterator[Callable[[TokenEvent], None]]:
        events: list[TokenEvent] = []
        yield events.append
        self.answers.append("".join(event.text for event in events))


def typed(*lines: str, **settings: bool) -> tuple[Script, Conversation, StandIn]:
    """The lines, and what came of them; the help at the start is left out."""
    screen, running = Script(*lines), StandIn()
    talk = conversation(running)
    Session(talk, screen, Settings(**settings)).run()
    assert screen.told.pop(0) == HELP
    return screen, talk, running


def asked(running: StandIn) -> list[list[str]]:
    return [[one["content"] for one in request.messages or []] for request in running.requests]


def test_the_last_question_is_asked_again_or_otherwise() -> None:
    screen, talk, running = typed("a", "b", "/regen", "/edit c", "/edit", "d", "/edit", "/stats")
    before = ["a", "echo of a"]
    assert asked(running)[1:] == [[*before, one] for one in "bbcd"]
    assert screen.beginnings[4:] == ["", "c", "", "d", ""]
    assert len(talk.messages) == 4  # the last edit was given up
    screen, _, running = typed("/regen", "/edit x")
    assert screen.told == ["nothing has been asked yet"] * 2 and running.requests == []


def test_what_the_model_is_told_first() -> None:
    screen, _, running = typed("/system Be brief.", "a", '/set system "Be long."', "b",
                               '/system ""', "c")  # fmt: skip
    told = [(request.messages or [{}])[0] for request in running.requests]
    assert [one["content"] for one in told] == ["Be brief.", "Be long.", "a"]
    assert screen.told == [
        "system prompt: Be brief.", "system prompt: Be long.", "there is no system prompt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temperature 0.5", "temperature is 0.5"),
        ("/set stop none", "stop is none"),
        ("/set logit_bias 5=-1.5 7=2", "logit_bias is 5=-1.5 7=2"),
        ("/set logit_bias 5", "'5' is no token id with a number; write it like 1234=-5"),
        ("/set temperature", "temperature is to be what? Write it like /set temperature 0.8"),
        ("/set temperature hot", "temperature is a number, not 'hot'"),
        ("/set stop 'a", '"\'a": a quotation mark is missing'),
        ("/set temprature 0.2", "'temprature' cannot be set; did you mean temperature?"),
        ("/set nothing", "'nothing' cannot be set; max_tokens, temperature, "),
        ("/show info", "model words\nmode exact on cpu\ncontext 1,000 tokens"),
        ("/regn", "there is no /regn; did you mean /regen? /help lists what there is"),
        ("/\x1b[0m", "there is no /\\x1b[0m; "),
        ("/file /nowhere", "/nowhere cannot be read: No such file or directory"),
        ("/file /", "/ cannot be read: Is a directory"),
        ("/file ~nobody-of-that-name/x", "there is no '~nobody-of-that-name/x'"),
        ("/load /dev/null", "/dev/null is no file"),
        ("too much", "the prompt has 1001 tokens, the context holds 1000"),
    ],
)
def test_what_is_told(line: str, told: str) -> None:
    screen, talk, _ = typed(line)
    (found,) = screen.told
    assert found.startswith(told)
    assert talk.messages == []


def test_parameters_are_those_of_the_next_request() -> None:
    """Penalties count as on the command line."""
    _, _, running = typed(
        "/set num_predict 9", "/set stop 'a b'", "/set presence_penalty 1", "a",
        "/set repeat_last_n 9", "/set temperature 0", "b",
        "/set repeat_last_n none", "/set repeat_penalty 1.1", "c",
    )  # fmt: skip
    asked_for = [request.sampling for request in running.requests]
    assert [(one.max_tokens, one.stop) for one in asked_for] == [(9, ("a b",))] * 3
    assert [one.temperature for one in asked_for] == [0.8, 0.0, 0.0]
    assert [(one.repeat_last_n, one.penalize_prompt) for one in asked_for] == [
        (-1, False), (9, True), (64, True),
    ]  # fmt: skip


def test_an_answer_that_was_cut_says_so() -> None:
    screen, _, _ = typed("a", "cut", "full")
    assert screen.told == [
        "the answer was cut at 3 tokens; /continue lets it go on, /set max_tokens none lets "
        "answers be longer",
        "the answer was cut: the context of 1,000 tokens is full; /clear starts anew; this model "
        "allows no larger one",
    ]


def test_a_cut_answer_goes_on() -> None:
    """In its own message; what is asked anew is still the question."""
    screen, talk, running = typed("a", "cut", "/continue", "/continue", "b", "/regen")
    first = ["a", "echo of a", "cut"]
    texts = [*first, "echo of cut"], [*first, "echo of cutecho of echo of cut"]
    assert asked(running)[2:4] == list(texts)
    variables = [request.template_variables for request in running.requests]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert variables == [None, None, going_on, going_on, None, None]
    assert [one["role"] for one in running.requests[3].messages or []][-2:] == ["user", "assistant"]
    assert screen.answers[2] == "echo of echo of cut"
    assert asked(running)[4][-1] == asked(running)[5][-1] == "b"
    assert talk.counts.num_answers == 4 and len(talk.messages) == 6
    screen, _, running = typed("/continue")
    assert screen.told == ["nothing has been asked yet"] and running.requests == []


def test_an_answer_that_cannot_go_on_stays_as_it_is() -> None:
    class Refuses(StandIn):
        def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
            if request.template_variables:
                raise PromptError("the chat template changes it")
            yield from super().generate(request)

    screen, talk = Script("a", "/continue"), conversation(Refuses())
    Session(talk, screen, Settings()).run()
    assert screen.told[1:] == ["the chat template changes it; /clear starts anew"]
    assert talk.messages[-1]["content"] == "echo of a"


def test_figures() -> None:
    screen, talk, _ = typed("abcdefg", "/stats", "/set verbose", "b")
    assert talk.status == "words · exact on cpu · 12 of 1,000 tokens (1%) · 5.0 tokens/s"
    status, answers, last, step = screen.told[0].split("\n")
    assert status.startswith("words · exact on cpu · 13 of 1,000 tokens (1%) · 10.0 tokens/s")
    assert answers.startswith("1 answer in ") and answers.endswith("10 prompt tokens, 3 new ones")
    assert last.startswith("[3 tokens, stop; prefill 100.0 tokens/s, decode 10.0 tokens/s, ")
    assert step == "a token takes 2.00 ms: attention 0.50, ffn 1.50"
    assert screen.told[-1].startswith("[2 tokens, stop; ")


def test_the_context_that_is_taken_counts_the_prompt_from_the_first_token(tmp_path: Path) -> None:
    running, path = StandIn(), tmp_path / "talk.json"
    talk = conversation(running)

    def used() -> str:
        return talk.status.split(" · ")[2]

    def ask(question: str, num_events: int) -> list[str]:
        """What is told at each event; after so many the answer is cancelled."""
        name, seen = talk.begin(), list[str]()

        def show(event: TokenEvent) -> None:
            seen.append(used())
            if len(seen) == num_events:
                running.cancel(name)

        talk.ask(question, show)
        return seen

    counted = [f"{number} of 1,000 tokens (1%)" for number in (11, 12, 13)]
    assert ask("abcd", 4) == [*counted, counted[-1]] and used() == counted[-1]
    save_conversation(path, "", talk.messages, "words")
    assert ask("endless", 2) == counted[:2] and used() == counted[1]

    Session(talk, Script(f"/load {path}"), Settings()).run()
    assert used() == "? of 1,000 tokens"  # nothing has counted it yet
    assert ask("abcd", 4)[0] == counted[0] and used() == counted[-1]

    talk.clear()
    assert used() == "0 of 1,000 tokens (0%)"


def test_files_that_a_question_names_go_with_it(tmp_path: Path) -> None:
    note, other = tmp_path / "note.txt", tmp_path / "a b.py"
    note.write_text("of the file\n")
    other.write_text("```\nfenced\n```\n")
    question = f'what is @{note}, @"{other}", @dataclass and me@example.org?'
    assert mentioned(question) == [note, other]
    screen, talk, running = typed(question, "b", "/edit", "c")
    assert screen.told == [f"{note} goes with it", f"{other} goes with it"]
    first = f"{question}\n\nnote.txt:\n```\nof the file\n```"
    first += "\n\na b.py:\n````\n```\nfenced\n```\n````"
    assert asked(running)[0] == [first]
    assert asked(running)[2][2] == "c"
    _, talk, running = typed(f"@{note}", "/regen", f"/edit b @{note}", "/edit", "c")
    note_of = "\n\nnote.txt:\n```\nof the file\n```"
    assert asked(running) == [
        [f"@{note}{note_of}"], [f"@{note}{note_of}"], [f"b @{note}{note_of}"], ["c"],
    ]  # fmt: skip
    _, talk, running = typed(f"/file {note}", "a", "/edit", "c", "/regen", "b")
    assert asked(running)[0] == ["a\n\nnote.txt:\n```\nof the file\n```"]
    assert asked(running)[1:3] == [["c\n\nnote.txt:\n```\nof the file\n```"]] * 2
    assert talk.last_question == "b" and asked(running)[3][2] == "b"


def test_a_loaded_question_names_no_files(tmp_path: Path) -> None:
    """Its text may be a file's, which nobody typed."""
    note, saved = tmp_path / "note.txt", tmp_path / "saved.json"
    note.write_text(f"see @{note} and @./gone.md\n")
    typed(f"a @{note}", f"/save {saved}")
    screen, _, running = typed(f"/load {saved}", "/regen")
    assert len(screen.told) == 1 and asked(running) == [[f"a @{note}\n\n{read_attachment(note)}"]]


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("what is in @nofile.txt?", "nofile.txt cannot be read: No such file or directory"),
        ('what is in @"no file of mine.md"', "no file of mine.md cannot be read: No such file"),
        ("what is in @~/nowhere-at-all/x.py!", "x.py cannot be read: No such file or directory"),
        ("what is in @folder, please", "folder cannot be read: Is a directory"),
        ("what is in @none.md", "none.md is no text"),
        ("what is in @latin.txt", "latin.txt is no text in UTF-8"),
        ("what is in @large.txt", "over 1 MiB"),
        ("what is in @./pipe", "pipe is no file"),
        ("what is in @good.txt and @bad.txt", "bad.txt cannot be read: No such file or directory"),
        ("what is npm install @angular/core, @types/node or @and/or?", ""),
        ('@app.route("/hello") and @GetMapping("/users/{id}")', ""),
        ("thanks to @someone, me@example.org/x and @...", ""),
        ('NSString *s = @"hello";', ""),
        (f"@{'a' * 5000}", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_told_and_nothing_is_asked(
    question: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is a word is asked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "none.md").write_bytes(b"\0")
    (tmp_path / "latin.txt").write_bytes(b"\xff")
    (tmp_path / "large.txt").write_bytes(b"a" * ((1 << 20) + 1))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "good.txt").write_text("good")
    screen, talk, running = typed(question)
    if told:
        (line,) = screen.told
        assert told in line and line.endswith("; nothing was asked (without its @ it is a word)")
        assert running.requests == [] and talk.messages == []
    else:
        assert screen.told == [] and asked(running) == [[question]]


def test_a_program_that_types_touches_no_file(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("secret")
    lines = (f"a @{note}", f"/file {note}", f"/save {tmp_path / 'x'}", f"/load {note}")
    screen, _, running = typed(*lines, can_use_files=False)
    assert asked(running) == [[f"a @{note}"]]
    assert screen.told == ["files are for conversations at a terminal"] * 3
    assert os.listdir(tmp_path) == ["note.txt"]


def test_a_saved_conversation_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    screen, _, _ = typed("/system S", "a", f"/save {path}", "b", f"/save {path}")
    assert screen.told[-1] == f"{path} holds 4 messages"
    assert path.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["talk.json"]
    screen, talk, running = typed("x", f"/load {path}", "/edit", "c")
    assert screen.told == [f"4 messages of {path}"] and screen.beginnings[3] == "b"
    assert asked(running)[1] == ["S", "a", "echo of a", "c"]
    assert talk.system_prompt == "S"
    (tmp_path / "note").write_text("a note")  # for a question of the conversation before
    _, _, running = typed(f"/file {tmp_path / 'note'}", f"/load {path}", "d")
    assert asked(running)[0][-1] == "d"


def test_saving_replaces_nothing_else(tmp_path: Path) -> None:
    path, target = tmp_path / "x", tmp_path / "target"
    path.write_text("precious")
    target.write_text("precious")
    (tmp_path / "link").symlink_to(target)
    for name in ("x", "link"):
        screen, _, _ = typed("a", f"/save {tmp_path / name}")
        assert screen.told == [
            f"{tmp_path / name} is there and no saved conversation; name another"
        ]
    assert path.read_text() == target.read_text() == "precious"
    screen, _, _ = typed(f"/save {tmp_path / 'no' / 'x'}")
    assert screen.told == [f"{tmp_path / 'no' / 'x'} cannot be written: No such file or directory"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[" * 100_000, "is no saved conversation"),
        ('{"messages": []}', "is no saved conversation"),
        ([{"role": "tool", "content": ""}], "is no message"),
        ([{"role": "user", "content": 1}], "is no message"),
        ([{"role": "assistant", "content": ""}], "not in turn"),
        ([{"role": "user", "content": ""}], "has no answer"),
    ],
)
def test_what_is_no_conversation_is_not_loaded(tmp_path: Path, content: object, told: str) -> None:
    path = tmp_path / "x"
    if isinstance(content, list):
        content = json.dumps({"kind": "hotcold conversation", "messages": content})
    path.write_text(str(content))
    with pytest.raises(UsageError, match=told):
        load_conversation(path)
