"""Tool calls: what requests say of tools, the grammar of calls, calls read from answers."""
