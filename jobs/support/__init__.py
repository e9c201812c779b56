"""What several commands share: options, output, progress, text files."""
