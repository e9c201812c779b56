"""`hotcold bench`: what is measured, beside what the hardware allows."""
