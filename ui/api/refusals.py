"""What is wrong with a request, in a sentence that names the field."""

from typing import Any

from pydantic import ValidationError

from ui.api.errors import ApiError

# Fields that many clients send with the value that does nothing; another one would change answers.
UNSUPPORTED = frozenset(("best_of", "logit_bias", "repetition_penalty", "suffix"))
_MOST_NAME_CHARS = 50  # of a field
_TYPE_NAMES = ("str", "bool", "int")  # of a union's members, beside the fields' names
_SENTENCES = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "int_type": "must be a whole number",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "model_type": "must be an object",
    "string_too_long": "may have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_type": "must be a text",
    "too_long": "may hold at most {max_length} items",
    "too_short": "must not be empty",
}


def refusal(error: ValidationError) -> ApiError:
    """The deepest of the problems: where a union failed, its fields have one for each member."""
    problems = error.errors(include_url=False, include_input=False)
    problem: Any = max(problems, key=lambda one: len(one["loc"]))
    names = [
        part
        for part in problem["loc"]
        if isinstance(part, int) or (part.isidentifier() and part not in _TYPE_NAMES)
    ]
    param = ".".join(str(name)[:_MOST_NAME_CHARS] for name in names) or None
    return ApiError(400, ascii(_sentence(problem, param))[1:-1], param=param)


def _sentence(problem: Any, param: str | None) -> str:
    text = problem["msg"].removeprefix("Value error, ")
    if param is None:
        return "the request must be an object" if problem["type"] == "model_type" else text
    if param.split(".")[0] in UNSUPPORTED:
        return f"{param.split('.')[0]} is not supported; leave it out"
    known = _SENTENCES.get(problem["type"])
    return f"{param} {known.format(**problem.get('ctx', {}))}" if known else f"{param}: {text}"
