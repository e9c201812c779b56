"""Services that die, hang or fail: noticed, replaced, their requests sent again."""
