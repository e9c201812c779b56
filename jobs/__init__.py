"""Mains: the command line, and what `ray job submit` runs."""

from hotcold.model.current_folder import ignore_modules_there, ignore_settings_there

ignore_modules_there()
ignore_settings_there()
