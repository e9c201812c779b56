"""A model that calls a Python function: `python tools.py [MODEL]`."""

import json
import sys
from typing import Any

from hotcold import LLM, SamplingParams

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
        },
    },
}


def main(model: str | None = None) -> None:
    """Let the model call `add`, and go on with what it returns."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 and 25?"}]
    params = SamplingParams(temperature=0, max_tokens=80)
    with LLM(model) as llm:
        result = llm.chat(messages, params, tools=[TOOL], tool_choice="add")
        messages.append(result.message)
        for call in result.tool_calls:
            total = sum(call.parsed_arguments.values())
            print(f"{call.name}({call.arguments}) = {total}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(total)})
        print(llm.chat(messages, params).text)


if __name__ == "__main__":
    main(*sys.argv[1:])
