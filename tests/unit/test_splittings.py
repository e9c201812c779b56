"""Tokenizers of GGUF files by `tokenizer.ggml.pre`: ids beside those of the models' own files.

Each model's tokenizer.json is written as its makers publish it, with a small vocabulary; the GGUF
file of the same vocabulary names the pre-tokenizer alone.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import tokenizers
from tokenizers import pre_tokenizers, trainers

from hotcold.model.errors import ConfigError
from hotcold.model.text.splittings import SPLITTINGS
from hotcold.model.text.tokenizer import Tokenizer
from tests.unit.test_gguf_tokenizer import draft, written

SNIPPETS = (
    "Hello world", "hello", " world's", "DON'T", "we'LL", "I'Ve", "it'S o'clock", "l'été",
    "’s", "12345", "1", "0x1F600", "3.14159", "1,000,000", "٣٤٥", "१२३", "Ⅻ ½ ²³¹",
    "2026-11-29T20:51", "camelCaseHTTPServer2Go", "ÀÉÎõü", "straße ǅungla ŉ", "ΑΒΓ αβγ ΐ",
    "Привет, Мир! ёЁ", "ԱՖ ႠჅ Ꮀ",
    "你好世界", "東京で会いましょうカタカナ", "々〇漢字", "한국어 ㄱㄴㄷ", "สวัสดีครับ",
    "مرحبا بِالعالم", "שָׁלוֹם", "नमस्ते दुनिया", "বাংলা", "தமிழ்",
    "e\u0301a\u0308o\u0302",
    "\u0301\u0302", "ﬁ ﬀ ①②", "Å\u212b", "👨‍👩‍👧‍👦", "🏳️‍🌈🙂🙃", "é́", "\u200b\u200d\ufeff",
    "…。，、।۔؛",
    "「引用」（括弧）！？～", " ", "  ", "     ", "\t", "\t\t  ", "\u00a0\u3000\u2003",
    "\n", "\n\n\n", "\r\n", "\r\n\r\n", "\r", " \n ", "\n    ", "   \n\n   x", "\x00",
    "\x01\x02\x1f\x7f", "\u0085\u2028\u2029", "\x0b\x0c",
    "def f(x):\n    return x**2  # comment\r\n", "if (a != b && c) { d[e]++; }", "</div>\n",
    "$x_1$", "https://a.b/c?d=e&f=%20g#h", "C:\\dir\\file", "@user #tag", "a/b//c",
    "!!!???", "--- ***", "``````", "<|notatoken|>", "[INST]", "snake_case_name",
    "~/.bashrc", "\"quoted\"'single'", "a" * 40, "zebra", " zebra", "x" + " " * 30 + "y",
    "  trailing   ", "∑∫≠∞ €£¥", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐐀𐐨", "Ⱥⱥ ꙀꙁꝀ",
)  # fmt: skip


def texts() -> list[str]:
    """The snippets, and some of them one after another."""
    generator = random.Random(7)
    joined = ("".join(generator.choices(SNIPPETS, k=generator.randrange(2, 9))) for _ in range(140))
    return [*SNIPPETS, *joined, ""]


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": behavior,
        "invert": invert,
    }


def everything(pattern: str) -> dict[str, Any]:
    """As OpenAI's tokenizers come out of transformers: what matches is kept."""
    return split(pattern, "Removed", True)


DIGITS = {"type": "Digits", "individual_digits": True}
LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = {**LETTERS, "use_regex": True}
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
DEEPSEEK_CASED = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝ"
    "ℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓"
    "𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
DEEPSEEK_LLM = [
    split("[\r\n]"),
    split(DEEPSEEK_CASED),
    split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
    split(r"\s+$"),
    split("[一-龥ࠀ-一가-퟿]+"),
    DIGITS,
    LETTERS,
]
DEEPSEEK_CODER = [
    split("[\r\n]"),
    split(r"\s?\p{L}+"),
    split(r"\s?\p{P}+"),
    split("[一-龥ࠀ-一가-퟿]+"),
    DIGITS,
    LETTERS,
]
SPARK = [
    split(r"\p{N}{1,3}"),
    split("[一-龥぀-ゟ゠-ヿ]+"),
    split(DEEPSEEK_V3.replace("+[\r\n]*|\\s*[\r\n]+|", "+|[\r\n]|")),
    DIGITS,
    LETTERS,
]
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
SEED = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
THREES = r"\d{1,3}(?=(?:\d{3})*\b)"
EXAONE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
MINICPM5 = CL100K.replace("{1,3}", "+")
FALCON: list[dict[str, Any]] = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    GPT2,
    {"type": "Digits", "individual_digits": False},
    split("[0-9][0-9][0-9]"),
]
V3 = [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3), LETTERS]

# The pre-tokenizer, the normalizer and ignore_merges of the models' tokenizer.json.
ORIGINALS: dict[str, tuple[list[dict[str, Any]], str | None, bool]] = {
    "gpt-2": ([GPT2], None, False),  # openai-community/gpt2
    "olmo": ([GPT2], "NFC", False),  # EleutherAI/gpt-neox-20b
    "smollm": ([DIGITS, GPT2], None, False),  # HuggingFaceTB/SmolLM2
    "refact": ([DIGITS, GPT2], None, False),  # ibm-granite/granite-3.x
    "command-r": ([DIGITS, GPT2], "NFC", False),  # CohereForAI/c4ai-command-r-v01
    "exaone": ([DIGITS, GPT2], "NFKC", False),  # LGAI-EXAONE/EXAONE-3.5
    "falcon": (FALCON, None, False),  # tiiuae/falcon-7b
    "llama-bpe": ([split(CL100K), LETTERS], None, True),  # meta-llama/Llama-3, SmolLM3
    "lfm2": ([split(CL100K), LETTERS], None, True),  # LiquidAI/LFM2.5-8B-A1B
    "dbrx": ([everything(CL100K), LETTERS], None, False),  # OLMo 2 and 3, Granite 4, Phi-4
    "glm4": ([split(CL100K), LETTERS], None, True),  # zai-org/GLM-4.5 to 5.3
    "qwen2": ([split(QWEN2), LETTERS], "NFC", False),  # Qwen/Qwen2 to 3
    "qwen35": ([split(QWEN35), LETTERS], "NFC", False),  # Qwen/Qwen3.5 to 3.8
    "hunyuan": ([split(QWEN2), LETTERS], "NFC", True),  # tencent/Hunyuan-A13B
    "tekken": ([split(TEKKEN), LETTERS], None, True),  # Mistral Nemo and after, Nemotron 3
    "gpt-4o": ([split(O200K), LETTERS], None, True),  # openai/gpt-oss
    "minimax-m2": ([everything(O200K), LETTERS], "NFC", False),  # MiniMaxAI/MiniMax-M2
    "kimi-k2": ([split(KIMI), LETTERS], None, True),  # moonshotai/Kimi-K2 to K3
    "deepseek-llm": (DEEPSEEK_LLM, None, False),  # deepseek-ai/deepseek-llm-7b, V2
    "deepseek-coder": (DEEPSEEK_CODER, None, False),  # deepseek-ai/deepseek-coder-6.7b
    "deepseek-v3": (V3, None, False),  # deepseek-ai/DeepSeek-V3 to V4, R1
    "hunyuan-dense": (V3, None, False),  # tencent/Hy3
    "solar-open": ([split(QWEN2), LETTERS], None, False),  # upstage/Solar-Open-100B
    "tiny_aya": ([split(THREES), split(O200K), LETTERS], None, False),  # CohereLabs/tiny-aya
    "exaone-moe": ([split(EXAONE), LETTERS], None, False),  # LGAI-EXAONE/K-EXAONE
    "spark2_5": (SPARK, None, False),  # XHToken/Spark-X2.5
    "seed-coder": ([split(SEED), LETTERS], "NFC", False),  # ByteDance-Seed/Seed-Coder
    "bailingmoe2": ([split(BAILING), LETTERS], "NFC", False),  # inclusionAI/Ling
    "minicpm5": ([split(r"\p{N}{1,3}"), split(MINICPM5), LETTERS], None, False),  # MiniCPM5
}
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]


def original(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json, trained on the texts; " zebra" is no merge's result."""
    steps, normal_form, ignores_merges = ORIGINALS[name]
    values: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None if normal_form is None else {"type": normal_form},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": GPT2,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    made = tokenizers.Tokenizer.from_str(json.dumps(values))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1100, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([*texts()] * 2, trainer)
    values = json.loads(made.to_str())
    model = values["model"]
    model["ignore_merges"] = ignores_merges
    whole = ["Ġzebra", "zebra"]
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in whole]
    for text in whole:
        model["vocab"].setdefault(text, len(model["vocab"]))
    return tokenizers.Tokenizer.from_str(json.dumps(values))


def own_of(path: Path, made: tokenizers.Tokenizer, kind: str = "gpt2", **keys: Any) -> Tokenizer:
    """What is read of a file with the vocabulary, as llama.cpp's converter writes it."""
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if keys.pop("has_merges", True):
        keys["merges"] = [" ".join(pair) for pair in model["merges"]]
    found = Tokenizer.from_model(
        written(draft(kind, tokens, list(map(_type, tokens)), **keys), path)
    )
    assert found is not None
    return found


def _type(token: str) -> int:
    if regex.fullmatch("<0x[0-9A-F]{2}>", token):
        return gguf.TokenType.BYTE
    is_control = token in (*SPECIAL, *GEMMA_SPECIAL)
    return gguf.TokenType.CONTROL if is_control else gguf.TokenType.NORMAL


@pytest.mark.parametrize("name", ORIGINALS)
def test_ids_are_those_of_the_models_own_file(name: str, tmp_path: Path) -> None:
    theirs = original(name)
    own = own_of(tmp_path / "a.gguf", theirs, pre=name, add_bos_token=False)
    assert own.is_linear == (name not in ("tiny_aya", "exaone-moe"))  # those are slow
    for text in texts():
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert own.encode(text) == ids, ascii(text)
        assert own.decode(ids) == theirs.decode(ids)


def test_every_way_of_splitting_is_compared() -> None:
    """Other names are the same as one that is."""
    compared = [SPLITTINGS[name] for name in ORIGINALS]
    assert [name for name, one in SPLITTINGS.items() if one not in compared] == []


def slow_ids(text: str, score: dict[str, float], ids: dict[str, int]) -> list[int]:
    """Ids by the rule spelled out: join the best pair until none is a token."""
    parts = list(text)
    while True:
        pairs = [
            (-score[a + b], at)
            for at, (a, b) in enumerate(pairwise(parts))
            if a in score and b in score and a + b in score
        ]
        if not pairs:
            return [ids[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_kimi_without_merges_is_tiktoken(tmp_path: Path) -> None:
    """By tiktoken's rule: of a word's pairs, the one that makes the token of the lowest id."""
    theirs, pattern = original("kimi-k2"), regex.compile(KIMI, regex.V1)
    vocab = json.loads(theirs.to_str())["model"]["vocab"]
    scores = {text: -token_id for text, token_id in vocab.items()}
    own = own_of(tmp_path / "a.gguf", theirs, pre="kimi-k2", has_merges=False)
    letters = own_of(tmp_path / "b.gguf", theirs, pre="kimi-k2")
    letter_of = {letters.token_bytes(token_id): text for text, token_id in vocab.items()}
    for text in texts():
        expected: list[int] = []
        for word in pattern.findall(text):
            written_out = "".join(letter_of[bytes([byte])] for byte in word.encode())
            whole = [vocab[written_out]] if written_out in vocab else []
            expected += whole or slow_ids(written_out, scores, vocab)
        assert own.encode(text) == expected, ascii(text)


def gemma4() -> tokenizers.Tokenizer:
    """As google/gemma-4-E4B-it's tokenizer.json."""
    vocab = {text: at for at, text in enumerate(GEMMA_SPECIAL)}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    seen = sorted(set("".join(texts()).replace(" ", "▁")) - set("東🙂\x00"))
    vocab |= {letter: len(vocab) + at for at, letter in enumerate(seen)}
    merges = []
    for pair in ("▁ ▁", "\n \n", "\n\n \n", "▁▁ ▁▁", "l l", "h e", "he ll", "hell o", "▁ w", "o r",
                 "▁w or", "l d", "▁wor ld", "▁ z", "e b", "▁z eb", "a a", "aa aa"):  # fmt: skip
        left, right = pair.split(" ")
        merges.append([left, right])
        vocab.setdefault(left + right, len(vocab))
    values: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocab[text], "content": text, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True} for text in GEMMA_SPECIAL
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
                  "vocab": vocab, "merges": merges},
    }  # fmt: skip
    return tokenizers.Tokenizer.from_str(json.dumps(values))


@pytest.mark.parametrize("says_no_bos", [False, True])
def test_gemma4_joins_pieces_by_its_merges(says_no_bos: bool, tmp_path: Path) -> None:
    theirs = gemma4()
    keys: dict[str, Any] = {"bos_token_id": 2, "unknown_token_id": 3, "add_space_prefix": False}
    if says_no_bos:
        keys["add_bos_token"] = False
    own = own_of(tmp_path / "a.gguf", theirs, "gemma4", **keys)
    for text in texts():
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert own.encode(text) == [2, *ids], ascii(text)
        assert own.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("kind", "pre", "told"),
    [
        ("gpt2", "of-next-year", "of-next-year.*take the model's own files"),
        ("bert", "jina-v2-en", "bert.*embeddings"),
        ("unigram", "default", "unigram.*take the model's own files"),
    ],
)
def test_what_is_not_known_is_refused(kind: str, pre: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        own_of(tmp_path / "a.gguf", original("gpt-2"), kind, pre=pre)
