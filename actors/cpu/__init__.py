"""The CPU service: cold neurons of decode steps and of prompts, in memory or on storage."""

import os

# OpenMP's threads otherwise spin for milliseconds after every loop of torch's, on cores that the
# matmul needs: 120 instead of 170 prompt tokens a second. It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
