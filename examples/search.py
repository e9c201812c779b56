"""Which of some texts is nearest to a query, by embeddings: `python search.py [QUERY [MODEL]]`."""

import sys

from hotcold import LLM

TEXTS = [
    "Return the absolute path of a file.",
    "Remove leading whitespace from every line of a text.",
    "Open a connection to a host and port.",
    "Return the square root of a number.",
    "Sort the items of a list in place.",
]


def main(query: str = "Remove whitespace from a string.", model: str | None = None) -> None:
    """Print the texts, the nearest first, with their cosines."""
    with LLM(model) as llm:
        vectors = llm.embed(TEXTS, normalize=True)
        cosines = vectors @ llm.embed(query, normalize=True)
    print(query)
    for index in cosines.argsort()[::-1]:
        print(f"{cosines[index]:6.3f}  {TEXTS[index]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
