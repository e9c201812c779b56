"""Files of bundles: a neuron's rows side by side, for models larger than memory."""
