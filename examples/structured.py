"""Answers of a given form: `python structured.py [MODEL]`. A grammar holds each token to it."""

import json
import sys

from hotcold import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "returns": {"enum": ["str", "int", "bool", "None"]},
        "num_arguments": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "returns", "num_arguments"],
}


def main(model: str | None = None) -> None:
    """Print an object, a choice and a text that matches a pattern."""
    with LLM(model) as llm:
        held = SamplingParams(json_schema=SCHEMA, max_tokens=80, temperature=0)
        described = llm.generate("os.path.join", held)
        print(json.loads(described.text))
        chosen = llm.generate("Is 7 odd? ", SamplingParams(choice=["yes", "no"], seed=1))
        print(chosen.text)
        date = llm.generate("The date is ", SamplingParams(regex=r"\d{4}-\d\d-\d\d", seed=1))
        print(date.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
