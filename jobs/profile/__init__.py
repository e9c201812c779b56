"""The run of `hotcold profile`: its files, its state, what it reports."""
