"""What a stage computes, and weights of others."""
