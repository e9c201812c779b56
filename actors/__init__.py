"""The running system: a driver, a GPU service, CPU services, and the exchange between them."""
