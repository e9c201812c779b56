"""Having a system: one of this process's own, or a client of a server that runs or is started."""
