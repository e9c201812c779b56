"""How services are asked and answer: doorbells, actor calls, relays; watch and recovery."""
