"""How requests reach services and replies return: doorbells, actor calls, relays."""
