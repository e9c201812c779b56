"""How the embedded demo model was made: corpus, training, sparsity, report."""
