"""What a step of few tokens computes, limited by how fast weights are read."""
