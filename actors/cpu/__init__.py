"""The CPU service's work: cold neurons of a step and of a prompt."""

import os

# OpenMP's threads otherwise spin for milliseconds after every loop of torch's, on cores that the
# products need: 120 instead of 170 prompt tokens a second. It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
