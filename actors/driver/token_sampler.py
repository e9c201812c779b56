"""Draws a request's tokens: its random numbers, its filters, and what they remember."""

import numpy as np

from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.decode.filters import sample_filtered, sample_mirostat
from hotcold.numba_kernels.decode.sampling import sample


class TokenSampler:
    """One request's. How many random numbers a token takes follows from the options alone."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = np.random.default_rng(params.seed)
        self._mu = 2 * params.mirostat_tau
        self._has_xtc = params.xtc_probability > 0 and not params.mirostat
        self._is_filtered = self._has_xtc or params.top_n_sigma > 0 or params.typical_p < 1

    def draw(self, logits: np.ndarray) -> int:
        """The next token, of logits (V,). Errors: ValueError where they hold a NaN."""
        params = self._params
        uniform = float(self._random.random())
        if params.mirostat:
            return self._mirostat(logits, uniform)
        shared = {"temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p}
        if not self._is_filtered:
            return sample(logits, top_k=params.top_k, uniform=uniform, **shared)
        return sample_filtered(
            logits,
            top_k=params.top_k,
            top_n_sigma=params.top_n_sigma,
            typical_p=params.typical_p,
            xtc_probability=params.xtc_probability,
            xtc_threshold=params.xtc_threshold,
            uniform=uniform,
            chance=float(self._random.random()) if self._has_xtc else 0.0,
            **shared,
        )

    def _mirostat(self, logits: np.ndarray, uniform: float) -> int:
        params = self._params
        token_id, surprise = sample_mirostat(
            logits,
            version=params.mirostat,
            temperature=params.temperature,
            mu=self._mu,
            uniform=uniform,
        )
        self._mu -= params.mirostat_eta * (surprise - params.mirostat_tau)
        return token_id
