"""How texts are cut into words before merges, by the name that a GGUF file gives the way.

The patterns are those that the models' own tokenizer.json or Python code have. Where llama.cpp's
differ, these stand: its NFC and NFKC are missing (qwen2, qwen35, exaone, seed-coder, minimax-m2
and others), its tekken and gpt-4o tell upper case by ASCII letters alone, it makes whole words of
minicpm5 and merges of gpt-4o, and falcon has a step less.
Source:  the models' tokenizer.json; Kimi's tokenization_kimi.py, Hunyuan's tokenization_hy.py;
         llama.cpp, src/llama-vocab.cpp for the names and for `adds_bos`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotcold.model.text.split_patterns import HAN, LAST_SPACES, LOWER, UPPER, without_han

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # contractions
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_THREE_DIGITS}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = _LLAMA3.replace(_THREE_DIGITS, _DIGIT)
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _by_case(upper: str, lower: str, short: str, digits: str, after_signs: str) -> str:
    """Words end where lower case turns into upper case; letters without case are both."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{upper}*{lower}+{short}|{first}{upper}+{lower}*{short}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after_signs}*|{_SPACES}"
    )


_TEKKEN = _by_case(UPPER, LOWER, "", _DIGIT, r"[\r\n/]")
_GPT4O = _by_case(UPPER, LOWER, f"{_SHORT}?", _THREE_DIGITS, r"[\r\n/]")
_KIMI = f"{HAN}+|" + _by_case(
    without_han(UPPER), without_han(LOWER), f"{_SHORT}?", _THREE_DIGITS, r"[\r\n]"
)

_KANJI, _KANJI_AND_HANGUL = "[一-龥぀-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-퟿]+"
_SIGN_AND_LETTERS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_LETTERS_OR_SIGNS = (
    rf"{_SIGN_AND_LETTERS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
)
_DEEPSEEK_V3 = (_THREE_DIGITS, _KANJI, rf"{_LETTERS_OR_SIGNS}[\r\n]*|{_SPACES}")
# Letters of alphabets with case, as DeepSeek spells them out.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝ"
    "ℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓"
    "𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    LAST_SPACES,  # DeepSeek's \s+$, which takes the square of a text's spaces
    _KANJI_AND_HANGUL,
    _DIGIT,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _KANJI_AND_HANGUL, _DIGIT)
_MINICPM5 = (_THREE_DIGITS, _LLAMA3.replace(_THREE_DIGITS, r"\p{N}+"))
_SPARK = (_THREE_DIGITS, _KANJI, rf"{_LETTERS_OR_SIGNS}|[\r\n]|\s+(?!\S)|\s+", _DIGIT)

_GROUPED_DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"  # threes from the right
_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitting:
    """The pre-tokenizer: how text is cut into words before merges.

    patterns:         each cuts what those before it have left; its matches, and what is between
                      them, are words
    letter_patterns:  the same, once the text's bytes have become letters
    normal_form:      of Unicode, made before
    whole_words:      a word that is a token becomes that token, whatever merges would make of it
    adds_bos:         where the file does not say whether texts begin with BOS
    """

    patterns: tuple[str, ...] = (_GPT2,)
    letter_patterns: tuple[str, ...] = ()
    normal_form: Literal["", "NFC", "NFKC"] = ""
    whole_words: bool = False
    adds_bos: bool = False


GPT2 = Splitting()
_DIGITS = (_DIGIT, _GPT2)
_FALCON = Splitting((r"[\p{P}$+<=>^`|~]+", _GPT2), (r"\p{N}+", "[0-9][0-9][0-9]"))

# By the value of tokenizer.ggml.pre.
SPLITTINGS: dict[str, Splitting] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jais", "exaone4", "a.x-4.0", "mellum"), GPT2),
    "granite-docling": GPT2,
    **dict.fromkeys(("gigachat", "trillion"), GPT2),
    **dict.fromkeys(("olmo", "mpt"), Splitting(normal_form="NFC")),
    **dict.fromkeys(("smollm", "starcoder", "refact"), Splitting(_DIGITS)),
    **dict.fromkeys(("minerva-7b", "mellum2"), Splitting(_DIGITS)),
    "command-r": Splitting(_DIGITS, normal_form="NFC"),
    "exaone": Splitting(_DIGITS, normal_form="NFKC"),
    "falcon": _FALCON,
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
        Splitting((_LLAMA3,), whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), Splitting((_LLAMA3,), whole_words=True)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"),
        Splitting((_QWEN2,), normal_form="NFC"),
    ),
    **dict.fromkeys(("solar-open", "stablelm2"), Splitting((_QWEN2,))),
    "exaone-moe": Splitting((_EXAONE_MOE,)),
    "qwen35": Splitting((_QWEN35,), normal_form="NFC"),
    "hunyuan": Splitting((_QWEN2,), normal_form="NFC", whole_words=True),
    "tekken": Splitting((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie"), Splitting((_GPT4O,), whole_words=True)
    ),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Splitting((_GROUPED_DIGITS, _GPT4O))),
    "minimax-m2": Splitting((_GPT4O,), normal_form="NFC"),
    "kimi-k2": Splitting((_KIMI,), whole_words=True),
    "deepseek-llm": Splitting(_DEEPSEEK_LLM),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), Splitting(_DEEPSEEK_V3)
    ),
    "spark2_5": Splitting(_SPARK),
    "seed-coder": Splitting((_SEED,), normal_form="NFC"),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"), Splitting((_BAILING,), normal_form="NFC")
    ),
    "minicpm5": Splitting(_MINICPM5),
}
