"""Which service holds which neurons: by a plan, by a profile, by dealing them in turn."""
