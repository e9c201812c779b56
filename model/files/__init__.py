"""Files of a model on disk: found, checked, read and written."""
