"""Which tokens end an answer, of GGUF files and of folders, by family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from hotcold.model.config.build import read_config
from hotcold.model.sampling import eos_ids
from hotcold.model.text.tokenizer import Tokenizer
from tests.chain_model import END, write_chain
from tests.unit.test_gguf_tokenizer import draft, written
from tests.unit.test_thinking_answers import serving

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
# The tokens of a file beside "a" and "b", what it names as eos, eot and eom, and those that end.
FAMILIES: dict[str, tuple[dict[str, int], dict[str, str], set[str]]] = {
    "qwen": (
        dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), _CONTROL),
        {"eos": "<|im_end|>"},
        {"<|endoftext|>", "<|im_end|>"},
    ),
    "qwen, base": (
        dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), _CONTROL),
        {"eos": "<|endoftext|>"},
        {"<|endoftext|>", "<|im_end|>"},
    ),
    "llama 3": (
        dict.fromkeys(("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>",
                       "<|python_tag|>"), _CONTROL),
        {"eos": "<|end_of_text|>"},
        {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"},
    ),
    "llama 4": (
        dict.fromkeys(("<|end_of_text|>", "<|eot|>", "<|eom|>", "<|header_end|>"), _CONTROL),
        {"eos": "<|eot|>"},
        {"<|end_of_text|>", "<|eot|>", "<|eom|>"},
    ),
    "gemma 3, ends called ordinary": (
        {"<eos>": _CONTROL, "<bos>": _CONTROL, "<start_of_turn>": _NORMAL,
         "<end_of_turn>": _NORMAL},
        {"eos": "<eos>"},
        {"<eos>", "<end_of_turn>"},
    ),
    "gemma 4": (
        {"<eos>": _CONTROL, "<|turn>": _CONTROL, "<turn|>": _CONTROL, "<|tool_call>": _USER_DEFINED,
         "<|tool_response>": _USER_DEFINED, "</s>": _NORMAL, "<channel|>": _USER_DEFINED},
        {"eos": "<eos>"},
        {"<eos>", "<turn|>", "<|tool_response>"},
    ),
    "glm": (
        dict.fromkeys(("<|endoftext|>", "[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>"),
                      _CONTROL),
        {"eos": "<|endoftext|>"},
        {"<|endoftext|>", "<|user|>", "<|observation|>"},
    ),
    "glm, as its files name them": (
        dict.fromkeys(("<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>"), _CONTROL),
        {"eos": "<|endoftext|>", "eot": "<|user|>", "eom": "<|observation|>"},
        {"<|endoftext|>", "<|user|>", "<|observation|>"},
    ),
    "phi 3": (
        dict.fromkeys(("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"), _CONTROL),
        {"eos": "<|endoftext|>"},
        {"<|endoftext|>", "<|end|>"},
    ),
    "gpt-oss": (
        dict.fromkeys(("<|return|>", "<|call|>", "<|channel|>", "<|end|>", "<|message|>"),
                      _CONTROL),
        {"eos": "<|return|>"},
        {"<|return|>", "<|call|>"},
    ),
    "gpt-oss, its end of a channel named": (
        dict.fromkeys(("<|return|>", "<|call|>", "<|channel|>", "<|end|>"), _CONTROL),
        {"eos": "<|return|>", "eot": "<|end|>"},
        {"<|return|>", "<|call|>"},
    ),
    "a call alone ends nothing": (
        dict.fromkeys(("<|call|>", "<|im_end|>"), _CONTROL), {"eos": "<|im_end|>"}, {"<|im_end|>"},
    ),
    "deepseek": (
        dict.fromkeys(("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"), _CONTROL),
        {"eos": "<｜end▁of▁sentence｜>"},
        {"<｜end▁of▁sentence｜>"},
    ),
    "kimi": (
        dict.fromkeys(("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "[EOT]"), _CONTROL),
        {"eos": "[EOS]"},
        {"[EOS]", "[EOT]", "<|im_end|>"},
    ),
    "lfm2": (
        dict.fromkeys(("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_call_end|>"),
                      _CONTROL),
        {"eos": "<|im_end|>"},
        {"<|im_end|>"},
    ),
    "granite": (
        dict.fromkeys(("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), _CONTROL),
        {"eos": "<|end_of_text|>"},
        {"<|end_of_text|>"},
    ),
    "mistral": (
        dict.fromkeys(("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), _CONTROL),
        {"eos": "</s>"},
        {"</s>"},
    ),
}  # fmt: skip


def ends_of(path: Path) -> set[str]:
    """The texts of the tokens that end the model's answers."""
    tokenizer, config = Tokenizer.from_model(path), read_config(path)
    assert tokenizer is not None
    named = eos_ids(path, config)
    return {tokenizer.token_bytes(one).decode() for one in tokenizer.end_ids(named)}


@pytest.mark.parametrize("family", FAMILIES)
def test_of_gguf_files(family: str, tmp_path: Path) -> None:
    kinds, named, ends = FAMILIES[family]
    texts = [*kinds, "a", "b", "c", "d", "e", "f", "g", "h"][:8]
    keys: dict[str, Any] = {f"{key}_token_id": texts.index(text) for key, text in named.items()}
    made = draft("gpt2", texts, [kinds.get(text, _NORMAL) for text in texts], pre="gpt-2", **keys)
    assert ends_of(written(made, tmp_path / "a.gguf")) == ends


@pytest.mark.parametrize("family", FAMILIES)
def test_of_folders(family: str, tmp_path: Path) -> None:
    """As of GGUF files; generation_config.json's list stands in the place of its keys."""
    kinds, named, ends = FAMILIES[family]
    path = write_chain(tmp_path, "", ["a", "b"])
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    special = [text for text, kind in kinds.items() if kind == _CONTROL]
    backend.add_special_tokens(special)
    others = [text for text in kinds if text not in special]
    backend.add_tokens([tokenizers.AddedToken(one, normalized=False) for one in others])
    backend.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    config["vocab_size"] = backend.get_vocab_size()
    (path / "config.json").write_text(json.dumps(config))
    ids = [backend.token_to_id(text) for text in named.values()]
    (path / "tokenizer_config.json").unlink()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert ends_of(path) == ends


def test_eos_of_the_tokenizer_is_one(tmp_path: Path) -> None:
    """Where config.json has that of the model that this one was trained from."""
    path = write_chain(tmp_path, "", ["a", "b"])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    first = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).id_to_token(0)
    assert ends_of(path) == {first, END}


def test_an_answer_ends_there(tmp_path: Path) -> None:
    """With a token that the template writes and no file names."""
    with serving(tmp_path, ["[go]", "yes", "<|im_end|>", "no", END]) as served:
        choice = served.chat()
        assert (choice["message"]["content"], choice["finish_reason"]) == ("yes", "stop")


def test_suppressed_tokens_are_not_written(tmp_path: Path) -> None:
    """Those of generation_config.json, whatever the request's temperature."""
    says = ["[go]", "yes", END]
    (tmp_path / "named").mkdir()
    path = write_chain(tmp_path / "named", "", says)
    never = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("yes")
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [never]}))
    with serving(tmp_path, says) as served:
        assert "yes" not in (served.chat()["message"]["content"] or "")
