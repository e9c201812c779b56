"""How many neurons of each layer work for a token: `python sparsity.py [MODEL [PROMPT]]`.

With `mode="exact"` up and down rows are computed only of neurons whose gate fires: what is counted.
"""

import sys

import numpy as np

from hotcold import LLM, SamplingParams


def main(model: str | None = None, prompt: str = "Return the path of") -> None:
    """Print each layer's share, and what an answer took."""
    with LLM(model) as llm:
        llm.telemetry()  # from now on neurons are counted
        result = llm.generate(prompt, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
        counted = llm.telemetry()["map"]
    fired = np.array(counted["mean"]["computed"]).sum(axis=1)  # of each layer, for a token
    sizes = [sum(buckets) for buckets in counted["neurons"]]
    for layer, share in enumerate(fired / sizes):
        print(f"layer {layer:2}  {share:6.1%}  {'#' * round(50 * share)}")
    print(f"{result.work.neurons_computed:.1%} of all neurons in {counted['steps']} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
