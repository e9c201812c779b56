"""A tiny model that writes exactly the text that a test wants: each token calls the next."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

END = "<end>"


def write_chain(path: Path, template: str, *chains: Sequence[str]) -> Path:
    """Write a Llama of two layers into `path`, whose layers change nothing.

    Each text of a chain is one token, after which the model writes the next one of that chain; a
    text has the same neighbour in all. What nothing follows is followed by END, its end token.
    """
    texts = list(dict.fromkeys(itertools.chain(*chains)))
    tokenizer = _of_bytes([END])
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    ids = {text: tokenizer.token_to_id(text) for text in [END, *texts]}
    followers = np.full(tokenizer.get_vocab_size(), ids[END])
    for one, other in itertools.chain(*map(itertools.pairwise, chains)):
        assert followers[ids[one]] in (ids[END], ids[other]), f"two follow {one!r}"
        followers[ids[one]] = ids[other]
    _write(path, template, tokenizer, followers, [END])
    return path


def write_of_bytes(path: Path, template: str, controls: Sequence[str], ends: Sequence[str]) -> Path:
    """Write a model whose tokens are bytes and these control tokens, of which `ends` end answers.

    By itself it writes its last end token alone: a test says what it writes.
    """
    tokenizer = _of_bytes(list(dict.fromkeys([*controls, *ends])))
    followers = np.full(tokenizer.get_vocab_size(), tokenizer.token_to_id(ends[-1]))
    _write(path, template, tokenizer, followers, ends)
    return path


def _of_bytes(controls: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(_bytes(), []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(controls)
    return tokenizer


def _write(
    path: Path,
    template: str,
    tokenizer: tokenizers.Tokenizer,
    followers: np.ndarray,
    ends: Sequence[str],
) -> None:
    size = tokenizer.get_vocab_size()
    width = -(-size // 64) * 64
    head = np.zeros((size, width), np.float32)
    head[followers, np.arange(size)] = 1
    _write_weights(path, head)
    end_ids = [tokenizer.token_to_id(end) for end in ends]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "relu",
        "hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": size,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "eos_token_id": end_ids,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": ends[-1], "chat_template": template})
    )
    tokenizer.save(str(path / "tokenizer.json"))


def _bytes() -> dict[str, int]:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return {letter: number for number, letter in enumerate(letters)}


def _write_weights(path: Path, head: np.ndarray) -> None:
    """A token is a dimension of its own, so that the head alone says what follows it."""
    size, width = head.shape
    weights = {
        "model.embed_tokens.weight": np.eye(size, width, dtype=np.float32),
        "model.norm.weight": np.ones(width, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(2):
        for name, shape in (
            ("input_layernorm", (width,)), ("post_attention_layernorm", (width,)),
            ("self_attn.q_proj", (width, width)), ("self_attn.k_proj", (width, width)),
            ("self_attn.v_proj", (width, width)), ("self_attn.o_proj", (width, width)),
            ("mlp.gate_proj", (64, width)), ("mlp.up_proj", (64, width)),
            ("mlp.down_proj", (width, 64)),
        ):  # fmt: skip
            weights[f"model.layers.{layer}.{name}.weight"] = np.zeros(shape, np.float32)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
