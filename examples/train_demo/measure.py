"""Measure what the demo model can do, on its float16 weights, with transformers.

Answers:   200 questions drawn with a fixed seed, asked through the chat template, greedy; right
           only if the whole reply is the docstring's first sentence, word for word. And all
           questions, by whether every token of the answer is the likeliest after those before it.
Sparsity:  share of relu(gate) values that are exactly zero on heldout.txt, read in windows of
           the model's context.
Skew:      share of neurons that make 80% of all activations, and a histogram of firing rates.
"""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from examples.train_demo.corpus import HELD_OUT_MODULES, Question, questions, stdlib_entries
from hotcold.model.sparsity import hot_share

SAMPLE_SEED, NUM_SAMPLED, MAX_ANSWER_TOKENS = 2026, 200, 96
RATE_EDGES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.9, 1.0)


@torch.inference_mode()
def evaluate(model_dir: Path) -> dict:
    """Every figure of the report but the training's own."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    asked = questions(stdlib_entries())
    sampled = random.Random(SAMPLE_SEED).sample(asked, NUM_SAMPLED)
    answers = [
        {"question": q.canonical, "expected": q.answer, "given": reply(model, tokenizer, q)}
        for q in sampled
    ]
    with counted_activations(model) as on_questions:
        known = [knows(model, tokenizer, question) for question in asked]
    with counted_activations(model) as on_text:
        text = read_held_out(model, tokenizer, (model_dir / "heldout.txt").read_text("utf-8"))
    rates = on_text.rates()
    return {
        "model": describe(model, model_dir),
        "corpus": {"questions": len(asked), "held_out_modules": sorted(HELD_OUT_MODULES)},
        "answers": {
            "sampled": len(answers),
            "sample_seed": SAMPLE_SEED,
            "right": sum(a["given"] == a["expected"] for a in answers),
            "all_questions_right_share": round(sum(known) / len(known), 4),
        },
        "held_out": text,
        "sparsity": {
            "held_out_text": round(1 - float(rates.mean()), 4),
            "held_out_text_per_layer": [round(1 - float(r.mean()), 4) for r in rates],
            "questions_and_answers": round(1 - float(on_questions.rates().mean()), 4),
        },
        "skew": skew(rates),
        "sampled_answers": answers,
    }


def reply(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: Question) -> str:
    """The model's greedy answer to the canonical question, through the chat template."""
    ids = prompt_ids(tokenizer, asked)
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=MAX_ANSWER_TOKENS,
        do_sample=False,
    )
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)


def knows(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: Question) -> bool:
    """Whether greedy decoding gives the answer's tokens and then stops."""
    prompt = prompt_ids(tokenizer, asked)
    answer = tokenizer(asked.answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    logits = model(torch.tensor([prompt + answer])).logits[0]
    return bool((logits[len(prompt) - 1 : -1].argmax(-1) == torch.tensor(answer)).all())


def prompt_ids(tokenizer: PreTrainedTokenizerBase, asked: Question) -> list[int]:
    """The canonical question as the chat template renders it."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked.canonical}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def read_held_out(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, text: str) -> dict:
    """Perplexity over windows of the context length, each opened by the bos token."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    size = model.config.max_position_embeddings - 1
    total = 0.0
    for start in range(0, len(ids), size):
        window = torch.tensor([[tokenizer.bos_token_id, *ids[start : start + size]]])
        logits = model(window).logits[0, :-1]
        total += float(nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    return {
        "bytes": len(text.encode()),
        "tokens": len(ids),
        "perplexity": round(math.exp(total / len(ids)), 2),
        "bits_per_byte": round(total / len(text.encode()) / math.log(2), 3),
    }


class ActivationCounts:
    """How often each neuron fired.  Shapes: fired (layers, N); tokens counts each layer's."""

    def __init__(self, num_layers: int, num_neurons: int) -> None:
        self.fired = torch.zeros(num_layers, num_neurons, dtype=torch.int64)
        self.tokens = [0] * num_layers

    def add(self, layer_id: int, gate_output: Tensor) -> None:
        """Count one forward pass; gate_output (..., N) is relu(gate)."""
        values = gate_output.flatten(0, -2)
        self.fired[layer_id] += (values != 0).sum(0)
        self.tokens[layer_id] += len(values)

    def rates(self) -> Tensor:
        """Share of tokens for which each neuron fired, float64."""
        return self.fired.double() / torch.tensor(self.tokens).double()[:, None]


@contextmanager
def counted_activations(model: LlamaForCausalLM) -> Iterator[ActivationCounts]:
    """Count what passes relu(gate) of every layer while the context is open."""
    layers = model.model.layers
    counts = ActivationCounts(len(layers), model.config.intermediate_size)

    def count(layer_id: int, output: Tensor) -> None:
        counts.add(layer_id, output)

    handles = [
        layer.mlp.act_fn.register_forward_hook(lambda _m, _i, out, i=layer_id: count(i, out))
        for layer_id, layer in enumerate(layers)
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def skew(rates: Tensor) -> dict:
    """How unevenly the neurons fire; the histogram counts neurons of all layers."""
    edges = pairwise(RATE_EDGES)
    histogram = [{"rate": "0", "neurons": int((rates == 0).sum())}]
    for low, high in edges:
        inside = int(((rates > low) & (rates <= high)).sum())
        histogram.append({"rate": f"{low:.1%} to {high:.1%}", "neurons": inside})
    return {
        "neurons_for_80_percent_share": round(hot_share(rates.flatten().numpy()), 4),
        "neurons_for_80_percent_share_per_layer": [round(hot_share(r.numpy()), 4) for r in rates],
        "histogram": histogram,
    }


def describe(model: LlamaForCausalLM, model_dir: Path) -> dict:
    """The model's shape and size."""
    config = model.config
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "neurons_per_layer": config.intermediate_size,
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "weights_bytes": (model_dir / "model.safetensors").stat().st_size,
    }
