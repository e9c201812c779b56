"""Answer each line of a file, as many at once as the system runs: `python batch.py [FILE [MODEL]]`.

Answers stand in the order of the lines. A line that cannot be answered costs no other one.
"""

import sys
from pathlib import Path

from hotcold import LLM, SamplingParams

QUESTIONS = """\
What does textwrap.dedent do?
What does os.path.join do?
What does random.shuffle do?"""


def main(file: str | None = None, model: str | None = None) -> None:
    """Print a line for each answer."""
    questions = (Path(file).read_text() if file else QUESTIONS).splitlines()
    conversations = [[{"role": "user", "content": question}] for question in questions]
    with LLM(model) as llm:
        results = llm.chat(conversations, SamplingParams(max_tokens=60, temperature=0))
    num_tokens = 0
    for question, result in zip(questions, results, strict=True):
        print(f"{question}\n    {result.error or result.text}")
        num_tokens += sum(len(one.token_ids) for one in result.outputs)
    print(f"{len(results)} answers, {num_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
