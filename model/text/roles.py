"""Roles of a conversation's messages, by OpenAI's names."""

# What chat templates call them, where it is another name.
TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
# Whose messages have a content: an answer may be calls alone, and a tool may return nothing.
ALWAYS_SAY = ("system", "developer", "user")
