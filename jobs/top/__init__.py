"""`hotcold top`."""
