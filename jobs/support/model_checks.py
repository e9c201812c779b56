"""What `hotcold doctor` says of a model's files, each in a Finding, from headers alone.

ok: what is read; note: what is left out, or may change an answer; problem: why it does not load, or
no conversation is possible.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hotcold.actors.setup.preflight import read_model
from hotcold.jobs.support.doctor_checks import Finding
from hotcold.model.config.build import config_values, read_config
from hotcold.model.config.gguf_config import architecture_of
from hotcold.model.config.json_reader import noting_keys
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError, shown
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.files.gguf_weights import without_effect
from hotcold.model.gguf.file import open_gguf
from hotcold.model.gguf.file_names import is_gguf
from hotcold.model.sampling import SamplingParams, eos_ids, suppressed_ids
from hotcold.model.text.end_tokens import END_TOKENS
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.model.weights.check import check_tensors, why_no_drafts
from hotcold.model.weights.draft_layer import has_draft_layer

REFUSED = "refused"  # the subject of why it does not load
_IF_NEEDED = "answers differ if the model needs them"
_MOST_NAMES = 6  # of a list that is told in a line
_BY_LAYER = ("qkv", "down")  # matrices whose formats may differ between layers
# By how their names begin: what tensors that are not read are of.
_PARTS = {
    "the part that sees": ("v.", "mm.", "visual.", "vision", "model.visual", "model.vision",
                           "multi_modal_projector", "model.multi_modal_projector",
                           "model.embed_vision", "model.vision_tower"),
    "the part that hears": ("a.", "audio", "model.audio", "model.embed_audio"),
    "the part that guesses tokens ahead (MTP)": ("mtp.", "model.mtp", "nextn."),
}  # fmt: skip
_LAYER = re.compile(r"(?:blk|layers)\.(\d+)\.")
# Keys of a GGUF file that change nothing where nothing asks for them: the converter writes the
# cache's sizes beside those of latent attention, the length of a shared FFN, which tensors tell,
# and the numbers of Granite 4's recurrent layers for models without any.
_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout", "nextn_predict_layers", "attention.causal",
                   "pooling_type", "n_deepstack_layers", "attention.key_length",
                   "attention.value_length", "expert_shared_feed_forward_length",
                   "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size",
                   "ssm.time_step_rank")  # fmt: skip
# What a key of config.json is about that may change an answer.
_MATTERS = re.compile(
    r"rope|scal|softcap|window|norm|bias|router|expert|multiplier|temperature|_mult|rotary|theta"
)
_MATTERS_NOT = re.compile(
    r"^_|^vision|^audio|initializer|_loss|dropout|layer_?norm_?eps|_token_id|_interval$|_per_tok$"
)
# A text of a chat template that is meant as one token.
_SPECIAL = re.compile(
    r"<\|[^\s|<>]{1,60}\|?>|<[^\s|<>]{1,60}\|>|<｜[^\s｜<>]{1,60}｜>|<(?:start|end)_of_\w{1,20}>"
    r"|\[[A-Z_]{1,20}\](?=\Z)|</?s>|<[be]os>"
)
_SAID = "Forty-two."
_CONVERSATION = [
    {"role": "user", "content": "What is six times seven?"},
    {"role": "assistant", "content": _SAID},
    {"role": "user", "content": "Why?"},
]


def check_files(path: Path) -> list[Finding]:
    """What is read of a model's files, what is not, and what is refused.

    Errors:  CheckpointError for a GGUF file whose header is damaged
    """
    if is_gguf(path):
        open_gguf(path)
    parts = (_family, _formats, _tensors, _unread_keys, _text)
    found: dict[str, Finding] = {}
    for part in parts:
        for finding in _told(part(path)):
            found.setdefault(finding.text, finding)  # several parts fail by one reason
    return list(found.values())


def _told(findings: Iterator[Finding]) -> Iterator[Finding]:
    try:
        yield from findings
    except HotcoldError as problem:
        yield Finding("problem", REFUSED, str(problem))


def _family(path: Path) -> Iterator[Finding]:
    config = read_config(path)
    named = ""
    if is_gguf(path):
        model = open_gguf(path)
        named = f", which the file calls {shown(model.metadata.get('general.architecture'))}"
        architecture_of(model)
    text = (
        f"{config.family}{named}: {config.num_layers} layers of d {config.hidden_size}, "
        f"{config.max_positions:,} positions"
    )
    yield Finding("ok", "family", text)


def _formats(path: Path) -> Iterator[Finding]:
    if is_gguf(path):
        model = open_gguf(path)
        names = (model.file_of(name).tensors[name].type.name for name in model.names)
    else:
        checkpoint = Checkpoint(path)
        with_weights = (name for name in checkpoint.names() if checkpoint.shape(name) != (0,))
        names = (checkpoint.format_name(name) for name in with_weights)
    counts = Counter(names).most_common()
    told = (f"{_count(count)} of {name}" for name, count in counts)
    yield Finding("ok", "formats", ", ".join(told))
    if not is_gguf(path) and (note := checkpoint.conversion_note(_BY_LAYER)):
        yield Finding("note", "read as", note)


def _tensors(path: Path) -> Iterator[Finding]:
    """Whether all are there that the model needs, and which are not read."""
    read_model(path)
    config, checkpoint = read_config(path), Checkpoint(path)
    check_tensors(checkpoint, config)
    yield Finding("ok", "tensors", "all that the model needs are there, in their shapes")
    if has_draft_layer(checkpoint, config):
        why_not = why_no_drafts(checkpoint, config)
        text = f"the layer that guesses tokens ahead (MTP): {why_not or 'drafts, on the CPU'}"
        yield Finding("note" if why_not else "ok", "drafts", text)
    names = {*open_gguf(path).names} if is_gguf(path) else checkpoint.own_names()
    unread = sorted(names - checkpoint.own_names_asked() - without_effect(config))
    parts: dict[str, list[str]] = {}
    for name in unread:
        parts.setdefault(_part_of(name, config), []).append(name)
    for part, theirs in parts.items():
        if part:
            text = f"{_count(len(theirs))} of {part}"
        else:
            text = f"tensors that are not read: {_listed(theirs)}; {_IF_NEEDED}"
        yield Finding("note", "left out", text)


def _part_of(name: str, config: ModelConfig) -> str:
    layer = _LAYER.search(name)
    if layer is not None and int(layer[1]) >= config.num_layers:
        return "the part that guesses tokens ahead (MTP)"
    return next((part for part, begins in _PARTS.items() if name.startswith(begins)), "")


def _unread_keys(path: Path) -> Iterator[Finding]:
    """Keys of the configuration that nothing asked for, with values that are not neutral."""
    with noting_keys() as asked:
        read_config(path)
    values: Mapping[str, Any]
    if is_gguf(path):
        model = open_gguf(path)
        values = model.metadata
        own = f"{values.get('general.architecture')}."
        unread = [one for one in values if one.startswith(own) and ".rope." not in one]
    else:
        values, _ = config_values(path)
        inner = values.get("text_config")
        values = inner if isinstance(inner, dict) else values
        own = ""
        unread = [one for one in values if _MATTERS.search(one) and not _MATTERS_NOT.search(one)]
    unread = [one for one in unread if one not in asked and not _is_neutral(values[one])]
    without_effect = [one for one in unread if one.removeprefix(own) in _WITHOUT_EFFECT]
    others = [f"{one} ({shown(values[one], 40)})" for one in unread if one not in without_effect]
    if without_effect:
        text = f"keys that change nothing: {_listed(without_effect)}"
        yield Finding("note", "left out", text)
    if others:
        text = f"keys that are not read: {_listed(others)}; {_IF_NEEDED}"
        yield Finding("note", "left out", text)


def _is_neutral(value: Any) -> bool:
    return value is None or value in (0, 1, "") or value == [] or value == {}


def _text(path: Path) -> Iterator[Finding]:
    """The tokenizer, the tokens that end answers, and the chat template."""
    tokenizer = Tokenizer.from_model(path)
    if tokenizer is None:
        text = "none: prompts are token ids; take a model with one for conversations"
        yield Finding("problem", "tokenizer", text)
        return
    yield from _tokenizer(path, tokenizer)
    config = read_config(path)
    ends = [end for end in tokenizer.end_ids(eos_ids(path, config)) if end < config.vocab_size]
    if ends:
        named = ", ".join(_told_text(tokenizer.token_text(end)) for end in ends)
        yield Finding("ok", "end tokens", named)
    else:
        text = "none: only --max-tokens and stop texts end an answer"
        yield Finding("note", "end tokens", text)
    yield from _template(tokenizer, ends)
    yield Finding("ok", "sampling", _sampling(path, config.vocab_size))


def _sampling(path: Path, vocab_size: int) -> str:
    """The options that the model's makers chose."""
    own, usual = vars(SamplingParams.defaults(path)), vars(SamplingParams())
    told = [f"{name} {value}" for name, value in own.items() if value != usual[name]]
    if never := suppressed_ids(path, vocab_size):
        told.append(f"{len(never)} tokens are never written")
    return ", ".join(told) or "the files name no options: llama.cpp's defaults"


def _tokenizer(path: Path, tokenizer: Tokenizer) -> Iterator[Finding]:
    bos = _told_text(tokenizer.bos)
    opened = f"texts begin with {bos}" if bos else "texts begin with no token of their own"
    kind = "from " + next(
        (name for name in ("tokenizer.json", "tokenizer.model") if (path / name).exists()),
        "vocab.json and merges.txt",
    )
    if is_gguf(path):
        metadata = open_gguf(path).metadata
        model, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        kind = (
            f"{shown(model)[1:-1]}, cut into words as {shown(pre)[1:-1]}" if pre else shown(model)
        )
        if model == "gpt2" and pre is None:
            text = (
                "the file does not say how texts are cut into words (tokenizer.ggml.pre), so they "
                "are as GPT-2's; take a newer file"
            )
            yield Finding("note", "tokenizer", text)
    yield Finding("ok", "tokenizer", f"{kind}; {tokenizer.vocab_size:,} tokens; {opened}")
    if not tokenizer.is_linear:
        text = "its patterns may be slow: texts are encoded in a process of its own"
        yield Finding("note", "tokenizer", text)


def _template(tokenizer: Tokenizer, ends: Iterable[int]) -> Iterator[Finding]:
    if not tokenizer.has_chat_template:
        text = (
            "none: the model goes on with a text (`hotcold generate`); take the one that its "
            "makers trained for conversations, or a file with tokenizer.chat_template"
        )
        yield Finding("problem", "chat template", text)
        return
    try:
        tokenizer.check_template()
        text = tokenizer.render_chat(_CONVERSATION)
    except HotcoldError as problem:
        yield Finding("problem", "chat template", str(problem))
        return
    size = len(tokenizer.chat_template or "")
    yield Finding("ok", "chat template", f"{size:,} characters; it renders a conversation")
    thinking = tokenizer.thinking
    marks = "no marks of it"
    if thinking is not None:
        marks = f"between {_told_text(thinking.begin)} and {_told_text(thinking.end)}"
    yield Finding("ok", "thinking", marks)
    yield Finding("ok", "tools", _tools(tokenizer))
    yield from _special_texts(tokenizer, text)
    yield from _turn(tokenizer, text, set(ends))


def _tools(tokenizer: Tokenizer) -> str:
    begin = tokenizer.call_syntax.begin
    return (
        f"calls begin with {_told_text(begin)}" if begin else "a call is the whole answer, as JSON"
    )


def _special_texts(tokenizer: Tokenizer, text: str) -> Iterator[Finding]:
    """Those of a conversation that are several tokens."""
    counts = {one: len(tokenizer.encode(one, False)) for one in set(_SPECIAL.findall(text))}
    cut = sorted(f"{_told_text(one)} ({count})" for one, count in counts.items() if count > 1)
    if cut:
        what = (
            f"the template writes what is no token here but several: {_listed(cut)}; right only if "
            "the model was trained so"
        )
        yield Finding("note", "special tokens", what)


def _turn(tokenizer: Tokenizer, text: str, ends: set[int]) -> Iterator[Finding]:
    """How a conversation begins, and how the model's turn ends."""
    bos = tokenizer.bos
    if bos and text.startswith(bos * 2):
        yield Finding("note", "BOS", f"the template writes {_told_text(bos)} twice")
    elif bos and not text.startswith(bos):
        told = f"texts begin with {_told_text(bos)}, and the template's conversations do not"
        yield Finding("note", "BOS", told)
    if _SAID not in text:
        return
    after = _SPECIAL.match(text[text.index(_SAID) + len(_SAID) :].lstrip())
    if after is None:
        return
    end = tokenizer.token_id(after[0])
    if end is not None and end not in ends and after[0] not in END_TOKENS:
        told = (
            f"the template ends the model's turn with {_told_text(after[0])}, which ends no "
            "answer: the model may go on with your words; give it as a stop text"
        )
        yield Finding("note", "end tokens", told)


def _count(number: int) -> str:
    return f"{number} tensor{'' if number == 1 else 's'}"


def _told_text(text: str) -> str:
    """A token's text, as it is where a terminal can show it."""
    return text if text.isprintable() else shown(text)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
