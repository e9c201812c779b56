"""Many systems behind one door, on Ray Serve: replicas, routing, streams that outlive theirs."""
