"""The commands of `hotcold`, a file each."""
