"""Train a small mixture of experts on the docstrings of the Python that runs this.

    python -m examples.train_mixture --out mixture                 train, write it and its report
    python -m examples.train_mixture --evaluate mixture            recompute the report
    python -m examples.train_mixture --evaluate mixture --routes routes.npy

Corpus, tokenizer, optimizers and the control of firing rates are the demo model's
(examples/train_demo). Stop it at any time: given the same --checkpoint it continues.
"""

import random
from functools import partial
from pathlib import Path

import click
import torch

from examples.train_demo.__main__ import CONTEXT, VOCAB_SIZE, TrainingDisplay, training_facts
from examples.train_demo.corpus import held_out_text, questions, running_text, stdlib_entries
from examples.train_demo.rows import RowSource, train_tokenizer
from examples.train_demo.training import Trainer, TrainingConfig
from examples.train_mixture.model import (
    MixtureForCausalLM,
    balance_loss,
    mixture_config,
    save_mixture,
)
from examples.train_mixture.report import write_report
from hotcold.model.limits import num_cpus

DENSITY, EXPONENT = 0.3, 0.5  # of neurons inside the experts that a token chose
BALANCE = 0.02


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("mixture"), show_default=True)
@click.option("--minutes", default=60.0, show_default=True, help="Computing time to train for.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", default=num_cpus(), show_default="all")
@click.option("--seed", default=1, show_default=True)
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Default: OUT/training.pt")
@click.option("--evaluate", type=click.Path(path_type=Path, exists=True), help="Only the report.")
@click.option("--routes", type=click.Path(path_type=Path), help="Keep the experts of each token "
              "and layer here: int16 (tokens, layers, chosen).")  # fmt: skip
def main(
    out: Path,
    minutes: float,
    device: str,
    threads: int,
    seed: int,
    checkpoint: Path | None,
    evaluate: Path | None,
    routes: Path | None,
) -> None:
    """Train the mixture within a budget of computing time, or recompute a model's report."""
    if minutes <= 0:
        raise click.BadParameter("must be more than 0", param_hint="--minutes")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("no CUDA device here; use --device cpu", param_hint="--device")
    torch.set_num_threads(threads)
    if evaluate is not None:
        write_report(evaluate, None, routes)
        return
    config = TrainingConfig(
        minutes=minutes, device=device, seed=seed, density=DENSITY, exponent=EXPONENT
    )
    train(config, out, checkpoint or out / "training.pt", routes)


def train(config: TrainingConfig, out: Path, checkpoint: Path, routes: Path | None) -> None:
    """Train, then write the model, the held-out text and the report to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    entries = stdlib_entries()
    asked, documents = questions(entries), running_text(entries)
    spoken = [f"{question.canonical} {question.answer}" for question in asked]
    tokenizer = train_tokenizer([*documents, *spoken], VOCAB_SIZE, CONTEXT)
    source = RowSource(tokenizer, asked, documents, random.Random(config.seed))
    shape = mixture_config(
        len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    )
    loss = partial(balance_loss, weight=BALANCE)
    trainer = Trainer(config, shape, source, MixtureForCausalLM, loss)
    with TrainingDisplay(config) as display:
        trainer.run(checkpoint, display.show)
    trainer.save(checkpoint)
    tokenizer.save_pretrained(out)
    save_mixture(trainer.master, out)
    (out / "heldout.txt").write_text(held_out_text(entries), "utf-8")
    write_report(out, training_facts(config, trainer.progress), routes)
    checkpoint.unlink()


if __name__ == "__main__":
    main()
