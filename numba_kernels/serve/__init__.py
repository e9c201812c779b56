"""The loops of a service's threads: doorbells, requests, work shared while it is done."""
