"""Offline, without Ray: what this machine has, how neurons fire, where each is kept."""
