"""The tokens that end an answer, by their texts.

A model's files name some of them: eos_token_id in generation_config.json or config.json, the keys
eos, eot and eom of a GGUF file. What a chat template writes at the end of a turn is often missing
there, so that the model would go on with the user's next words.
Source:  the models' generation_config.json and chat templates; llama.cpp, src/llama-vocab.cpp
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EndToken:
    """When a token of a known text ends an answer; by default always.

    only_with:   where one of these is a token too
    never_with:  not where one of these is, even if the model's files name it
    is_control:  not where it is an ordinary token, of a text that people may write
    """

    only_with: frozenset[str] = frozenset()
    never_with: frozenset[str] = frozenset()
    is_control: bool = False


# What tells gpt-oss's answers, which have channels, and GLM's, which have no end of their own.
_CHANNELS = frozenset(("<|channel|>", "<|return|>", "<|flush|>"))
_GLM = frozenset(("[gMASK]",))
_ALWAYS, _CONTROL = EndToken(), EndToken(is_control=True)

END_TOKENS: dict[str, EndToken] = {
    "<|im_end|>": _ALWAYS,  # Qwen, SmolLM, LFM2, Kimi, MiniCPM, Phi-4, OLMo 3, Hermes
    "<|endoftext|>": _ALWAYS,
    "<|eot_id|>": _ALWAYS,  # Llama 3
    "<|eom_id|>": _ALWAYS,  # Llama 3, before a tool's result
    "<|eot|>": _ALWAYS,  # Llama 4
    "<|eom|>": _ALWAYS,
    "<|end_of_text|>": _ALWAYS,  # Llama 3, Granite
    "<end_of_turn>": _ALWAYS,  # Gemma to 3
    "<turn|>": _ALWAYS,  # Gemma 4
    "<|tool_response>": _ALWAYS,  # Gemma 4, before a tool's result
    "<eos>": _CONTROL,  # Gemma
    "</s>": _CONTROL,  # Llama 2, Mistral; Gemma's is HTML
    "<|end|>": EndToken(never_with=_CHANNELS),  # Phi-3; of gpt-oss it ends a channel
    "<|return|>": EndToken(only_with=_CHANNELS),  # gpt-oss
    "<|call|>": EndToken(only_with=_CHANNELS),
    "<|user|>": EndToken(only_with=_GLM),
    "<|observation|>": EndToken(only_with=_GLM),
    "<｜end▁of▁sentence｜>": _ALWAYS,  # DeepSeek
    "<seed:eos>": _ALWAYS,
    "[|endofturn|]": _ALWAYS,  # EXAONE
    "<|END_OF_TURN_TOKEN|>": _ALWAYS,  # Command R
    "<|role_end|>": _ALWAYS,  # Ling 2
    "[e~[": _CONTROL,  # MiniMax M2
    "[EOS]": _CONTROL,  # Kimi K2
    "[EOT]": _CONTROL,
    "<EOT>": _CONTROL,
}


def end_ids(
    named: Iterable[int], special: Mapping[str, int], ordinary: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the ids that end an answer: those that the model's files name, then the known ones.

    special:   the ids of control tokens, by their texts
    ordinary:  those of other tokens; all that the tokenizer finds whole are enough
    """
    known = {**ordinary, **special}
    texts = known.keys()
    found, never = list(named), set()
    for text, rule in END_TOKENS.items():
        if text not in known:
            continue
        if rule.never_with & texts:
            never.add(known[text])
        elif (text in special or not rule.is_control) and (
            not rule.only_with or rule.only_with & texts
        ):
            found.append(known[text])
    return tuple(dict.fromkeys(token_id for token_id in found if token_id not in never))
