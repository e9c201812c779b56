"""The running system: a driver, a GPU service, CPU services, and the exchange between them."""

from hotcold.model.current_folder import ignore_settings_there

ignore_settings_there()
