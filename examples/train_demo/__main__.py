"""Train the embedded demo model on the docstrings of the Python that runs this.

    python -m examples.train_demo                          train, write demo/ and its report
    python -m examples.train_demo --evaluate demo          recompute the report of demo/
    ray job submit --working-dir . -- python -m examples.train_demo --out /data/demo

Both need transformers and tokenizers.
"""

import platform
import random
from datetime import UTC, datetime
from pathlib import Path

import click
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from examples.train_demo.corpus import held_out_text, questions, running_text, stdlib_entries
from examples.train_demo.report import write_report
from examples.train_demo.rows import RowSource, train_tokenizer
from examples.train_demo.training import Progress, Trainer, TrainingConfig, model_config
from hotcold.model.limits import num_cpus

VOCAB_SIZE, CONTEXT = 4096, 512
STEPS_A_LINE = 20


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--minutes", default=20.0, show_default=True, help="Computing time to train for.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", default=num_cpus(), show_default="all")
@click.option("--seed", default=1, show_default=True)
@click.option("--evaluate", type=click.Path(path_type=Path, exists=True), help="Only the report.")
def main(
    out: Path, minutes: float, device: str, threads: int, seed: int, evaluate: Path | None
) -> None:
    """Train the demo model within a budget of computing time, or recompute a model's report."""
    if minutes <= 0:
        raise click.BadParameter("must be more than 0", param_hint="--minutes")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("no CUDA device here; use --device cpu", param_hint="--device")
    torch.set_num_threads(threads)
    if evaluate is not None:
        write_report(evaluate, None)
        return
    train(TrainingConfig(minutes=minutes, device=device, seed=seed), out)


def train(config: TrainingConfig, out: Path) -> None:
    """Train, then write the model, the held-out text and the report to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    entries = stdlib_entries()
    asked, documents = questions(entries), running_text(entries)
    spoken = [f"{question.canonical} {question.answer}" for question in asked]
    tokenizer = train_tokenizer([*documents, *spoken], VOCAB_SIZE, CONTEXT)
    source = RowSource(tokenizer, asked, documents, random.Random(config.seed))
    shape = model_config(
        len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    )
    trainer = Trainer(config, shape, source)
    trainer.run(show)
    tokenizer.save_pretrained(out)
    save_model(trainer.master, out)
    (out / "heldout.txt").write_text(held_out_text(entries), "utf-8")
    write_report(out, training_facts(config, trainer.progress))


def save_model(model: LlamaForCausalLM, out: Path) -> None:
    """Write config.json, generation_config.json (greedy) and model.safetensors in float16."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.half().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)


def training_facts(config: TrainingConfig, progress: Progress) -> dict[str, object]:
    """What the report says about the training itself."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": config.device,
        "torch_threads": torch.get_num_threads(),
        "computing_minutes": round(progress.budget_s / 60, 1),
        "steps": progress.step,
        "tokens_seen": progress.tokens,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(progress: Progress) -> None:
    """A line every few steps."""
    if progress.step % STEPS_A_LINE == 0:
        print(
            f"{progress.budget_s / 60:5.1f} minutes  step {progress.step}"
            f"  loss: chat {progress.chat_loss:.3f} text {progress.text_loss:.3f}"
            f"  firing {progress.density:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
