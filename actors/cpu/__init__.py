"""The CPU service: cold neurons of decode steps and of prompts, in memory or on storage."""
