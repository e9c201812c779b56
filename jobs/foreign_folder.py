"""Imported first by each main: the command's process takes no modules or settings of the folder.

Only a command does so, which may be started in any folder. A process that imports the library looks
for modules as its own program wants.
"""

from hotcold.model.current_folder import ignore_local_modules, ignore_local_settings

ignore_local_modules()
ignore_local_settings()
