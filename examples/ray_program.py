"""One model for all tasks and actors of a Ray program: `python ray_program.py [MODEL]`.

An LLM that is made where Ray runs is handed on like any other value: tasks and actors, on whichever
host, get a handle on the one system. They need no CPU of their own while they wait for it.
"""

import sys

import ray

from hotcold import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=30, temperature=0)


@ray.remote(num_cpus=0)
def summary(llm: LLM, name: str) -> str:
    """A task that asks."""
    return llm.chat([{"role": "user", "content": f"What does {name} do?"}], PARAMS).text


@ray.remote(num_cpus=0)
class Counter:
    """An actor that asks, several times at once."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    async def num_tokens(self, prompt: str) -> int:
        """How long an answer is."""
        return len((await self.llm.agenerate(prompt, PARAMS)).token_ids)


def main(model: str | None = None) -> None:
    """Print what tasks and an actor get."""
    ray.init(log_to_driver=False, include_dashboard=False)
    with LLM(model) as llm:
        names = ["textwrap.dedent", "os.path.join"]
        for name, text in zip(
            names, ray.get([summary.remote(llm, one) for one in names]), strict=True
        ):
            print(f"{name}: {text}")
        counter = Counter.remote(llm)  # type: ignore[attr-defined]
        print(ray.get([counter.num_tokens.remote(name) for name in names]))


if __name__ == "__main__":
    main(*sys.argv[1:])
