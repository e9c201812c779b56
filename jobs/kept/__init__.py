"""Systems that stay: which run on this machine, how a command finds, asks and starts one."""
