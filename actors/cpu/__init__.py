"""The CPU service's work: cold neurons of a step and of a prompt."""
